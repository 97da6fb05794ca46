"""What the host reads of a round once it is over: numbers of its reports, losses, and whether its requirements hold.

All of it is on its way to the host in one go, while the next round may begin.
"""

from collections import ChainMap
from collections.abc import Callable

from torch import Tensor

from sparing.core.context import Requirement, judge
from sparing.core.method import Report, Summary
from sparing.core.ops import to_host


def read_later(
    requirements: list[Requirement], losses: list[Tensor], *reports: Report
) -> Callable[[], tuple[list[Tensor], dict[str, float]]]:
    """What this gives judges the requirements, then hands out the losses and the numbers that are any."""
    parts = [part for report in reports for part in (report.maps if isinstance(report, ChainMap) else [report])]
    wanted = [_tensors_in_report(part) for part in parts]
    holds = [requirement.holds for requirement in requirements]
    arrived = to_host([*losses, *(x for some in wanted for x in some), *holds])

    def read() -> tuple[list[Tensor], dict[str, float]]:
        values = iter(arrived())
        lost, found = [next(values) for _ in losses], [[next(values) for _ in some] for some in wanted]
        try:
            for requirement, fine in zip(requirements, values, strict=True):
                judge(requirement, bool(fine.all()))
        finally:
            requirements.clear()  # they know the round that knows them
        numbers: dict[str, float] = {}
        for part, tensors in zip(reversed(parts), reversed(found), strict=True):
            numbers |= _numbers_of(part, tensors)
        return lost, {name: x for name, x in numbers.items() if x == x}

    return read


def _tensors_in_report(part: Report) -> list[Tensor]:
    """What must be brought to the host; of a report that is still being worked out, nothing."""
    if isinstance(part, Summary):
        return list(part.tensors)
    return [x for x in part.values() if isinstance(x, Tensor)] if isinstance(part, dict) else []


def _numbers_of(part: Report, tensors: list[Tensor]) -> dict[str, float]:
    if isinstance(part, Summary):
        return part.read(tensors)
    there = iter(tensors)
    return {name: float(next(there, x) if isinstance(x, Tensor) else x) for name, x in part.items()}
