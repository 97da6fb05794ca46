"""Learning rates over rounds, by the names that a study has for them."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt

from sparing.core.errors import ConfigError, nearest_name
from sparing.core.optimiser import Schedule
from sparing.data.options import name_and_options, validate_options


def _constant() -> Schedule:
    return Schedule()


def _cosine(floor: Annotated[float, Field(ge=0, le=1)] = 0.0) -> Schedule:
    """Down half a wave to `floor`, a share of the learning rate."""
    return Schedule("cosine", floor=floor)


def _step(every: PositiveInt = 10, factor: PositiveFloat = 0.1) -> Schedule:
    """Multiplied by `factor` every so many rounds."""
    return Schedule("step", every=every, factor=factor)


def _exponential(factor: PositiveFloat = 0.99) -> Schedule:
    """Multiplied by `factor` every round."""
    return Schedule("exponential", factor=factor)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": _constant,
    "cosine": _cosine,
    "step": _step,
    "exponential": _exponential,
}


def read_schedule(entry: str | Mapping[str, Any], warmup: int = 0) -> Schedule | None:
    """What a study asks for, such as `cosine` or `{step: {every: 20}}`; None where the learning rate stays.

    >>> read_schedule({"step": {"every": 20}}, warmup=5)
    Schedule(kind='step', warmup=5, every=20, factor=0.1, floor=0.0)
    """
    kind, options = name_and_options("local.schedule", entry)
    if kind not in SCHEDULES:
        raise ConfigError(f"local.schedule: no schedule is called {kind!r}: {nearest_name(kind, SCHEDULES)}")
    made = SCHEDULES[kind](**validate_options("local.schedule", kind, SCHEDULES[kind], options, given=0))
    return None if kind == "constant" and not warmup else made._replace(warmup=warmup)
