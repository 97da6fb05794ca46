"""The shortest step with which a parcel keeps to its bytes: foreseen, written, and corrected by what it takes."""

import math
from collections.abc import Callable
from functools import cache
from typing import TypeVar

from sparing.parts.code.budget.rate_distortion import NOTCHES
from sparing.parts.code.dead_zone import TOP

OCTAVES, FINE = int(math.log2(TOP * NOTCHES[-1])), 32
"""How far below the longest step D is looked for: notches still reach it; and among how many in an octave."""
RISE, STAYING = 1 / 64, 0.7
"""Of the search for D: how much faster, about, the logarithm of the bytes rises; what an end is worth that stays."""
TRIALS, AIM, ENOUGH = 6, 0.97, 0.94
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
    planned = cache(lambda i, _: plan(steps[i], held))
    for _ in range(TRIALS):
        most, free = min(AIM * budget / ratio, MOST), held is None
        at = max(reached(fits, over, lambda i: math.log(planned(i, free)[1] / most)), fits + 1)  # noqa: B023
        what, hoped = planned(at, free)
        made, size = write(steps[at], what)
        ratio = size / hoped
        if size <= budget:
            best, fits = made, at
        else:
            over = at
        closed = over - fits == 1
        if ENOUGH * budget <= size <= budget or (closed and (held is not None or fits == 0 or over == last)):
            break
        if closed:
            held, over = planned(fits, True)[0], last
    return best


def reached(near: int, far: int, excess: Callable[[int], float]) -> int:
    """Where a growing function is last not above 0, from `near` on and before `far`: about where a line meets 0.

    The first look is at the middle, whence RISE tells of the ends. An end that stays has its say weakened, so that the
    other comes up to it, and every fourth look is at the middle again, in case that leads nowhere.

    >>> reached(0, 705, lambda i: i / 80 - 4)
    320
    """
    below, above, look = 0.0, 0.0, 0
    while (width := far - near) > 1:
        middle = near + width // 2
        if look % 4:
            middle = min(max(near + round(width * below / (below - above)), near + 1), far - 1)
        found = excess(middle)
        if look == 0:
            below, above = min(found - RISE * (middle - near), -RISE), max(found + RISE * (far - middle), RISE)
        if found <= 0:
            near, below, above = middle, found, STAYING * above
        else:
            far, below, above = middle, STAYING * below, found
        look += 1
    return near
