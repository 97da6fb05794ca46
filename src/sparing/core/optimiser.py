"""How a client's steps are taken from gradients, and how long they are in each round."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from sparing.core.errors import ConfigError, nearest_name


class Schedule(NamedTuple):
    """The learning rate over rounds, as a share of the optimiser's: a pure function of the round and of all rounds."""

    kind: str = "constant"  # or "cosine", "step", "exponential"
    warmup: int = 0  # rounds in which it rises evenly to the whole
    every: int = 10  # rounds from step to step
    factor: float = 0.1  # by which a step multiplies, or "exponential" every round
    floor: float = 0.0  # where "cosine" ends

    def share(self, round: int, rounds: int) -> float:
        """In this round, counted from 1; what lies outside the run is as its first or last round.

        >>> [round(Schedule("cosine").share(t, 4), 3) for t in (1, 2, 3, 4)]
        [1.0, 0.854, 0.5, 0.146]
        >>> [Schedule("step", warmup=2, every=2, factor=0.5).share(t, 7) for t in range(1, 8)]
        [0.5, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25]
        """
        now = max(1, min(round, rounds))
        if now <= self.warmup:
            return now / self.warmup
        past = now - self.warmup - 1
        if self.kind == "cosine":
            turn = math.pi * past / max(1, rounds - self.warmup)
            return self.floor + (1 - self.floor) * (1 + math.cos(turn)) / 2
        if self.kind == "step":
            return self.factor ** (past // self.every)
        return self.factor**past if self.kind == "exponential" else 1.0


class Optimiser(NamedTuple):
    """What makes steps of gradients."""

    name: str = "sgd"  # or "adam", "adamw", or a class of torch.optim
    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False  # momentum looks one step ahead
    weight_decay: float = 0.0
    clip: float | None = None  # largest gradient norm
    options: tuple[tuple[str, Any], ...] = ()  # of a class of torch.optim, by name
    schedule: Schedule | None = None  # of lr over rounds; None: it stays

    @property
    def known_everywhere(self) -> bool:
        """Whether every path has it; else it is torch's own class, which knows one client at a time."""
        return self.name in ("sgd", "adam", "adamw") and not self.options

    def at(self, round: int, rounds: int) -> "Optimiser":
        """As it is in this round: nothing is left to schedule.

        >>> Optimiser(lr=0.5, schedule=Schedule("exponential", factor=0.5)).at(2, 9).lr
        0.25
        """
        if self.schedule is None:
            return self
        return self._replace(lr=self.lr * self.schedule.share(round, rounds), schedule=None)

    @property
    def asked_settings(self) -> dict[str, Any]:
        """What its class must take, beside the learning rate and weight decay."""
        asked = {"momentum": self.momentum, "nesterov": self.nesterov}
        return {name: value for name, value in asked.items() if value} | dict(self.options)


def refuse_unknown_optimiser(optimiser: Optimiser, known: Mapping[str, Iterable[str]], where: str) -> None:
    """A class that is none of these, or a setting that it does not take. `known`: what each takes, by name."""
    if optimiser.name not in known:
        raise ConfigError(f"{where}no optimiser is called {optimiser.name!r}: {nearest_name(optimiser.name, known)}")
    takes = list(known[optimiser.name])
    for name in optimiser.asked_settings:
        if name not in takes:
            raise ConfigError(f"{where}{optimiser.name} knows no {name!r}: {nearest_name(name, takes)}")
