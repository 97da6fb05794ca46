"""What stands where in a vector: integers in words, and their sums out of sums of words."""

import math
import random

import numpy as np
import pytest
import torch

from sparing.core.compose import compose
from sparing.core.context import context
from sparing.core.errors import MethodError
from sparing.core.method import Summed
from sparing.core.registry import find_recipe
from sparing.core.round import first_server, outgoing
from sparing.secure_round import fixed_point
from sparing.secure_round.sum_layout import (
    GRID_BITS,
    SumLayout,
    digits_of_codes,
    join_codes,
    join_number,
    join_terms,
    split_codes,
    split_number,
    split_terms,
    sum_layout,
    with_sign,
)
from support import random_tree, small_layout

CASES = [(bits, cohort) for bits in (14, 21, 32, 40, 52, 53, 60, 64) for cohort in (3, 10, 64, 100) if bits > 8]


def layout_of(bits: int, cohort: int) -> SumLayout:
    return SumLayout((), (), bits, bits - (cohort - 1).bit_length())


def wrapped(words: np.ndarray, bits: int) -> np.ndarray:
    """As a secure sum gives them, modulo 2^bits."""
    return words & np.uint64((1 << bits) - 1)


@pytest.mark.parametrize(("bits", "cohort"), CASES)
def test_sums_of_terms_come_back(bits, cohort):
    """Terms of either sign whose sum, like that of the fold, is at most the largest term of one."""
    layout, rng = layout_of(bits, cohort), np.random.default_rng(bits * cohort)
    largest = 2**51 // cohort
    terms = rng.integers(-largest, largest + 1, (cohort, 50))
    terms[:, 0], terms[:, 1], terms[:, 2], terms[:, 3] = largest, -largest, 0, -1
    words = sum(split_terms(row, layout) for row in terms)
    assert len(words) == layout.words(GRID_BITS)
    assert join_terms(wrapped(words, bits), layout).tolist() == terms.sum(0).tolist()


@pytest.mark.parametrize(("bits", "cohort"), CASES)
def test_words_of_one_client_fit(bits, cohort):
    layout = layout_of(bits, cohort)
    terms = np.array([2**51, -(2**51), -1, 0, 1])
    most = 1 << (bits if layout.words(GRID_BITS) == 1 else layout.digit)
    assert int(split_terms(terms, layout).max()) < most
    assert join_terms(split_terms(terms, layout), layout).tolist() == terms.tolist()


@pytest.mark.parametrize(("bits", "cohort"), CASES)
def test_sums_of_numbers_come_back(bits, cohort):
    layout, rng = layout_of(bits, cohort), random.Random(bits + cohort)
    bound = 2 ** (fixed_point.NUMBER_BITS - 1) // cohort - 1
    for _ in range(20):
        numbers = [rng.randint(-bound, bound) >> rng.randrange(0, 150) for _ in range(cohort)]
        columns = [split_number(x, layout) for x in numbers]
        words = [sum(some) % (1 << bits) for some in zip(*columns, strict=True)]
        assert join_number(words, layout) == sum(numbers)
    assert join_number([x % (1 << bits) for x in split_number(-1, layout)], layout) == -1


def test_upper_halves_are_negative():
    for bits in (8, 21, 53, 64):
        top = 1 << (bits - 1)
        whole = np.array([0, 1, top - 1, top, 2 * top - 1], np.uint64)
        assert with_sign(whole, bits).tolist() == [0, 1, top - 1, -top, -1]


def made(*recipes, ids=(0,), cohort=10, total=100.0):
    model = small_layout()
    method = compose(model, *recipes, summed=Summed(lambda cohort: cohort))
    server = first_server(method, random_tree(model, 1), 50, gradient=lambda model: model)
    ctx = context(0, 1, 20, list(ids), [10], 50, 1000, cohort=cohort)
    return model, sum_layout(method, outgoing(method, server, ctx), total, ctx)


def test_values_take_the_bits_of_the_grid():
    model, found = made()
    assert found.bits == GRID_BITS
    entries = sum(torch.Size(shape).numel() for shape in model.shapes.values())
    assert found.size == entries + found.words(fixed_point.NUMBER_BITS)
    assert found.numbers == (("loss", 1),)


@pytest.mark.parametrize("total", [1, 3, 100, 128, 129, 1437, 10**4, 10**6])
def test_codes_take_as_many_bits_as_codes_times_weights_add_up_to(total):
    """Whole numbers from -127 to 127 times all weights, and less than two percent more."""
    model, found = made(find_recipe("int8").make(common=True), total=float(total))
    assert {leaf.name for leaf in found.leaves if leaf.coded} == set(model.floats)
    needed = math.log2(2 * 127 * total + 1)
    assert needed <= found.bits / found.codes.per_word < 1.02 * needed


@pytest.mark.parametrize("weights", [1, 5, 100, 2_500, 10_000, 10**6, 2**29])
@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_sums_of_codes_come_back(weights, size):
    """Of clients whose weights add up to this, and whose codes are as large as codes can be."""
    codes, rng = digits_of_codes(127 * weights), np.random.default_rng(weights + size)
    layout = SumLayout((), (), codes.bits, codes.bits, codes)
    for _ in range(20):
        parts = rng.multinomial(weights, [0.1, 0.2, 0.7])
        values = parts[:, None] * rng.choice([-127, 127, 0, 1, 33], (3, size))
        values[:, :1] = parts[:, None] * rng.choice([-127, 127])
        words = sum(split_codes(row, codes)[0] for row in values)
        assert len(words) == -(-size // codes.per_word)
        assert join_codes(wrapped(words, codes.bits), size, layout).tolist() == values.sum(0).tolist()


def test_the_largest_sums_fill_a_word():
    for weights in (1, 100, 10_000, 12_345):
        codes = digits_of_codes(127 * weights)
        layout = SumLayout((), (), codes.bits, codes.bits, codes)
        for sign in (-1, 1):
            values = np.full(2 * codes.per_word, sign * 127 * weights)
            words = wrapped(split_codes(values, codes)[0], codes.bits)
            assert join_codes(words, len(values), layout).tolist() == values.tolist()


def test_what_all_share_is_summed_and_nothing_else():
    _, found = made(find_recipe("psfed").make(fraction=0.25))
    _, other = made(find_recipe("psfed").make(fraction=0.25), ids=(7,))
    masked = [leaf for leaf in found.leaves if leaf.mask is not None]
    assert masked
    assert all(leaf.size == int(leaf.mask.sum()) < leaf.mask.numel() for leaf in masked)
    assert found.is_same(other)
    assert not found.is_same(made(find_recipe("psfed").make(fraction=0.5))[1])


def test_pieces_are_the_vector():
    _, found = made(find_recipe("int8").make(common=True))
    vector = np.arange(found.size, dtype=np.uint64)
    pieces = list(found.pieces(vector))
    assert np.concatenate([piece.reshape(-1) for piece in pieces]).tolist() == vector.tolist()
    per = {leaf.name: found.codes.per_word if leaf.coded else 1 for leaf in found.leaves}
    words = [-(-leaf.size // per[leaf.name]) for leaf in found.leaves]
    assert [piece.shape[1] for piece in pieces] == words + [n for _, n in found.numbers]


def test_positions_that_clients_choose_do_not_add_up():
    with pytest.raises(MethodError, match="chosen by the client, and do not add up; drop"):
        made(find_recipe("topk").make())
