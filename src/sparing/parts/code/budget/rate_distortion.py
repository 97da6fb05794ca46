"""What a tensor is worth sending as, and how finely, where bytes are scarce.

One step D for the whole model says what a bit must buy, wherever it is spent: PRICE D^2 of squared error. A tensor
travels as its strongest components (`matrices`), as values, as components and the values of what these leave
of it, or not at all, whichever makes

    squared error + PRICE D^2 bits

least. Steps of values are D or sqrt(2) D: what is worth few bits is better sent in longer ones. It is judged by the
largest entries and a sample of the others, with sums that come out the same on any number of threads.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparing.core.keys import hashes, uniforms
from sparing.core.operation import operation
from sparing.core.reduce import largest_in_rows, total
from sparing.parts.code.budget.matrices import SLOPE, components_by_root, fitting_matrix
from sparing.parts.code.budget.subspace import Components
from sparing.parts.code.dead_zone import DEAD, TOP, codes_of
from sparing.wire.index import places_of

PRICE = 0.12
"""Measured on updates of a CNN, where D changes: what a bit more saves, in values and in components."""
LONGER = (4, 0)
"""Notches by which steps of values may be longer than D: sqrt(2) times, or as long if that is worth anything."""
NOTCHES = [2.0 ** (i / 8) for i in range(128)]
"""How much longer a step is by so many notches: eighths of an octave."""
SAMPLE, CLASSES = 1 << 12, 16
"""So many of the largest values and of the others are looked at, and told apart by the strength of row and column."""
TINY = 2.0**-1000
BLOCK = 1 << 18
"""Values squared together."""
HEAD, ROW_HEAD, FACTOR_HEAD = 32, 96, 88
"""Bits in which a leaf of values tells its chances, about, each component, and a leaf of components beside these."""


class Choice(NamedTuple):
    rank: int  # so many components travel
    longer: int | None  # values travel, in steps so many notches longer than D, or more
    bits: float  # about


NOTHING = Choice(0, None, 0.0)


class Pairs(NamedTuple):
    """The components of a matrix, as they would be coded."""

    parts: Components
    both: Tensor  # s u and s v, [1, r, rows + columns] float64
    rows: int
    peak: list[float]  # of the first 0, 1, ..., r of them


class Piece(NamedTuple):
    """What is judged of one client's tensor: all of its values or, of many, the largest and a sample of the others."""

    x: Tensor  # [S] float64
    stands: np.ndarray  # [S]: for how many each of them stands
    row: Tensor  # [S]: where they are from
    column: Tensor
    classes: np.ndarray | int  # [S]: by octaves, how weak their rows and columns are; 0: all alike
    pairs: Pairs | None  # if it may travel as components


def piece(m: Tensor, parts: Components | None = None) -> Piece:
    """Of one client's values, as a matrix `[1, rows, columns]`."""
    x, wide = m.reshape(1, -1), max(m.shape[2], 1)
    places, stands = _sampled_values(x)
    row, column = places // wide, places % wide
    pairs = None if parts is None else pairs_of(Components(*(part.cpu() for part in parts)))
    classes = 0
    if len(places) < x.shape[1] and m.shape[1] > 1:
        rows, columns = (side.cpu() for side in squares(m[0]))
        octave = torch.frexp((rows[row] * columns[column]).clamp(min=TINY)).exponent
        classes = (octave.amax() - octave).clamp(max=CLASSES - 1).numpy()
    return Piece(x[0, places.to(x.device)].cpu(), stands.numpy(), row, column, classes, pairs)


def pairs_of(parts: Components) -> Pairs:
    both = torch.cat(components_by_root(parts, parts.s > 0), 2)
    return Pairs(parts, both, parts.u.shape[1], [0.0, *both[0].abs().amax(1).cummax(0).values.tolist()])


def _sampled_values(x: Tensor) -> tuple[Tensor, Tensor]:
    """Places in one row, and for how many each of them stands."""
    n = x.shape[1]
    if n <= 2 * SAMPLE:
        return torch.arange(n), torch.ones(n).double()
    top = largest_in_rows(x.float(), SAMPLE)[0].cpu()
    drawn = (uniforms(hashes(torch.zeros(1, dtype=torch.int64), SAMPLE))[0].double() * n).long()
    few, others = places_of(top), drawn[~top[drawn]]
    share = (n - len(few)) / max(len(others), 1)
    return torch.cat([few, others]), torch.cat([torch.ones(len(few)), torch.full([len(others)], share)]).double()


def squares(m: Tensor) -> tuple[Tensor, Tensor]:
    """Of every row and of every column; a block at a time."""
    rows, columns = [], m.new_zeros(m.shape[1])
    for some in m.split(max(1, BLOCK // m.shape[1])):
        square = some.square()
        rows.append(total(square))
        columns += total(square.T)
    return torch.cat(rows), columns


def notch(step: float, peak: float, least: int = 0) -> int:
    """By how many notches, at least so many, a step must be longer for the largest code to reach the peak.

    >>> notch(1.0, 127.0), notch(1.0, 128.0), notch(1.0, 254.0), notch(1.0, 1.0, least=4)
    (0, 1, 8, 4)
    """
    return next((i for i in range(least, len(NOTCHES)) if TOP * step * NOTCHES[i] >= peak), len(NOTCHES) - 1)


@operation
def judged(one: Piece, step: float, rest: bool = True, held: Choice | None = None) -> Choice:
    """The best way to send this where a bit must buy PRICE step^2, or what the one held would take.

    Without `rest`, a matrix travels in components alone.
    """
    ways = (held.longer,) if held else (None,) if one.pairs and not rest else (None, *LONGER)
    best, least = NOTHING, math.inf
    for rank in ranks_to_try(one, step, held):
        bits, left = _without_components(one, one.pairs, rank, step) if one.pairs and rank else (0.0, one.x)
        size, before = left.abs().numpy(), math.inf
        for longer in ways:
            off, more = size, 0.0
            if longer is not None:
                own = step * NOTCHES[notch(step, float(size.max(initial=0.0)), longer)]
                codes = np.minimum(np.floor(size / own + (0.5 - DEAD)), TOP)
                off, more = size - codes * own, _entropy_of_codes(codes, one.stands, one.classes) + HEAD
            cost = _added_components(off * off * one.stands) + PRICE * step**2 * (bits + more)
            if cost < least:
                best, least = Choice(rank, longer, bits + more), cost
            if cost > before:
                break
            before = cost
    return best


def ranks_to_try(one: Piece, step: float, held: Choice | None) -> list[int]:
    """That of the choice held, or none and as many components as are worth their bytes."""
    if held or not one.pairs:
        return [held.rank if held else 0]
    strong, sides = one.pairs.parts.s[0].numpy(), one.pairs.both.shape[2]
    worthy = int(np.count_nonzero((strong * strong / sides >= SLOPE * step**2) & (strong > 0)))
    return [0, worthy] if worthy else [0]


def _without_components(one: Piece, pairs: Pairs, rank: int, step: float) -> tuple[float, Tensor]:
    """Bits that the first few components take, and what their codes leave of the values."""
    own = step * NOTCHES[notch(step, pairs.peak[rank])]
    codes = codes_of(pairs.both[:, :rank], torch.tensor([own]).double())
    a, b = codes[:, :, : pairs.rows], codes[:, :, pairs.rows :]
    bits = entropy_of_rows(a[0].numpy()) + entropy_of_rows(b[0].numpy())
    a, b = (part[0].T.contiguous() for part in fitting_matrix(a, b))
    return bits, one.x - own * (a.index_select(0, one.row) * b.index_select(0, one.column)).sum(1)  # an exact sum


def _added_components(x: np.ndarray) -> float:
    """The sum, from the first to the last: the same everywhere."""
    return float(np.add.accumulate(x)[-1]) if len(x) else 0.0


def largest_value(*xs: Tensor) -> float:
    """The largest size of any number; NaN if one is not."""
    some = [torch.maximum(x.amax(), -x.amin()) for x in xs if x.numel()]
    return float(torch.stack(some).amax()) if some else 0.0


def _entropy_of_codes(codes: np.ndarray, stands: np.ndarray, classes: np.ndarray | int) -> float:
    """Bits that codes of these sizes take by their frequencies, in each class apart, and a bit for every sign."""
    entries = codes.astype(np.int64) + (TOP + 1) * classes
    counts = np.bincount(entries, stands, (TOP + 1) * CLASSES).reshape(CLASSES, -1)
    sums = np.add.accumulate(counts, 1)[:, -1]
    return logged(sums) - logged(counts) + _added_components(counts[:, 1:].reshape(-1))


def entropy_of_rows(codes: np.ndarray) -> float:
    """Of int8 `[r, n]`, all together or each row apart, whichever takes fewer."""
    entries = codes.view(np.uint8) + 256 * np.arange(len(codes))[:, None]
    counts = np.bincount(entries.reshape(-1), minlength=256 * len(codes)).reshape(-1, 256)
    together = logged(np.array([codes.size])) - logged(counts.sum(0))
    return min(together, logged(counts.sum(1)) - logged(counts) + ROW_HEAD * len(codes)) + FACTOR_HEAD


def logged(counts: np.ndarray) -> float:
    """The sum of n log2 n; logarithms to 30 binary places, so that no library's last bit decides a byte."""
    n = counts[counts > 0].astype(np.float64)
    return _added_components(n * (np.round(np.log2(n) * 2.0**30) * 2.0**-30))
