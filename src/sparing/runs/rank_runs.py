"""A run that several ranks play: how this process finds the others, and what all of them agree on before round 1."""

import atexit
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sparing.core.errors import ConfigError
from sparing.engines.engine import Job
from sparing.ranks.agreement import code_facts, refuse_disagreement
from sparing.ranks.group import Ranks, open_ranks
from sparing.ranks.meeting import Meeting
from sparing.ranks.rank_place import rank_place
from sparing.runs.identity import run_identity
from sparing.runs.plan.settle import SettledPlan, study_device
from sparing.runs.study import PlanSection, Study


@cache
def process_meeting() -> Meeting | None:
    """Where this process meets other ranks; None: it is alone."""
    place = rank_place(os.environ)
    return Meeting(place) if place else None


@cache
def _open_once(device: torch.device) -> Ranks:
    meeting = process_meeting()
    assert meeting is not None
    ranks = open_ranks(meeting, device)
    atexit.register(ranks.close)  # threads of torch that outlive the interpreter abort the process
    return ranks


def process_ranks(study: Study) -> Ranks | None:
    """The ranks that play this study; None: this process alone."""
    meeting = process_meeting()
    if meeting is None:
        return None
    if study.engine != "vector":
        raise ConfigError(
            f"engine is {study.engine}, which is one process, and here are {meeting.place.world} ranks; "
            "set engine=vector, or start it alone"
        )
    return _open_once(_device_of_rank(study.device, meeting.place.local_rank))


def _device_of_rank(name: str, local: int) -> torch.device:
    """Each rank of a machine has a GPU of its own, if there are as many."""
    device = study_device(name)
    return torch.device("cuda", local % torch.cuda.device_count()) if device.type == "cuda" else device


def refuse_idle_ranks(ranks: Ranks, count: int) -> None:
    if ranks.world > count:
        raise ConfigError(
            f"{ranks.world} ranks for {count} clients a round, so that some would have none; start at most {count}"
        )


def agree_on_run(ranks: Ranks, study: Study, job: Job) -> None:
    """Refuse ranks with other code, another study or other data."""
    said = run_identity(study, job)
    names = {"train": "training samples", "test": "test samples"}
    facts = {names.get(name, name): value for name, value in said.items()}
    kind = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu"
    refuse_disagreement(ranks, code_facts() | {"device": kind} | facts)


def agreed_plan(ranks: Ranks, found: SettledPlan) -> PlanSection:
    """One plan for all, of those that ranks have settled on: that by which the slowest of them is fastest."""
    speeds = [[list(way), speed] for way, speed in found.speeds.items()]
    said = ranks.gather_json([found.plan.model_dump(), speeds])
    measured = [{tuple(way): speed for way, speed in some} for _, some in said]

    def slowest(plan: dict[str, Any]) -> float:
        way = plan["path"], plan["chunk"], plan["threads"]
        return min((speeds.get(way, 0.0) for speeds in measured), default=0.0)

    plans = [plan for plan, _ in said]
    return PlanSection(**max(plans, key=slowest))


def agreed_folder(ranks: Ranks | None, out: str | Path | None) -> Path | None:
    """The first rank's: others may have found another one free."""
    if ranks is None or out is None:
        return None if out is None else Path(out)
    return Path(ranks.agreed(str(out)))


def pace_words(seconds: list[float]) -> str:
    """How long each rank worked on a round.

    >>> pace_words([1.0, 3.0])
    ' rank_seconds=1.000,3.000 slowest=1.50x'
    """
    if not seconds:
        return ""
    mean = sum(seconds) / len(seconds)
    shown = ",".join(f"{x:.3f}" for x in seconds)
    return f" rank_seconds={shown} slowest={max(seconds) / mean if mean else 1:.2f}x"
