"""The shortest step with which a parcel keeps to its bytes: foreseen, written, and corrected by what it takes."""

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

from sparing.parts.code.budget.rate_distortion import NOTCHES
from sparing.parts.code.dead_zone import TOP

OCTAVES, FINE = int(math.log2(TOP * NOTCHES[-1])), 32
"""How far below the longest step D is looked for: notches still reach it; and among how many in an octave."""
RISE, STAYING, CLOSE = 1 / 32, 0.7, 0.01
"""Of the search for D: how much faster, about, the logarithm of the bytes rises; what an end is worth that stays; and
how far below 0 is near enough."""
TRIALS, AIM, ENOUGH = 6, 0.96, 0.925
"""Parcels written, at most; the share of the budget that each should take; the share with which one is good enough."""
MOST = 2.0**60
"""Bytes beyond which all budgets are alike."""

Plan = TypeVar("Plan")
Sent = TypeVar("Sent")


def fitted(
    longest: float,
    budget: float,
    plan: Callable[[float, Plan | None], tuple[Plan, float]],
    write: Callable[[float, Plan], tuple[Sent, int]],
) -> Sent | None:
    """What is written for the shortest step found with which it takes at most the budget; None: there is no such step.

    `plan(step, held)` says what to write, if it is not the plan held, and how many bytes that should be;
    `write(step, plan)` how many they are. Where a little shorter step leads to another plan that takes far more, the
    plan is held, and the step alone goes on.
    """
    last = OCTAVES * FINE + 1
    fits, over, ratio, best, held = 0, last, 1.0, None, None
    steps = [longest * 2.0 ** (-i / FINE) for i in range(last)]
    planned: dict[int, tuple[Plan, float]] = {}

    def hoped(i: int) -> float:
        if i not in planned:
            planned[i] = plan(steps[i], held)
        return planned[i][1]

    def hold(i: int) -> int:
        """The plan of this step goes on; how many bytes it should take is known for this step."""
        nonlocal held
        held = planned[i][0]
        planned.clear()
        hoped(i)
        return last

    for _ in range(TRIALS):
        most = min(AIM * budget / ratio, MOST)
        excess = lambda i: math.log(hoped(i) / most)  # noqa: B023, E731
        at = max(reached(fits, over, excess, planned), fits + 1)
        if held is None and at > fits + 1 and at + 1 in planned and hoped(at) < ENOUGH / AIM * most < hoped(at + 1):
            over = hold(at)
            at = reached(at, over, excess, planned)
        ratio = hoped(at)
        made, size = write(steps[at], planned[at][0])
        ratio = size / ratio
        if size <= budget:
            best, fits = made, at
        else:
            over = at
        closed = over - fits == 1
        if ENOUGH * budget <= size <= budget or (closed and (held is not None or fits == 0 or over == last)):
            break
        if closed:
            over = hold(fits)
    return best


def reached(near: int, far: int, excess: Callable[[int], float], known: Iterable[int] = ()) -> int:
    """Where a growing function is last not above 0, from `near` on and before `far`, or where it is CLOSE below that.

    Known places cost nothing to look at. The next look is where a line through both ends meets 0; while one end alone
    is known, RISE or the rise between two looks tells how far away the other may be. An end that stays has its say
    weakened, so that the other comes up to it, and every fourth look is at the middle, in case that leads nowhere.

    >>> reached(0, 705, lambda i: i / 80 - 4)
    320
    """
    below, above, rise, look = math.nan, math.nan, RISE, 0
    for place in sorted(i for i in known if near <= i < far):
        found = excess(place)
        if found > 0 and place > near:
            far, above = place, found
            break
        near, below = place, min(found, 0.0)
    close = below >= -CLOSE
    while far - near > 1 and not close:
        middle = near + (far - near) // 2
        if math.isnan(above) and not math.isnan(below):
            middle = near + 1 - math.floor(2 * below / RISE) if look < 2 else far - 1  # everything may fit
        elif look % 4 and math.isnan(below):
            middle = far - math.ceil(above / rise)
        elif look % 4:
            middle = near + round((far - near) * below / (below - above))
        middle = min(max(middle, near + 1), far - 1)
        found = excess(middle)
        if found <= 0:
            near, below, above, close = middle, found, STAYING * above, found >= -CLOSE
        else:
            if not math.isnan(above):
                rise = max((above - found) / (far - middle), RISE / 4)
            far, below, above = middle, STAYING * below, found
        look += 1
    return near
