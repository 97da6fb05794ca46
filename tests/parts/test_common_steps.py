"""8-bit codes in common steps, against a few lines of NumPy: codes, cut-offs, the next step, sums of codes."""

import math

import numpy as np
import pytest
import torch

from sparing.core.context import context
from sparing.core.grid import GRID_STEP, REACH
from sparing.core.method import Arrival, Blended, View
from sparing.core.parcel import Leaf, Parcel
from sparing.core.tree import Layout
from sparing.parts.code.common_steps import SIZES, STEPS, common_steps_codec, common_steps_step, steps_in
from support import numbers

LAYOUT = Layout(
    {"w": (40, 3), "b": (5,), "count": ()},
    {"w": torch.float32, "b": torch.float32, "count": torch.int64},
    frozenset({"count"}),
)


def ctx_of(k: int, t: int = 1):
    return context(0, t, 20, list(range(k)), [10] * k, 50, 1000, cohort=k)


def encoded(values: dict[str, np.ndarray], exponents: list[float], stochastic: bool = False, t: int = 1):
    k = len(next(iter(values.values())))
    parcel = Parcel({name: Leaf(torch.from_numpy(x)) for name, x in values.items()}, {})
    view = View(ctx_of(k, t), {}, {}, {STEPS: torch.tensor([exponents] * k)})
    codec = common_steps_codec(LAYOUT, stochastic)
    out, _ = codec.encode(parcel, {}, view)
    return out, codec.decode(out, view.ctx)


def size_in_numpy(x: np.ndarray) -> int:
    """The least p with |x| < 2^p for every entry."""
    return math.frexp(float(np.abs(x).max()))[1]


@pytest.mark.parametrize("seed", range(8))
def test_codes_values_and_sizes_are_those_of_numpy(seed):
    rng = np.random.default_rng(seed)
    exponents = [float(rng.integers(-20, 3)), float(rng.integers(-20, 3))]
    values = {
        name: (rng.standard_normal((4, *LAYOUT.shapes[name])) * 2.0 ** rng.integers(-12, 8)).astype(np.float32)
        for name in ("w", "b")
    }
    written, read = encoded(values, exponents)
    for i, name in enumerate(("w", "b")):
        step = np.float32(2.0 ** exponents[i])
        codes = np.clip(np.round(values[name] / step), -127, 127)
        np.testing.assert_array_equal(written.leaves[name].value.numpy(), codes.astype(np.int8))
        np.testing.assert_array_equal(read.leaves[name].value.numpy(), codes.astype(np.float32) * step)
        assert written.notes[SIZES][:, i].tolist() == [size_in_numpy(row) for row in values[name]]


def test_the_sum_of_codes_is_the_sum_of_values():
    rng = np.random.default_rng(0)
    values = {
        "w": rng.standard_normal((9, 40, 3)).astype(np.float32),
        "b": rng.standard_normal((9, 5)).astype(np.float32),
    }
    written, read = encoded(values, [-6.0, -9.0])
    for i, name in enumerate(("w", "b")):
        codes = written.leaves[name].value.long().sum(0)
        assert torch.equal(codes.double() * 2.0 ** (-6.0, -9.0)[i], read.leaves[name].value.double().sum(0))


def test_what_lies_beyond_is_cut_off_and_of_nothing_nothing_is_sent():
    values = {"w": np.zeros((2, 40, 3), np.float32), "b": np.array([[1e9, -1e9, 0, 1, -1]] * 2, np.float32)}
    written, _ = encoded(values, [-7.0, -4.0])
    assert written.leaves["b"].value[0].tolist() == [127, -127, 0, 16, -16]
    assert not written.leaves["w"].value.any()
    assert written.notes[SIZES].tolist() == [[-1.0, 30.0]] * 2, "of nothing, as large as the step was made for"


def test_a_layer_that_stays_at_home_says_what_it_was_told():
    written, read = encoded({"b": np.ones((1, 5), np.float32)}, [3.0, -6.0])
    assert written.leaves.keys() == read.leaves.keys() == {"b"}
    assert written.notes[SIZES].tolist() == [[9.0, 1.0]]


def test_stochastic_rounding_is_unbiased():
    values = {"b": np.linspace(-0.9, 0.9, 5, dtype=np.float32)[None]}
    rounds = 400
    mean = sum(encoded(values, [0.0, -1.0], True, t)[1].leaves["b"].value[0] for t in range(1, rounds + 1)) / rounds
    assert (mean - torch.from_numpy(values["b"][0])).abs().max() < 4 * 0.25 / math.sqrt(rounds)


def stepped(state, sizes: list[list[float]], weight: list[float]):
    step, k = common_steps_step(LAYOUT), len(weight)
    seen = {SIZES: torch.tensor(sizes, dtype=torch.float64)}
    update = {name: torch.zeros(1, *LAYOUT.shapes[name], dtype=torch.float64) for name in LAYOUT.shapes}
    share = torch.tensor(weight, dtype=torch.float64)
    blended = Blended(update, {}, torch.arange(k), share, seen)
    return step.apply(state, blended, ctx_of(k))


@pytest.mark.parametrize("seed", range(5))
def test_the_next_step_covers_twice_the_mean_size(seed):
    rng = np.random.default_rng(seed)
    sizes, weight = rng.integers(-30, 9, (6, 2)).tolist(), rng.random(6).tolist()
    _, after, report = stepped({STEPS: torch.tensor([[-7.0, -9.0]], dtype=torch.float64)}, sizes, weight)
    wanted = np.ceil(np.average(sizes, axis=0, weights=weight)) + 1 - 7
    assert after[STEPS].tolist() == [wanted.tolist()]
    assert numbers(report) == {"largest_step": 2.0**-7}


def test_in_the_first_round_steps_follow_from_the_model():
    step = common_steps_step(LAYOUT)
    model = {"w": torch.full((1, 40, 3), 0.3), "b": torch.zeros(1, 5), "count": torch.zeros(1, dtype=torch.int64)}
    state = step.init(model, 50)
    assert state[STEPS].tolist() == [[-1.0 - 7, -1.0 - 7]], "a tensor of zeros has the steps of the largest other"
    _, notes = step.serving.serve(state, model, ctx_of(3), None)
    assert notes[STEPS].tolist() == [[-8.0, -8.0]] * 3
    assert steps_in({STEPS: notes[STEPS][:1]}, LAYOUT) == {"w": 2.0**-8, "b": 2.0**-8}
    assert steps_in({}, LAYOUT) == {}


def test_no_step_is_so_small_that_codes_times_weights_are_rounded_on_the_grid():
    step = common_steps_step(LAYOUT)
    model = {"w": torch.full((1, 40, 3), 0.3), "b": torch.zeros(1, 5), "count": torch.zeros(1, dtype=torch.int64)}
    _, notes = step.serving.serve({STEPS: torch.full((1, 2), -90.0)}, model, ctx_of(3), None)
    assert torch.exp2(notes[STEPS][0, 0].double()) == REACH * GRID_STEP * 1024  # 1000 samples


def test_what_a_client_says_of_its_size_is_bounded():
    step = common_steps_step(LAYOUT)
    said = torch.tensor([[math.nan, math.inf], [-math.inf, 3.0]])
    arrival = Arrival({}, {}, {SIZES: said}, {}, ctx_of(2))
    assert step.watch({}, arrival)[SIZES].tolist() == [[0.0, 100.0], [-100.0, 3.0]]
