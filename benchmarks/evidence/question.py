"""What a question of the evidence consists of: settings, the rows that are trained in them, and how they are compared.

A row is trained in two stages. `rate`: one seed at learning rates around the setting's own, on validation samples,
until the best of them has a worse one on either side. `final`: all seeds at that rate, judged on the test samples.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Job = dict[str, Any]
"""What is trained, and once it was, what came out of it: a line of a results file."""
NAMES = ("question", "setting", "row", "stage", "rate", "seed")
"""By these a job is known."""


class Setting(NamedTuple):
    """Data, network, clients and rounds, the same for all rows."""

    about: str  # as the page says it
    study: dict[str, Any]  # keys of a study file
    rate: float  # the learning rate from which the search starts
    tuning_rounds: int  # 0: no search, all rows have this rate
    seconds: float  # a round of FedAvg, about, on `device`: for the plan
    device: str = "cpu"
    evaluations: int = 20  # of a run: its curve has so many points


class Row(NamedTuple):
    """One line of a table: a method, and how it departs from its setting."""

    method: list[Any]
    judged: str = "global"  # by this accuracy its rate is chosen and rows are compared: a column of the curve
    study: dict[str, Any] = {}  # noqa: RUF012  other keys, merged into the setting's section by section
    stretch: float = 1.0  # times the setting's rounds
    kept: tuple[str, ...] = ()  # metrics of the last round that are written down


class Claim(NamedTuple):
    """What was claimed, and the function that judges it from what was measured."""

    said: str
    where: str  # who said it
    judge: "Callable[[list[Job]], Finding]"


class Finding(NamedTuple):
    measured: str
    verdict: str


class Question(NamedTuple):
    name: str
    asks: str
    settings: dict[str, Setting]
    rows: dict[str, Row]
    seeds: Sequence[int]
    claims: tuple[Claim, ...] = ()
    within: dict[str, tuple[str, ...]] = {}  # noqa: RUF012  setting -> its rows, where it has not all of them
    seeds_of: dict[str, Sequence[int]] = {}  # noqa: RUF012  setting -> its seeds, where they are others
    reference: str = "FedAvg"
    columns: tuple[str, ...] = ("global", "difference", "up", "down")  # of its table
    figure: str = "differences"  # which one `figures` draws

    def rows_of(self, setting: str) -> dict[str, Row]:
        names = self.within.get(setting, tuple(self.rows))
        return {name: self.rows[name] for name in names}

    def seeds_in(self, setting: str) -> Sequence[int]:
        return self.seeds_of.get(setting, self.seeds)


def mark(job: Job) -> tuple[Any, ...]:
    return tuple(job[name] for name in NAMES)
