"""What stands where in the vector that a client of a round adds: every value that it would send, then a few numbers.

A value stands as its term of the exact fold, an integer below 2^53 (`core.fold.terms_on_grid`), or where a code has
steps that are common to all, as the code times the client's weight. All words of a sum have as many bits as the largest
sum needs. Of codes, whose sums lie within -h ... h, several stand in a word, as digits to the base 2 h + 1: then no
part of a bit is lost. An integer with more bits than a word is written in digits, one a word, and each adds up apart.
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
from sparing.core.votes import same_mask
from sparing.secure_round import fixed_point

GRID_BITS = 53
LARGEST_CODE = 127
_WORD_BITS = 64
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


class CodeDigits(NamedTuple):
    """How codes stand in words: their sums as digits from -(base // 2) to base // 2."""

    base: int = 1
    per_word: int = 1

    @property
    def bits(self) -> int:
        """Of a word that holds them."""
        return (self.base**self.per_word - 1).bit_length()


class SumLayout(NamedTuple):
    leaves: tuple[SummedLeaf, ...]
    numbers: tuple[tuple[str, int], ...]  # what else each client says, and how many numbers
    bits: int  # of a word
    digit: int  # bits of a digit, so that those of the whole cohort add up to a word
    codes: CodeDigits = CodeDigits()

    @property
    def size(self) -> int:
        """Words of a vector."""
        return sum(map(prod, self._shapes()))

    def _shapes(self) -> list[tuple[int, int]]:
        """Of the words of every leaf and of every number."""
        terms, numbers = self.words(GRID_BITS), self.words(fixed_point.NUMBER_BITS)
        leaves = [
            (1, -(-leaf.size // self.codes.per_word)) if leaf.coded else (terms, leaf.size) for leaf in self.leaves
        ]
        return [*leaves, *((numbers, count) for _, count in self.numbers)]

    def words(self, bits: int) -> int:
        """For an integer of so many bits."""
        return 1 if bits <= self.bits else -(-bits // self.digit)

    def is_same(self, other: "SumLayout") -> bool:
        """Whether vectors by both add up."""
        return self._replace(leaves=()) == other._replace(leaves=()) and all(
            a._replace(mask=None) == b._replace(mask=None) and same_mask(a.mask, b.mask)
            for a, b in zip(self.leaves, other.leaves, strict=len(self.leaves) == len(other.leaves))
        )

    def pieces(self, words: np.ndarray) -> Iterator[np.ndarray]:
        """The words of each leaf, `[words of a value, values]` or of codes `[1, words]`, then of each number."""
        at = 0
        for shape in self._shapes():
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
    bits, codes = GRID_BITS, CodeDigits()
    if any(leaf.coded for leaf in leaves):
        codes = digits_of_codes(LARGEST_CODE * ceil(total / power_above(total) / weight_unit(method, total)))
        bits = codes.bits
    numbers = tuple((name, count) for name, count in _numbers(method).items())
    return SumLayout(tuple(leaves), numbers, bits, bits - (ctx.cohort - 1).bit_length(), codes)


def digits_of_codes(largest: int) -> CodeDigits:
    """For sums of codes from -`largest` to `largest`: as many a word as take about the fewest bits.

    >>> [(digits_of_codes(127 * weights), digits_of_codes(127 * weights).bits) for weights in (100, 10_000)]
    [(CodeDigits(base=25401, per_word=4), 59), (CodeDigits(base=2540001, per_word=3), 64)]
    """
    ways = [CodeDigits(2 * largest + 1, n) for n in range(1, _WORD_BITS)]
    fitting = [one for one in ways if one.bits <= _WORD_BITS]
    fewest = min(one.bits / one.per_word for one in fitting)
    return max(one for one in fitting if one.bits / one.per_word < 1.01 * fewest)


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


def split_codes(values: np.ndarray, codes: CodeDigits) -> np.ndarray:
    """Codes times a weight, int64 `[n]`, as words `[1, words]`, modulo 2^64."""
    digits = np.zeros((codes.per_word, -(-len(values) // codes.per_word)), np.int64)
    digits.reshape(-1)[: len(values)] = values
    words = digits[-1].view(np.uint64)
    for digit in digits[-2::-1]:
        words = words * np.uint64(codes.base) + digit.view(np.uint64)
    return words[None]


def join_codes(words: np.ndarray, size: int, layout: SumLayout) -> np.ndarray:
    """The sums of so many such codes, int64 `[size]`, from the sums of their words."""
    base, per_word = layout.codes
    rest, digits = (with_sign(words, layout.bits) + base**per_word // 2).view(np.uint64), list[np.ndarray]()
    for _ in range(per_word - 1):
        rest, digit = np.divmod(rest, base)
        digits.append(digit)
    return np.concatenate([*digits, rest])[:size].view(np.int64) - base // 2


def split_number(value: int, layout: SumLayout) -> list[int]:
    """One fixed-point number as words."""
    whole, digit = value % (1 << fixed_point.NUMBER_BITS), (1 << layout.digit) - 1
    return [(whole >> (j * layout.digit)) & digit for j in range(layout.words(fixed_point.NUMBER_BITS))]


def join_number(words: Sequence[int], layout: SumLayout) -> int:
    """The sum of such numbers, from the sums of their words."""
    whole = sum(word << (j * layout.digit) for j, word in enumerate(words)) % (1 << fixed_point.NUMBER_BITS)
    return whole - (1 << fixed_point.NUMBER_BITS) if whole >> (fixed_point.NUMBER_BITS - 1) else whole
