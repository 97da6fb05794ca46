"""`sparing new`, `run`, `resume`, `pfllib`, `demo`: what trains."""

from pathlib import Path
from typing import Annotated

import typer

from sparing.cli.commands.shared import AsJson, StudyItems, Trust, Verbose, print_json
from sparing.cli.trackers import TRACKERS

_TrackOption = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Also log to a tracker: {', '.join(TRACKERS)}; may be repeated.", autocompletion=lambda: list(TRACKERS)
    ),
]


def new_command(name: Annotated[Path, typer.Argument(help="Folder to create.")]) -> None:
    """Write a commented study file and a README into a new folder.

    \b
    sparing new first && cd first && sparing run study.yaml
    """
    from sparing.cli import new_study as template

    for path in template.write_new_study(name):
        typer.echo(f"wrote {path}")
    typer.echo(template.next_steps(name))


def run_command(
    items: StudyItems = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. [default: runs/TASK-METHOD-SEED]")] = None,
    track: _TrackOption = None,
    trust: Trust = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Train a study, and write a run folder.

    \b
    sparing run                                  every key has a default
    sparing run study.yaml rounds=50 local.lr=0.1 --out runs/first
    sparing run 'method=[psfed, {topk: {ratio: 0.05}}, int8]' sample=5
    sparing run secure=true                      the server learns sums alone
    torchrun --nproc-per-node 4 -m sparing run study.yaml      on several GPUs or machines
    """
    from sparing.cli.study_files import free_run_folder, study_from_items

    study = study_from_items(items, trust)
    from sparing.cli.watched_runs import begin_run, finish_run

    finish_run(begin_run(study, out or free_run_folder(study)), as_json, track or ())


def resume_command(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    track: _TrackOption = None,
    trust: Trust = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Continue the run in a folder from its last checkpoint.

    \b
    sparing resume runs/digits-fedavg-0
    """
    from sparing.cli.study_files import admit_code
    from sparing.cli.watched_runs import finish_run, study_in_folder, take_up_run
    from sparing.runs.own_code import CODE_FOLDER

    admit_code(study_in_folder(folder), trust, copies=folder / CODE_FOLDER)
    finish_run(take_up_run(folder), as_json, track or ())


def forget_command(folder: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Delete the secret seed of a run's noise; afterwards nobody can repeat or resume the run.

    \b
    sparing forget runs/digits-dp-0
    """
    from sparing.cli.watched_runs import study_in_folder
    from sparing.runs.privacy.secret import SECRET_FILE as SECRET
    from sparing.runs.privacy.secret import forget_secret as delete_secret

    study_in_folder(folder)
    if delete_secret(folder):
        typer.echo(f"deleted {folder / SECRET}: nobody can repeat or resume this run, or remove its noise")
    else:
        typer.echo(f"{folder} holds no secret")


def pfllib_command(flags: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Run a study given by PFLlib's flags, and write its H5 result files."""
    from sparing.cli.pfllib_flags import study_from_flags

    said = study_from_flags(flags or [])
    from sparing.cli.pfllib_runs import run_pfllib

    run_pfllib(said)


def demo_command(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per method.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the split, the initial model and all sampling.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compare FedAvg with seven ways to send less, on handwritten digits."""
    from rich.console import Console

    from sparing.cli import demo as demonstration

    if as_json:
        print_json(demonstration.demo_json(demonstration.run_demo_silently(rounds, seed)))
        return
    console = Console()
    demonstration.run_demo(rounds, seed, console)
    demonstration.print_demo_footer(rounds, console)
