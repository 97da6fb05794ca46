"""`sparing new`, `run`, `resume`, `pfllib`, `demo`: what trains."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console

from sparing.cli import demo as demonstration
from sparing.cli import new_study as template
from sparing.cli.commands.shared import (
    AsJson,
    StudyItems,
    Trust,
    Verbose,
    admit_code,
    complain,
    mention_secrets,
    print_json,
)
from sparing.cli.interrupt import INTERRUPT
from sparing.cli.pfllib_flags import study_from_flags
from sparing.cli.progress import RunProgress, watch_progress
from sparing.cli.study_files import earlier_rounds, free_run_folder, split_items, study_in_folder, where_it_stands
from sparing.cli.trackers import TRACKERS, tracking
from sparing.cli.wording import method_name, print_result
from sparing.reports.h5_files import write_h5
from sparing.reports.run_folders import holds_study
from sparing.runs.loop import Logger
from sparing.runs.own_code import CODE_FOLDER
from sparing.runs.privacy.secret import SECRET_FILE as SECRET
from sparing.runs.privacy.secret import forget_secret as delete_secret
from sparing.runs.results import Result
from sparing.runs.start import resume as continue_run
from sparing.runs.start import start_run
from sparing.runs.study import Study, load_study

_RESULTS_FOLDER = Path("results")
_TrackOption = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Also tell a tracker: {', '.join(TRACKERS)}; may be repeated.", autocompletion=lambda: list(TRACKERS)
    ),
]


def new_command(name: Annotated[Path, typer.Argument(help="The folder to make.")]) -> None:
    """Write a commented study file and a README into a new folder.

    \b
    sparing new first && cd first && sparing run study.yaml
    """
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
    """Train, and write a run folder.

    \b
    sparing run                                  every key has a default
    sparing run study.yaml rounds=50 local.lr=0.1 --out runs/first
    sparing run 'method=[psfed, {topk: {ratio: 0.05}}, int8]' sample=5
    """
    path, overrides = split_items(items or [])
    study = load_study(path, overrides)
    admit_code(study, trust, overrides)
    _finish_run(_begin_run(study, out or free_run_folder(study)), as_json, track or ())


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
    admit_code(study_in_folder(folder), trust, copies=folder / CODE_FOLDER)
    _finish_run(_continue_run(folder), as_json, track or ())


def forget_command(folder: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Delete the secret that a run's noise is drawn from; nobody can repeat or resume the run afterwards.

    \b
    sparing forget runs/digits-dp-0
    """
    study_in_folder(folder)
    if delete_secret(folder):
        typer.echo(f"deleted {folder / SECRET}: nobody can repeat or resume this run, or take its noise off")
    else:
        typer.echo(f"{folder} holds no secret")


def pfllib_command(flags: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Run a study given by PFLlib's flags, and write its H5 result files."""
    said = study_from_flags(flags or [])
    if not said.as_json:
        plain = said.study.model_dump(exclude_unset=True)
        typer.echo(f"{said.algorithm} on {said.dataset}, as a study:\n\n{yaml.safe_dump(plain, sort_keys=False)}")
        for note in said.notes:
            complain(f"note: {note}")
    results, names = [], (said.dataset, said.algorithm, said.goal)
    paths: list[Path] = []
    for i in range(said.times):
        folder, study = said.folder(i), said.of_run(i)
        there = holds_study(study, folder, "name this one differently with -go")
        if not (said.as_json or Console().is_terminal):
            typer.echo(
                f"run {i + 1} of {said.times}: {study.rounds} rounds, to {folder}; a line follows every tenth of them"
            )
        going = _continue_run(folder) if there else _begin_run(study, folder)
        results.append(_watch_run(going, said.as_json))
        if not said.as_json:
            print_result(results[-1], str(folder), Console())
        paths.append(write_h5(_RESULTS_FOLDER, *names, i, [results[-1].table]))
    paths.append(write_h5(_RESULTS_FOLDER, *names, "all", [result.table for result in results]))
    if said.as_json:
        runs = [{**result.summary, "folder": str(said.folder(i))} for i, result in enumerate(results)]
        print_json({"study": said.study.model_dump(), "runs": runs, "files": [str(path) for path in paths]})
    else:
        for path in paths:
            typer.echo(f"wrote {path}")


def demo_command(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each method.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Of the split, the model and every draw.")] = 0,
    as_json: AsJson = False,
) -> None:
    """FedAvg against seven ways to send less, on handwritten digits."""
    if as_json:
        print_json(demonstration.demo_json(demonstration.run_demo_silently(rounds, seed)))
        return
    console = Console()
    demonstration.run_demo(rounds, seed, console)
    demonstration.print_demo_footer(rounds, console)


_RunToWatch = tuple[Path, RunProgress, Callable[[Sequence[Logger]], Result]]
"""The run folder, what to watch, and what trains."""


def _begin_run(study: Study, folder: Path) -> _RunToWatch:
    progress = RunProgress(method_name(study.method), study.rounds)
    return folder, progress, lambda loggers: start_run(study, out=folder, loggers=loggers)


def _continue_run(folder: Path) -> _RunToWatch:
    study = study_in_folder(folder)
    progress = RunProgress(method_name(study.method), study.rounds, earlier_rounds(folder))
    return folder, progress, lambda loggers: continue_run(folder, loggers=loggers)


def _watch_run(going: _RunToWatch, quiet: bool, track: Sequence[str] = ()) -> Result:
    """Run to the end under the eyes of the user, and of the trackers named."""
    folder, progress, go = going
    with INTERRUPT.advising(lambda: where_it_stands(folder, progress.rounds)), tracking(track, folder) as tell:
        if quiet:
            return go((tell,))
        with watch_progress(progress, Console()) as logger:
            return go((logger, tell))


def _finish_run(going: _RunToWatch, as_json: bool, track: Sequence[str]) -> None:
    """Run, then say what came of it."""
    result, folder = _watch_run(going, as_json, track), str(going[0])
    if track:
        mention_secrets([going[0]])
    if as_json:
        print_json({**result.summary, "folder": folder})
    else:
        print_result(result, folder, Console())
