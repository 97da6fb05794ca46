"""What stands where in the vector that a client of a round adds: every value that it would send, then a few numbers.

A value stands as its term of the exact fold, an integer below 2^53 (`core.fold.terms_on_grid`), or where a code has
steps that are common to all, as the code times the client's weight. All words of a sum have as many bits as the largest
sum needs; an integer with more is written in digits, one a word, and each digit adds up apart.
"""

from collections.abc import Iterator, Sequence
from math import ceil, prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import MethodError
from sparing.core.grid import WEIGHT_GRID, power_above
from sparing.core.method import Method
from sparing.core.parcel import Parcel
from sparing.core.round import schema_up
from sparing.secure_round import fixed_point

GRID_BITS = 53
LARGEST_CODE = 127
LOSS, WEIGHT = "loss", "weight"
"""Numbers of the vector that no part of a method asks for."""


class SummedLeaf(NamedTuple):
    """One tensor of a round."""

    name: str
    shape: tuple[int, ...]
    mask: Tensor | None  # bool [*shape]: what all clients write; None: everything
    coded: bool  # codes with common steps; else terms on the grid

    @property
    def size(self) -> int:
        return prod(self.shape) if self.mask is None else int(self.mask.sum())


class SumLayout(NamedTuple):
    leaves: tuple[SummedLeaf, ...]
    numbers: tuple[tuple[str, int], ...]  # what else each client says, and how many numbers
    bits: int  # of a word
    digit: int  # bits of a digit, so that those of the whole cohort add up to a word

    @property
    def size(self) -> int:
        """Words of a vector."""
        words = sum(leaf.size * self.words_of_leaf(leaf) for leaf in self.leaves)
        return words + sum(count for _, count in self.numbers) * self.words(fixed_point.BITS)

    def words_of_leaf(self, leaf: SummedLeaf) -> int:
        """For each of its values."""
        return 1 if leaf.coded else self.words(GRID_BITS)

    def words(self, bits: int) -> int:
        """For an integer of so many bits."""
        return 1 if bits <= self.bits else -(-bits // self.digit)

    def is_same(self, other: "SumLayout") -> bool:
        """Whether vectors by both add up."""
        return self._replace(leaves=()) == other._replace(leaves=()) and all(
            a._replace(mask=None) == b._replace(mask=None) and _same_mask(a.mask, b.mask)
            for a, b in zip(self.leaves, other.leaves, strict=len(self.leaves) == len(other.leaves))
        )

    def pieces(self, words: np.ndarray) -> Iterator[np.ndarray]:
        """The words of each leaf `[words of a value, values]`, then those of each number `[words, count]`."""
        at = 0
        shapes = [(self.words_of_leaf(leaf), leaf.size) for leaf in self.leaves]
        shapes += [(self.words(fixed_point.BITS), count) for _, count in self.numbers]
        for shape in shapes:
            yield words[at : at + prod(shape)].reshape(shape)
            at += prod(shape)


def sum_layout(method: Method, sent: Parcel, total: float, ctx: Ctx) -> SumLayout:
    """That of everybody in the round of one client (K = 1) to whom this was sent; `total`: see `Weigh.most`."""
    expected = schema_up(method, sent, ctx)
    leaves = []
    for name, spec in expected.leaves.items():
        if spec.told or spec.grains:
            raise MethodError(f"positions of {name!r} are chosen by the client, and do not add up; drop what does so")
        mask = None if spec.scope is None else spec.scope.expand(1, *spec.shape)[0].cpu()
        leaves.append(SummedLeaf(name, tuple(spec.shape), mask, spec.dtype == torch.int8))
    bits = GRID_BITS
    if any(leaf.coded for leaf in leaves):
        weights = ceil(total / power_above(total) / weight_unit(method, total))
        bits = (LARGEST_CODE * weights).bit_length() + 1
    numbers = tuple((name, count) for name, count in _numbers(method).items())
    return SumLayout(tuple(leaves), numbers, bits, bits - (ctx.cohort - 1).bit_length())


def weight_unit(method: Method, total: float) -> float:
    """All weights of a cohort, as parts of the grid's scale, are whole multiples of this."""
    return WEIGHT_GRID if method.blend.weigh.looks else max(1 / power_above(total), WEIGHT_GRID)


def _numbers(method: Method) -> dict[str, int]:
    blend = method.blend
    found = {LOSS: 1} | ({WEIGHT: 1} if blend.weigh.looks else {})
    parts = {"weigh": blend.weigh.pooled} | {str(i): step.pooled for i, step in enumerate(blend.steps)}
    return found | {f"{part}/{name}": count for part, pooled in parts.items() for name, count in (pooled or {}).items()}


def split_terms(values: np.ndarray, layout: SumLayout) -> np.ndarray:
    """Integers of `GRID_BITS` with their sign, int64 `[n]`, as words `[words of each, n]`."""
    whole, count = values.view(np.uint64) & np.uint64((1 << GRID_BITS) - 1), layout.words(GRID_BITS)
    if count == 1:
        return whole[None]
    digit = np.uint64((1 << layout.digit) - 1)
    return np.stack([(whole >> np.uint64(j * layout.digit)) & digit for j in range(count)])


def join_terms(words: np.ndarray, layout: SumLayout) -> np.ndarray:
    """The sums of such integers, int64 `[n]`, from the sums of their words."""
    whole = np.zeros(words.shape[1], np.uint64)
    for j, one in enumerate(words):
        whole += one.astype(np.uint64) << np.uint64(j * layout.digit)
    return with_sign(whole, GRID_BITS)


def with_sign(whole: np.ndarray, bits: int) -> np.ndarray:
    """Integers modulo 2^bits as int64 of which the upper half are negative."""
    above = 64 - bits
    return (whole.astype(np.uint64) << np.uint64(above)).view(np.int64) >> np.int64(above)


def split_number(value: int, layout: SumLayout) -> list[int]:
    """One fixed-point number as words."""
    whole, digit = value % (1 << fixed_point.BITS), (1 << layout.digit) - 1
    return [(whole >> (j * layout.digit)) & digit for j in range(layout.words(fixed_point.BITS))]


def join_number(words: Sequence[int], layout: SumLayout) -> int:
    """The sum of such numbers, from the sums of their words."""
    whole = sum(word << (j * layout.digit) for j, word in enumerate(words)) % (1 << fixed_point.BITS)
    return whole - (1 << fixed_point.BITS) if whole >> (fixed_point.BITS - 1) else whole


def _same_mask(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))
