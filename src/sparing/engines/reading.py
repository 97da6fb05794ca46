"""What the host reads of a round once it is over: numbers of its reports, losses, and whether its requirements hold.

All of it is on its way to the host in one go, while the next round may begin.
"""

from collections import ChainMap
from collections.abc import Callable

from torch import Tensor

from sparing.core.context import Requirement, judge
from sparing.core.method import Report
from sparing.core.ops import to_host


def read_later(
    requirements: list[Requirement], losses: list[Tensor], *reports: Report
) -> Callable[[], tuple[list[Tensor], dict[str, float]]]:
    """What this gives judges the requirements, then hands out the losses and the numbers that are any."""
    parts = [part for report in reports for part in (report.maps if isinstance(report, ChainMap) else [report])]
    ready = [(i, part) for i, part in enumerate(parts) if isinstance(part, dict)]  # others are still being worked out
    numbers = {(i, name): x for i, part in ready for name, x in part.items() if isinstance(x, Tensor)}
    arrived = to_host([*losses, *numbers.values(), *(requirement.holds for requirement in requirements)])

    def read() -> tuple[list[Tensor], dict[str, float]]:
        values = iter(arrived())
        lost = [next(values) for _ in losses]
        found = {place: float(next(values)) for place in numbers}
        try:
            for requirement, fine in zip(requirements, values, strict=True):
                judge(requirement, bool(fine.all()))
        finally:
            requirements.clear()  # they know the round that knows them
        merged = {}
        for i, part in reversed(list(enumerate(parts))):  # of two with the same name the first counts
            merged |= {name: found[i, name] if (i, name) in found else float(x) for name, x in part.items()}
        return lost, {name: x for name, x in merged.items() if x == x}

    return read
