"""`sparing new`, `run`, `resume`, `pfllib`, `demo`: what trains."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console

from sparing.run.config import Study, load_study
from sparing.run.gather import is_there
from sparing.run.h5 import write_run
from sparing.run.loop import Logger
from sparing.run.results import Result
from sparing.run.secret import FILE as SECRET
from sparing.run.secret import forget as delete_secret
from sparing.run.start import resume as continue_run
from sparing.run.start import start
from sparing.ui import demo as demonstration
from sparing.ui import new as template
from sparing.ui.commands.common import AsJson, StudyItems, Verbose, complain, mention_secrets, print_json
from sparing.ui.folders import earlier_rounds, free_folder, split_items, study_of, where_it_stands
from sparing.ui.interrupt import INTERRUPT
from sparing.ui.live import Progress, watching
from sparing.ui.pfllib import asked
from sparing.ui.text import method_name, print_result
from sparing.ui.trackers import TRACKERS, tracking

RESULTS = Path("results")
Track = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Also tell a tracker: {', '.join(TRACKERS)}; may be repeated.", autocompletion=lambda: list(TRACKERS)
    ),
]


def new(name: Annotated[Path, typer.Argument(help="The folder to make.")]) -> None:
    """Write a commented study file and a README into a new folder.

    \b
    sparing new first && cd first && sparing run study.yaml
    """
    for path in template.new(name):
        typer.echo(f"wrote {path}")
    typer.echo(template.next_steps(name))


def run(
    items: StudyItems = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. [default: runs/TASK-METHOD-SEED]")] = None,
    track: Track = None,
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
    finish(begun(study, out or free_folder(study)), as_json, track or ())


def resume(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    track: Track = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Continue the run in a folder from its last checkpoint.

    \b
    sparing resume runs/digits-fedavg-0
    """
    finish(continued(folder), as_json, track or ())


def forget(folder: Annotated[Path, typer.Argument(help="A run folder.")]) -> None:
    """Delete the secret that a run's noise is drawn from; nobody can repeat or resume the run afterwards.

    \b
    sparing forget runs/digits-dp-0
    """
    study_of(folder)
    if delete_secret(folder):
        typer.echo(f"deleted {folder / SECRET}: nobody can repeat or resume this run, or take its noise off")
    else:
        typer.echo(f"{folder} holds no secret")


def pfllib(flags: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Run a study given by PFLlib's flags, and write its H5 result files."""
    said = asked(flags or [])
    if not said.as_json:
        plain = said.study.model_dump(exclude_unset=True)
        typer.echo(f"{said.algorithm} on {said.dataset}, as a study:\n\n{yaml.safe_dump(plain, sort_keys=False)}")
        for note in said.notes:
            complain(f"note: {note}")
    results, names = [], (said.dataset, said.algorithm, said.goal)
    paths: list[Path] = []
    for i in range(said.times):
        folder, study = said.folder(i), said.of_run(i)
        there = is_there(study, folder, "name this one differently with -go")
        if not (said.as_json or Console().is_terminal):
            typer.echo(
                f"run {i + 1} of {said.times}: {study.rounds} rounds, to {folder}; a line follows every tenth of them"
            )
        going = continued(folder) if there else begun(study, folder)
        results.append(watched(going, said.as_json))
        if not said.as_json:
            print_result(results[-1], str(folder), Console())
        paths.append(write_run(RESULTS, *names, i, [results[-1].table]))
    paths.append(write_run(RESULTS, *names, "all", [result.table for result in results]))
    if said.as_json:
        runs = [{**result.summary, "folder": str(said.folder(i))} for i, result in enumerate(results)]
        print_json({"study": said.study.model_dump(), "runs": runs, "files": [str(path) for path in paths]})
    else:
        for path in paths:
            typer.echo(f"wrote {path}")


def demo(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each method.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Of the split, the model and every draw.")] = 0,
    as_json: AsJson = False,
) -> None:
    """FedAvg against seven ways to send less, on handwritten digits."""
    if as_json:
        print_json(demonstration.as_json(demonstration.silent(rounds, seed)))
        return
    console = Console()
    demonstration.demo(rounds, seed, console)
    demonstration.print_footer(rounds, console)


Going = tuple[Path, Progress, Callable[[Sequence[Logger]], Result]]
"""The run folder, what to watch, and what trains."""


def begun(study: Study, folder: Path) -> Going:
    progress = Progress(method_name(study.method), study.rounds)
    return folder, progress, lambda loggers: start(study, out=folder, loggers=loggers)


def continued(folder: Path) -> Going:
    study = study_of(folder)
    progress = Progress(method_name(study.method), study.rounds, earlier_rounds(folder))
    return folder, progress, lambda loggers: continue_run(folder, loggers=loggers)


def watched(going: Going, quiet: bool, track: Sequence[str] = ()) -> Result:
    """Run to the end under the eyes of the user, and of the trackers named."""
    folder, progress, go = going
    with INTERRUPT.advising(lambda: where_it_stands(folder, progress.rounds)), tracking(track, folder) as tell:
        if quiet:
            return go((tell,))
        with watching(progress, Console()) as logger:
            return go((logger, tell))


def finish(going: Going, as_json: bool, track: Sequence[str]) -> None:
    """Run, then say what came of it."""
    result, folder = watched(going, as_json, track), str(going[0])
    if track:
        mention_secrets([going[0]])
    if as_json:
        print_json({**result.summary, "folder": folder})
    else:
        print_result(result, folder, Console())
