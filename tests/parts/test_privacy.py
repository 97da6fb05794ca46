"""Clipping that is never exceeded, noise of the promised size, bounds that follow a quantile."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import drive
from sparing.core.compose import compose
from sparing.core.context import context
from sparing.core.errors import ConfigError, MethodError, WireError
from sparing.core.method import Arrival, Blended, View, evenly
from sparing.core.parcel import Leaf, Parcel
from sparing.core.tree import Layout
from sparing.parts.code import privacy
from sparing.recipes.dp import dp
from sparing.recipes.psfed import psfed
from support import make_ctx, view_of

SHAPES = {"a": (50, 200), "b": (4000,)}
LAYOUT = Layout(SHAPES, dict.fromkeys(SHAPES, torch.float32))
ZERO = {name: torch.zeros(1, *shape) for name, shape in SHAPES.items()}
STILL = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
D = 14_000


def bounds(k, value):
    return torch.full((k,), value, dtype=torch.float64)


def squared(tree, k):
    """The square of the length of row k, exactly."""
    return sum(Fraction(float(v)) ** 2 for x in tree.values() for v in x[k].flatten().double())


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.integers(1, 60),
    st.one_of(st.floats(-20, 6), st.floats(-9, -4)),  # the second: where float16 runs out of numbers
    st.floats(-12, 12),
    st.sampled_from(["normal", "equal", "one", "steep", "just above"]),
    st.integers(0, 2**31),
)
def test_no_update_is_ever_longer_than_the_bound(dtype, n, power, longer, kind, seed):
    bound = max(10**power, 1e-20)
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=g, dtype=torch.float64)
    if kind == "equal":
        x = torch.ones(n, dtype=torch.float64)
    elif kind == "one":
        x = torch.zeros(n, dtype=torch.float64).index_fill(0, torch.tensor([n // 2]), -1.0)
    elif kind == "steep":
        x = 10.0 ** -torch.arange(n, dtype=torch.float64)
    size = (1 + 1e-7 * abs(longer)) if kind == "just above" else 10**longer
    x = (x / x.norm() * size * bound).to(dtype)
    x = x.nan_to_num(0.0, torch.finfo(dtype).max, torch.finfo(dtype).min)
    update = {"a": x[None, : n // 2], "b": x[None, n // 2 :]}
    out, length = privacy.clip_updates(update, bounds(1, bound))
    assert squared(out, 0) <= Fraction(bound) ** 2
    if float(length) <= bound * (1 - 1e-9):
        assert all(torch.equal(out[name], update[name]) for name in update)
    again = privacy.clip_updates(out, bounds(1, bound))[0]
    assert all(torch.equal(again[name], out[name]) for name in out)


def test_clipping_keeps_the_direction_and_takes_all_tensors_together():
    update = {"a": torch.tensor([[3.0, 0.0], [0.3, 0.0]]), "b": torch.tensor([[4.0], [0.4]])}
    out, length = privacy.clip_updates(update, bounds(2, 1.0))
    torch.testing.assert_close(length, torch.tensor([5.0, 0.5], dtype=torch.float64))
    torch.testing.assert_close(out["a"], torch.tensor([[0.6, 0.0], [0.3, 0.0]]))
    torch.testing.assert_close(out["b"], torch.tensor([[0.8], [0.4]]))
    for k in range(2):
        alone, _ = privacy.clip_updates({n: x[k : k + 1] for n, x in update.items()}, bounds(1, 1.0))
        assert all(torch.equal(alone[n], out[n][k : k + 1]) for n in out)


def test_what_is_not_finite_stays_so_for_the_server_to_refuse():
    for bad in (math.nan, math.inf):
        out, _ = privacy.clip_updates({"a": torch.tensor([[1.0, bad]])}, bounds(1, 1.0))
        assert not torch.isfinite(out["a"]).all()


def moves(rounds, clients):
    return [dict.fromkeys(range(clients), STILL)] * rounds


def as_expected(x, deviation):
    """Normal with this standard deviation, within five standard errors of what a sample of this size shows."""
    n = x.numel()
    assert abs(float(x.mean())) < 5 * deviation / math.sqrt(n)
    assert abs(float(x.std()) / deviation - 1) < 5 / math.sqrt(2 * n)
    assert abs(float(((x / deviation) ** 4).mean()) - 3) < 5 * math.sqrt(96 / n)


def one_row(tree):
    return torch.cat([x.flatten() for x in tree.values()])


@pytest.mark.parametrize(("noise", "clip", "clients"), [(1.0, 1.0, 4), (0.5, 3.0, 10), (2.0, 0.01, 1)])
def test_central_noise_on_the_mean_is_z_c_over_the_number_that_arrived(noise, clip, clients):
    lost = {(1, 0)} if clients > 1 else set()
    played, _ = drive.play(
        compose(LAYOUT, dp(noise=noise, clip=clip)), ZERO, moves(2, clients), [3] * clients, lost=lost
    )
    first = one_row(played[0].server.model)
    second = one_row(played[1].server.model) - first
    as_expected(first, noise * clip / clients)
    as_expected(second, noise * clip / (clients - len(lost)))
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 5 / math.sqrt(D)


def test_local_noise_is_z_c_on_every_upload_and_tells_neither_samples_nor_loss():
    played, _ = drive.play(
        compose(LAYOUT, dp(mode="local", noise=0.7, clip=2.0)), ZERO, moves(1, 3), [3, 90, 5], losses=[[1.0, 2.0, 3.0]]
    )
    up = played[0].up
    rows = torch.cat([leaf.value.flatten(1) for leaf in up.leaves.values()], dim=1)
    for row in rows:
        as_expected(row, 1.4)
    assert float((torch.corrcoef(rows) - torch.eye(3)).abs().max()) < 5 / math.sqrt(D)
    assert up.notes["n"].tolist() == [1.0, 1.0, 1.0]
    assert up.notes["loss"].tolist() == [0.0, 0.0, 0.0]
    as_expected(one_row(played[0].server.model), 1.4 / math.sqrt(3))


@pytest.mark.parametrize("mode", ["central", "local"])
def test_noise_falls_only_on_what_is_shared(mode):
    method = compose(LAYOUT, psfed(fraction=0.25), dp(mode=mode))
    (played,), _ = drive.play(method, ZERO, moves(1, 4), [3] * 4)
    moved = one_row(played.server.model)
    shared = torch.cat([leaf.scope[0].flatten() for leaf in played.up.leaves.values()])
    assert int(shared.sum()) == D // 4
    assert not moved[~shared].any()
    as_expected(moved[shared], 0.25 if mode == "central" else 0.5)


def test_the_steps_that_follow_see_noise_only_where_something_was_shared():
    mask = torch.tensor([[True, False, True]])
    blended = Blended({"w": torch.zeros(1, 3).double()}, {"w": mask}, torch.tensor([4]), torch.ones(1), {})
    step = privacy.central_noise_step(1.0, 1.0)
    update, _, _ = step.apply(step.init({"w": torch.zeros(1, 3)}, 5), blended, make_ctx([4]))
    assert (update["w"] != 0).tolist() == mask.tolist()


def test_masks_that_differ_between_clients_are_refused_in_central_mode_only():
    per_client = psfed(fraction=0.5, per_client=True)
    with pytest.raises(MethodError, match="one mask for all"):
        drive.play(compose(LAYOUT, per_client, dp()), ZERO, moves(1, 3), [3] * 3)
    (played,), _ = drive.play(compose(LAYOUT, per_client, dp(mode="local")), ZERO, moves(1, 3), [3] * 3)
    for leaf in played.up.leaves.values():
        assert not leaf.value[~leaf.scope].any()


def test_the_server_clips_whatever_arrives():
    step = privacy.central_noise_step(bound=2.0, noise=1.0)
    ctx = make_ctx([0, 1])
    update = {"a": torch.tensor([[30.0, 40.0], [0.3, 0.4]])}
    arrival = Arrival(update, {"a": None}, {}, {"a": torch.zeros(1, 2)}, ctx)
    assert step.receive is not None
    got = step.receive(step.init({"a": torch.zeros(1, 2)}, 2), arrival).update["a"]
    torch.testing.assert_close(got, torch.tensor([[1.2, 1.6], [0.3, 0.4]]))
    assert squared({"a": got}, 0) <= 4


@pytest.mark.slow
def test_an_adaptive_bound_finds_the_quantile():
    """Clients whose updates are 1, 2, ..., 20 long: a share `quantile` of them is within the bound in the end."""
    layout = Layout({"w": (1,)}, {"w": torch.float32})
    model, still = {"w": torch.zeros(1, 1)}, [{k: {"w": np.array([k + 1.0])} for k in range(20)}] * 150
    for quantile, low, high in ((0.5, 9, 12), (0.9, 17, 20.5)):
        recipe = dp(noise=0.01, clip=0.1, adaptive=True, quantile=quantile, count_noise=0.2)
        played, _ = drive.play(compose(layout, recipe), model, still, [1] * 20)
        assert low <= played[-1].report["dp_clip"] <= high
        assert played[0].report["dp_clip"] == pytest.approx(0.1)


def test_an_adaptive_bound_goes_down_to_the_clients_who_say_if_they_are_within():
    layout = Layout({"w": (2,)}, {"w": torch.float32})
    codec = privacy.clip_codec(1.0, adapt=True)
    parcel = Parcel({"w": Leaf(torch.tensor([[3.0, 4.0], [3.0, 4.0]]))}, {})
    view = View(make_ctx([0, 1]), {}, {}, {"clip": torch.tensor([5.1, 4.9])})
    out, _ = codec.encode(parcel, {}, view)
    assert out.notes["within"].tolist() == [1.0, 0.0]
    assert torch.equal(out.leaves["w"].value[0], torch.tensor([3.0, 4.0]))
    method = compose(layout, dp(adaptive=True, clip=0.5))
    (played,), _ = drive.play(method, {"w": torch.zeros(1, 2)}, [{0: {"w": np.ones(2)}}], [1])
    assert played.down.notes["clip"].tolist() == [0.5]
    assert played.up.notes["within"].tolist() == [0.0]


def test_a_client_cannot_say_it_is_within_twice():
    step = privacy.central_noise_step(1.0, 1.0, privacy.Adapt())
    arrival = Arrival({}, {}, {"within": torch.tensor([1.0, 7.0])}, {}, make_ctx([4, 6]))
    with pytest.raises(WireError, match="client 6 reported 7"):
        step.watch({}, arrival)


def test_the_two_noises_of_adaptive_clipping_cost_together_what_was_asked_for():
    ctx = make_ctx(list(range(40)))
    for noise, asked, count in ((1.0, 4.0, 4.0), (1.0, None, 2.0), (5.0, None, 5.0)):
        adapt = privacy.Adapt(noise=asked)
        assert privacy._noise_on_count(noise, adapt, ctx) == count
        left = privacy.noise_on_updates(noise, adapt, ctx)
        assert (2 / left) ** 2 + (1 / count) ** 2 == pytest.approx((2 / noise) ** 2)  # sensitivities 2 C and 1
    with pytest.raises(ConfigError, match=r"dp.count_noise is 0.5; it must be above 0.5"):
        privacy.central_noise_step(1.0, 1.0, privacy.Adapt(noise=0.5))


def test_the_codecs_rows_are_as_alone():
    ctx = make_ctx([5, 2, 9])
    parcel = Parcel({"a": Leaf(torch.randn(3, 7, generator=torch.Generator().manual_seed(1)))}, {})
    notes = {"n": torch.ones(3), "loss": torch.ones(3)}
    for codec in (privacy.local_noise_codec(1.0, 0.5), privacy.clip_codec(0.5)):
        whole, _ = codec.encode(parcel._replace(notes=notes), {}, view_of(ctx))
        for k in range(3):
            at = slice(k, k + 1)
            alone = Parcel({"a": Leaf(parcel.leaves["a"].value[at])}, {n: x[at] for n, x in notes.items()})
            one, _ = codec.encode(alone, {}, view_of(ctx.at(at)))
            assert torch.equal(one.leaves["a"].value, whole.leaves["a"].value[at])


def test_equal_weights_whatever_the_samples():
    weight, _ = evenly.of({}, Arrival({}, {}, {"n": torch.tensor([1.0, 500.0])}, {}, make_ctx([0, 1])))
    assert weight.tolist() == [1.0, 1.0]
    assert evenly.most(context(0, 1, 1, torch.tensor([0]), torch.tensor([9]), 5, 9, cohort=7)) == 7
