"""What a tensor is worth sending as, and how finely, where bytes are scarce.

One step D for the whole model says what a bit must buy, wherever it is spent: PRICE D^2 of squared error. A tensor
travels as its strongest components (`core/components.py`), as values, as components and the values of what these leave
of it, or not at all, whichever makes

    squared error + PRICE D^2 bits

least. Steps of values are D or sqrt(2) D: what is worth few bits is better sent in longer ones. It is judged by the
largest entries and a sample of the others, with sums that come out the same on any number of threads.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparing.core.components import SLOPE, factored, scaled, sized, worthy
from sparing.core.keys import hashes, uniforms
from sparing.core.reduce import largest, total
from sparing.core.rounding import TOP, codes_of
from sparing.core.subspace import Components

PRICE = 0.12
"""Measured on updates of a CNN, where D changes: what a bit more saves, in values and in components."""
LONGER = (0, 4)
"""Notches by which steps of values may be longer than D: as long, or sqrt(2) times."""
NOTCHES = [2.0 ** (i / 8) for i in range(128)]
"""How much longer a step is by so many notches: eighths of an octave."""
SAMPLE, CLASSES = 1 << 12, 16
"""So many of the largest values and of the others are looked at, and told apart by the strength of row and column."""
HEAD = 32
"""Bits in which a leaf tells its chances, about."""
OCTAVES, FINE = int(math.log2(TOP * NOTCHES[-1])), 32
"""How far below the longest step D is looked for: notches still reach it; and among how many in an octave."""
TRIALS, AIM, ENOUGH = 6, 0.98, 0.95
"""Parcels written, at most; the share of the budget that each should take; the share with which one is good enough."""

Plan = TypeVar("Plan")
Sent = TypeVar("Sent")


class Choice(NamedTuple):
    rank: int  # so many components travel
    longer: int | None  # values travel, in steps so many notches longer than D, or more
    bits: float  # about


NOTHING = Choice(0, None, 0.0)


class Piece(NamedTuple):
    """What is judged of one client's tensor: all of its values or, of many, the largest and a sample of the others."""

    x: Tensor  # [1, S] float64
    stands: Tensor  # [S] float64: for how many each of them stands
    row: Tensor  # [S]: where they are from
    column: Tensor
    strength: tuple[Tensor, Tensor] | None  # squares of each row and of each column; None: nothing was left out
    parts: Components | None  # of the matrix, if it may travel as such


def piece(m: Tensor, parts: Components | None = None) -> Piece:
    """Of one client's values, as a matrix `[1, rows, columns]`."""
    x, square = m.reshape(1, -1), m[0].square()
    n, places, stands, strength = x.shape[1], torch.arange(x.shape[1]), torch.ones(x.shape[1]).double(), None
    if n > 2 * SAMPLE:
        top = largest(x, SAMPLE)[0].cpu()
        drawn = (uniforms(hashes(torch.zeros(1, dtype=torch.int64), SAMPLE))[0].double() * n).long()
        few, others = top.nonzero()[:, 0], drawn[~top[drawn]]
        places, share = torch.cat([few, others]), (n - len(few)) / max(len(others), 1)
        stands = torch.cat([stands[: len(few)], stands[: len(others)] * share])
        strength = total(square).cpu(), total(square.T).cpu()
    parts = None if parts is None else Components(*(part.cpu() for part in parts))
    columns = max(m.shape[2], 1)
    return Piece(x[:, places.to(x.device)].cpu(), stands, places // columns, places % columns, strength, parts)


def notch(step: float, peak: float, least: int = 0) -> int:
    """By how many notches, at least so many, a step must be longer for the largest code to reach the peak.

    >>> notch(1.0, 127.0), notch(1.0, 128.0), notch(1.0, 254.0), notch(1.0, 1.0, least=4)
    (0, 1, 8, 4)
    """
    return next((i for i in range(least, len(NOTCHES)) if TOP * step * NOTCHES[i] >= peak), len(NOTCHES) - 1)


def judged(one: Piece, step: float, rest: bool = True, held: Choice | None = None) -> Choice:
    """The best way to send this where a bit must buy PRICE step^2, or what the one held would take.

    Without `rest`, a matrix travels in components alone.
    """
    starts = [(0, 0.0, one.x, order(one, 0.0, 0.0))] if (held is None or not held.rank) else []
    if one.parts and (held is None or held.rank):
        rank = held.rank if held else int(worthy(one.parts, torch.tensor([SLOPE * step**2])).sum())
        some = Components(*(x[..., :rank] for x in one.parts))
        p, q = scaled(some, some.s > 0)
        own = torch.tensor([step * NOTCHES[notch(step, peak(p, q))]])
        a, b, _ = factored(p, q, own)
        bits, less = entropy(a) + entropy(b), order(one, total(p[0].square().T), total(q[0].square().T))
        a, b = (part[0] for part in sized(a, b))
        starts.append((rank, bits, one.x - own * total((a[:, one.row] * b[:, one.column]).T), less))
    best, least = NOTHING, float("inf")
    for rank, bits, left, classes in starts:
        ways = (None,) if one.parts and not rest else (None, *LONGER)
        for longer in ways if held is None else (held.longer,):
            error, more = left, 0.0
            if longer is not None:
                own = torch.tensor([step * NOTCHES[notch(step, peak(left), longer)]])
                codes = codes_of(left, own)
                error, more = left - codes * own, entropy(codes, one.stands, classes) + HEAD
            cost = float(total(error.square() * one.stands)) + PRICE * step**2 * (bits + more)
            if cost < least:
                best, least = Choice(rank, longer, bits + more), cost
    return best


def order(one: Piece, row_less: Tensor | float, column_less: Tensor | float) -> Tensor | None:
    """The class of every value in the sample, by how strong its row and column are without this much: `[S]`."""
    if one.strength is None:
        return None
    rows, columns = (one.strength[0] - row_less).clamp(min=0), (one.strength[1] - column_less).clamp(min=0)
    rank = torch.empty_like(one.row)
    rank[(rows[one.row] * columns[one.column]).argsort(stable=True)] = torch.arange(len(rank))
    return rank * CLASSES // len(rank)


def peak(*xs: Tensor) -> float:
    """The largest size of any number; NaN if one is not."""
    some = [x.abs().amax() for x in xs if x.numel()]
    return float(torch.stack(some).amax()) if some else 0.0


def entropy(codes: Tensor, stands: Tensor | None = None, classes: Tensor | None = None) -> float:
    """Bits that these codes take by their frequencies, in each class apart."""
    entries = codes.flatten().long() + (128 if classes is None else 256 * classes + 128)
    weights = None if stands is None else stands.numpy()
    counts = np.bincount(entries.numpy(), weights, 256 * CLASSES).reshape(CLASSES, 256)
    return logged(counts.sum(1)) - logged(counts)


def logged(counts: np.ndarray) -> float:
    """The sum of n log2 n; logarithms to 30 binary places, so that no library's last bit decides a byte."""
    n = counts[counts > 0].astype(np.float64)
    return math.fsum(n * (np.round(np.log2(n) * 2.0**30) * 2.0**-30))


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
        near, far = fits, over
        middle = over - 1 if over == last else (near + far) // 2  # mostly there is room for all, or hardly for any
        while far - near > 1:
            near, far = (middle, far) if ratio * planned(middle, held is None)[1] <= AIM * budget else (near, middle)
            middle = (near + far) // 2
        at = max(near, fits + 1)
        what, hoped = planned(at, held is None)
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
