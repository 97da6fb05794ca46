"""Phases of local training: which layers move when, and how a model is tuned before it is looked at."""

from collections.abc import Callable

from sparing.core.errors import ConfigError, MethodError
from sparing.core.method import Phase

Phases = tuple[Phase, ...]


def phase_of_length(phase: Phase, count: int | None, what: str) -> Phase:
    """The phase with so many epochs, or steps where it counts in steps; None: as long as it is.

    >>> phase_of_length(Phase(epochs=5), 2, "fedrep.body").epochs
    2
    """
    if count is None:
        return phase
    if count < 1:
        raise ConfigError(f"{what} is {count}; it must be 1 or more")
    return phase._replace(epochs=count) if phase.steps is None else phase._replace(steps=count)


def head_then_body(
    phases: Phases, head: frozenset[str], body: frozenset[str], long: int | None, then: int | None
) -> Phases:
    """The head alone for so long, then the body alone. A head that is given no time is trained with the body."""
    first = refuse_apart(phases, "fedrep")
    later = phase_of_length(first, then, "fedrep.body")
    if long == 0:
        return (later,)
    return phase_of_length(first, long, "fedrep.head")._replace(trains=head), later._replace(trains=body)


def train_only(phases: Phases, names: frozenset[str], whose: str) -> Phases:
    """These parameters move, all others stay as they are."""
    refuse_apart(phases, whose)
    return tuple(phase._replace(trains=names) for phase in phases)


def tuning_phases(
    count: int | None, lr: float | None, trains: frozenset[str] | None, whose: str
) -> Callable[[Phases], Phases]:
    """Plain training of a copy before it is evaluated, from the settings of a round: nothing holds it to the server."""
    phase_of_length(Phase(), count, f"{whose}.epochs")
    if lr is not None and not lr > 0:
        raise ConfigError(f"{whose}.lr is {lr}; it must be above 0")

    def tuned(phases: Phases) -> Phases:
        phase = phase_of_length(phases[0], count, f"{whose}.epochs")
        return (_with_lr(phase, lr)._replace(trains=trains, prox=0.0, correct=False),)

    return tuned


def pulled_phases(phases: Phases, lam: float, count: int | None, lr: float | None) -> Phases:
    """How a second model trains: as the first, but drawn to where that one started."""
    out = []
    for phase in phases:
        phase = phase_of_length(phase, count, "ditto.epochs")
        out.append(_with_lr(phase, lr)._replace(prox=lam, correct=False))
    return tuple(out)


def _with_lr(phase: Phase, lr: float | None) -> Phase:
    """The phase with this learning rate in every round; None: its own."""
    return phase if lr is None else phase._replace(optimiser=phase.optimiser._replace(lr=lr, schedule=None))


def refuse_apart(phases: Phases, whose: str) -> Phase:
    first, *more = phases
    if more or first.trains is not None:
        raise MethodError(f"{whose} says which layers are trained when, as a recipe before it does; drop one of them")
    return first
