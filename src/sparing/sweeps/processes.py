"""Runs side by side, each in a process of its own and on one thread.

Ctrl-C reaches the parent alone. It ends the others as a power cut would: their last checkpoints stay, and whoever
starts them again goes on from there.
"""

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparing.core.errors import ConfigError, SparingError, TrainingError
from sparing.ranks.rank_place import RANK_VARIABLES
from sparing.runs.files.run_folder import CONFIG_FILE, FAILED_FILE
from sparing.runs.loop import Logger
from sparing.runs.privacy.secret import delete_secret
from sparing.runs.start import resume, start_run
from sparing.runs.study import Study
from sparing.storage.atomic import write_atomic
from sparing.sweeps.judge import Judge
from sparing.sweeps.pruning import HopelessTrial, ScoreBars, stop_below

_TICK_SECONDS = 0.25  # seconds
_PRELOADED_MODULES = [
    "__main__",
    "sparing.sweeps.processes",
    "sklearn.datasets",
    "torch._dynamo",
]  # imported once, not by every run


class SweepRun(NamedTuple):
    """One run to do."""

    folder: Path
    study: Study
    bars: ScoreBars = {}  # noqa: RUF012  what it is stopped by
    judge: Judge = Judge()


_RunSource = Callable[[], SweepRun | None]
"""The next run to do, asked for when there is room for one; None while there is nothing."""


RunAll = Callable[[_RunSource, int, Callable[[SweepRun], None], Callable[[list[SweepRun]], None]], None]
"""Does runs side by side: see `run_in_processes`."""


def run_in_processes(
    source: _RunSource, jobs: int, finished: Callable[[SweepRun], None], tick: Callable[[list[SweepRun]], None]
) -> None:
    """Do all that the source gives, so many at once. `finished` hears of each, `tick` of what is going on."""
    running: dict[Any, tuple[ChildProcess, SweepRun]] = {}
    try:
        while True:
            while len(running) < jobs and (work := source()) is not None:
                child = ChildProcess(work)
                running[child.process.sentinel] = child, work
            if not running:
                return
            for sentinel in wait(list(running), timeout=_TICK_SECONDS):
                child, work = running.pop(sentinel)
                refuse_failed_run(work, *child.end())
                finished(work)
            tick([work for _, work in running.values()])
    finally:
        for child, _ in running.values():
            child.process.terminate()
        for child, _ in running.values():
            child.process.join()


class ChildProcess:
    """One run in a process of its own."""

    def __init__(self, work: SweepRun):
        context = multiprocessing.get_context("forkserver")  # a fork of a process that has not begun to use threads
        context.set_forkserver_preload(_PRELOADED_MODULES)
        self.said, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_child_process, args=(work, theirs, dict(os.environ)), daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> tuple[int | None, str | None]:
        """Its exit code, and what the library refused in it; waits for it."""
        self.process.join()
        try:
            return self.process.exitcode, self.said.recv() if self.said.poll() else None
        except EOFError:
            return self.process.exitcode, None


def _child_process(work: SweepRun, parent: Any, environment: dict[str, str]) -> None:
    """What the process does, in its parent's environment: that of the process it was forked from may be older."""
    os.environ.update(environment)
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)  # it plays its run alone
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    warnings.showwarning = lambda *said: None  # log.txt has them
    try:
        _train_in_child(work.folder, work.study, stop_below(work.bars, work.judge))
    except SparingError as error:
        parent.send(str(error))


def _train_in_child(folder: Path, study: Study, look: Logger = lambda record: None) -> None:
    """Go on with the run or begin it. Numbers that run away are a result too, and are written down."""
    try:
        if (folder / CONFIG_FILE).exists():
            resume(folder, loggers=[look])
        else:
            start_run(study, out=folder, loggers=[look])
    except (TrainingError, HopelessTrial) as error:
        write_atomic(folder / FAILED_FILE, f"{error}\n".encode())
        if not study.keep_secret:
            delete_secret(folder)


def _exit_with_parent() -> None:
    """A run that nobody waits for would be in the way of the next attempt."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def refuse_failed_run(work: SweepRun, code: int | None, why: str | None) -> None:
    """What the library refused in one run it would refuse in others; so the sweep ends."""
    if why is not None:
        raise ConfigError(f"{work.folder}: {why}")
    if code:
        raise SparingError(f"the run in {work.folder} ended with exit code {code}; see its log.txt, then try again")


def _usable_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_jobs(studies: Sequence[Study]) -> int:
    """As many runs at once as there are cores; one, where runs would share a GPU."""
    gpu = any(s.device.startswith("cuda") or (s.device == "auto" and torch.cuda.is_available()) for s in studies)
    return 1 if gpu else _usable_cores()
