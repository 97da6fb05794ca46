"""A run under the eyes of the user: begun or resumed, watched, and what came of it."""

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from sparing.cli.commands.shared import mention_secrets, print_json
from sparing.cli.interrupt import INTERRUPT
from sparing.cli.progress import RunProgress, watch_progress
from sparing.cli.trackers import tracking
from sparing.cli.wording import method_name, print_result
from sparing.core.errors import CheckpointError
from sparing.ranks.rank_place import rank_place
from sparing.runs.files.run_folder import CONFIG_FILE, ROUNDS_FILE, read_config, saved_round
from sparing.runs.loop import Logger
from sparing.runs.rank_runs import process_ranks
from sparing.runs.results import Record, Result, read_round_row
from sparing.runs.start import resume, start_run
from sparing.runs.study import Study, study_from

RunToWatch = tuple[Path, RunProgress, Callable[[Sequence[Logger]], Result]]
"""The run folder, what to watch, and what trains."""


def begin_run(study: Study, folder: Path) -> RunToWatch:
    progress = RunProgress(_label(study), study.rounds, metrics=study.evaluate.metrics)
    return folder, progress, lambda loggers: start_run(study, out=folder, loggers=loggers, ranks=process_ranks(study))


def take_up_run(folder: Path) -> RunToWatch:
    study = study_in_folder(folder)
    progress = RunProgress(_label(study), study.rounds, _earlier_rounds(folder), study.evaluate.metrics)
    return folder, progress, lambda loggers: resume(folder, loggers=loggers)


def _label(study: Study) -> str:
    place = rank_place(os.environ)
    return method_name(study.method) + (f" on {place.world} ranks" if place else "")


def watch_run(going: RunToWatch, quiet: bool, track: Sequence[str] = ()) -> Result:
    """Run to the end under the eyes of the user, and of the trackers named."""
    folder, progress, go = going
    with INTERRUPT.advising(lambda: _where_it_stands(folder, progress.rounds)), tracking(track, folder) as tell:
        if quiet:
            return go((INTERRUPT.stop_if_asked, tell))
        with watch_progress(progress, Console()) as logger:
            return go((INTERRUPT.stop_if_asked, logger, tell))


def finish_run(going: RunToWatch, as_json: bool, track: Sequence[str]) -> None:
    """Run, then say what came of it."""
    result, folder = watch_run(going, as_json, track), str(going[0])
    if track:
        mention_secrets([going[0]])
    if as_json:
        print_json({**result.summary, "folder": folder})
    else:
        print_result(result, folder, Console())


def study_in_folder(folder: Path) -> Study:
    return study_from(read_config(folder), str(folder / CONFIG_FILE))


def _earlier_rounds(folder: Path) -> list[Record]:
    """The records up to the last checkpoint; none if they cannot be read, which resuming itself will say better."""
    done = saved_round(folder)
    try:
        return [read_round_row(line, {}) for line in (folder / ROUNDS_FILE).read_text().splitlines()[1 : 1 + done]]
    except (OSError, ValueError):
        return []


def _where_it_stands(folder: Path, rounds: int) -> str:
    """What to tell someone who stopped a run."""
    try:
        done = saved_round(folder)
    except CheckpointError as error:
        return str(error)
    if not (folder / CONFIG_FILE).exists():
        return "nothing was written yet"
    saved = f"round {done} of {rounds} is saved" if done else "no round is saved yet"
    return f"{saved}, continue with: sparing resume {shlex.quote(str(folder))}"
