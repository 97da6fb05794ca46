"""Ranks as the workers of a sweep: each does one run at a time, alone, and the first also hands them out."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sparing.ranks.meeting import Meeting
from sparing.runs.study import study_from
from sparing.sweeps.judge import Judge
from sparing.sweeps.processes import ChildProcess, RunAll, SweepRun, refuse_failed_run

_TICK_SECONDS = 0.25
_END = "end"


class _RankWorker:
    """Another rank, as the first one sees it."""

    def __init__(self, meeting: Meeting, rank: int):
        self.store, self.rank, self.given = meeting.store, rank, 0

    def begin(self, work: SweepRun) -> None:
        said = [str(work.folder.absolute()), work.study.model_dump(mode="json"), list(work.bars.items()), work.judge]
        self.store.set(_order_key(self.rank, self.given), json.dumps(said))

    def end(self) -> tuple[int | None, str | None] | None:
        """What came of it; None: it is under way."""
        key = _report_key(self.rank, self.given)
        if not self.store.check([key]):
            return None
        self.given += 1
        code, why = json.loads(self.store.get(key))
        return code, why

    def stop(self) -> None:
        pass  # it ends with the first rank


class _OwnWorker:
    """The first rank itself."""

    def __init__(self) -> None:
        self.child: ChildProcess | None = None

    def begin(self, work: SweepRun) -> None:
        self.child = ChildProcess(work)

    def end(self) -> tuple[int | None, str | None] | None:
        if self.child is None or self.child.process.is_alive():
            return None
        return self.child.end()

    def stop(self) -> None:
        if self.child is not None:
            self.child.process.terminate()
            self.child.process.join()


def run_on_ranks(meeting: Meeting) -> RunAll:
    """On the first rank."""
    workers = [_OwnWorker(), *(_RankWorker(meeting, rank) for rank in range(1, meeting.place.world))]

    def run_all(
        source: Callable[[], SweepRun | None],
        jobs: int,
        finished: Callable[[SweepRun], None],
        tick: Callable[[list[SweepRun]], None],
    ) -> None:
        busy: dict[int, SweepRun] = {}
        try:
            while True:
                for i, worker in enumerate(workers):
                    if i not in busy and (work := source()) is not None:
                        worker.begin(work)
                        busy[i] = work
                if not busy:
                    return
                time.sleep(_TICK_SECONDS)
                for i, end in [(i, workers[i].end()) for i in busy]:
                    if end is not None:
                        refuse_failed_run(busy[i], *end)
                        finished(busy.pop(i))
                tick(list(busy.values()))
        finally:
            workers[0].stop()

    return run_all


def work_for_first(meeting: Meeting) -> None:
    """On every other rank: do what the first one says, until it has nothing more."""
    if torch.cuda.is_available():
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(meeting.place.local_rank % torch.cuda.device_count()))
    rank, number = meeting.place.rank, 0
    while (said := _next_order(meeting, number)) != _END:
        folder, study, bars, judge = said
        work = SweepRun(Path(folder), study_from(study), {int(t): bar for t, bar in bars}, Judge(*judge))
        report = ChildProcess(work).end()
        meeting.store.set(_report_key(rank, number), json.dumps(report))
        number += 1


def dismiss_workers(meeting: Meeting) -> None:
    for rank in range(1, meeting.place.world):
        given = 0
        while meeting.store.check([_order_key(rank, given)]):
            given += 1
        meeting.store.set(_order_key(rank, given), json.dumps(_END))


def _next_order(meeting: Meeting, number: int) -> Any:
    key = _order_key(meeting.place.rank, number)
    while not meeting.store.check([key]):
        time.sleep(_TICK_SECONDS)
    return json.loads(meeting.store.get(key))


def _order_key(rank: int, number: int) -> str:
    return f"sparing/sweep/{rank}/{number}/order"


def _report_key(rank: int, number: int) -> str:
    return f"sparing/sweep/{rank}/{number}/report"
