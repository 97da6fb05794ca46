"""Judging what a tensor is worth sending as, by compiled loops: the body of `rate_distortion.judged`."""

import numpy as np

from sparing.accel.compiled import judge_loops
from sparing.parts.code.budget.rate_distortion import PRICE, Choice, Piece, ranks_to_try
from sparing.parts.code.dead_zone import digits

NO_PAIRS, NO_PEAK, NO_CLASSES = np.zeros((0, 0)), np.zeros(1), np.zeros(0, np.int32)


def compiled_judged(one: Piece, step: float, rest: bool = True, held: Choice | None = None) -> Choice:
    """`rate_distortion.judged`."""
    ranks, pairs = ranks_to_try(one, step, held), one.pairs
    ways = judge_loops.NO_VALUES if pairs and not rest else judge_loops.VALUES
    if held:
        ways = np.array([-1 if held.longer is None else held.longer])
    classes = NO_CLASSES if isinstance(one.classes, int) else one.classes
    both, rows, peak = (pairs.both[0].numpy(), pairs.rows, np.array(pairs.peak)) if pairs else (NO_PAIRS, 0, NO_PEAK)
    x, row, column = (part.numpy() for part in (one.x, one.row, one.column))
    exact = np.array([digits(rank) for rank in ranks])
    rank, longer, bits = judge_loops.judge(
        x, one.stands, row, column, classes, both, rows, peak, np.array(ranks), ways, step, PRICE * step**2, exact
    )
    return Choice(rank, None if longer < 0 else longer, bits)
