"""The structured codec: which blocks are sent, what they cost, and what methods say must hold."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from reference import fedscr as reference
from sparing.core.codec import chain, feedback
from sparing.core.errors import ConfigError, MethodError
from sparing.core.method import View
from sparing.core.parcel import Cut, Leaf, Parcel, Schema, parcel_row, sent_mask, spec_of_cut
from sparing.core.tree import expand_rows, layout_of, take_rows
from sparing.parts.code import quantisers, sparsifiers
from sparing.parts.code.fedscr import pruned_share, structured_codec
from sparing.wire import from_bytes, nbytes, parcel_sizes, to_bytes
from support import make_ctx, random_tree, small_layout, update_parcel, view_of

INF = math.inf
CONVS = {
    "2-D": nn.Conv2d(3, 5, 3),
    "1x1": nn.Conv2d(6, 4, 1),
    "grouped": nn.Conv2d(6, 4, 3, groups=2),
    "depthwise": nn.Conv2d(4, 4, 3, groups=4),
    "1-D": nn.Conv1d(3, 6, 5),
    "3-D": nn.Conv3d(2, 3, 2),
    "one filter": nn.Conv2d(5, 1, 1),
    "one block": nn.Conv2d(1, 1, 3),
}
LAYOUT = small_layout()
METER = pruned_share(LAYOUT, dense=False)


def thin(u, threshold, mode="absolute", scope=None):
    """The leaf that one client sends of the update u of one convolution, and the layout it belongs to."""
    u = torch.as_tensor(u, dtype=torch.float32)
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[u.dim() - 3](u.shape[1], u.shape[0], tuple(u.shape[2:]), bias=False)
    layout = layout_of(conv)
    leaf = Leaf(u[None] if scope is None else u[None] * scope, scope=scope)
    out, _ = structured_codec(layout, threshold, mode).encode(Parcel({"weight": leaf}, {}), {}, view_of(make_ctx([0])))
    return out.leaves["weight"]


def grid(leaf):
    """Which blocks are sent: bool [F, C]."""
    return (leaf.keep[-2] & leaf.keep[-1])[0].flatten(2)[..., 0].numpy()


@st.composite
def updates(draw):
    """Few small whole numbers, so that sums meet thresholds exactly."""
    shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 3)))
    values = draw(st.lists(st.integers(-2, 2), min_size=math.prod(shape), max_size=math.prod(shape)))
    return np.array(values, np.float64).reshape(shape)


@settings(deadline=None)
@given(updates(), st.integers(0, 12), st.sampled_from(["absolute", "relative", "budget"]))
def test_blocks_are_those_of_the_reference(u, step, mode):
    threshold = step if mode == "absolute" else step / 12 if mode == "relative" else (step + 1) / 13
    leaf = thin(u, threshold, mode)
    want = reference.blocks(u, threshold, mode)
    np.testing.assert_array_equal(grid(leaf), want)
    np.testing.assert_array_equal(leaf.value[0].numpy(), u * reference.shaped(want, u))


@pytest.mark.parametrize("name", CONVS)
def test_every_kind_of_convolution(name):
    """The channel axis of a grouped one is that of its weight: channels of a group."""
    layer = CONVS[name]
    layout = layout_of(layer)
    parcel = update_parcel(layout, 2, seed=1)
    u = parcel.leaves["weight"].value
    bar = float(u.abs().flatten(2).sum(2).median())
    codec, ctx = structured_codec(layout, bar), make_ctx([1, 2])
    out, _ = codec.encode(parcel, {}, view_of(ctx))
    assert torch.equal(out.leaves["bias"].value, parcel.leaves["bias"].value), "the rest goes whole"
    f, c = u.shape[1:3]
    for k in range(2):
        mask = reference.blocks(u[k].double().numpy(), bar)
        np.testing.assert_array_equal(
            out.leaves["weight"].value[k].numpy(), u[k].numpy() * reference.shaped(mask, u[k].numpy())
        )
        plain = Schema(
            {n: spec_of_cut(layout.shapes[n], layout.dtypes[n], Cut()) for n in layout.shapes}, {"n": 1, "loss": 1}
        )
        back = from_bytes(to_bytes(out, k), codec.schema(plain, ctx.at(slice(k, k + 1))))
        assert torch.equal(back.leaves["weight"].value[0], out.leaves["weight"].value[k])
    assert int(parcel_sizes(out)["index"].max()) <= math.ceil(f / 8) + math.ceil(c / 8), (
        "at most F + C bits, in whole bytes"
    )
    tags = parcel_sizes(out)["header"] - parcel_sizes(parcel)["header"]
    assert int(tags.max()) <= 2, "and a byte for each mask to say how it is written"


def test_the_wire_pays_f_plus_c_bits_and_the_kept_block():
    u = torch.rand(64, 32, 3, 3) + 0.5
    u[::2] /= 1000
    u[:, ::4] /= 1000
    leaf = thin(u, 50.0)
    assert grid(leaf).sum() == 32 * 24
    spent = parcel_sizes(Parcel({"w": leaf}, {}))
    assert int(spent["value"]) == 4 * 9 * 32 * 24
    assert int(spent["index"]) == 64 // 8 + 32 // 8


def test_a_layer_that_sends_no_block_pays_no_index():
    """A filter passes, but no channel does."""
    u = torch.ones(2, 16, 1)
    u[1] = 0.25
    leaf = thin(u, 5.0)
    assert not any(mask.any() for mask in leaf.keep)
    assert int(parcel_sizes(Parcel({"w": leaf}, {}))["index"]) == 0


def test_the_boundary_is_strict():
    """Sums equal to the threshold are left out."""
    u = torch.full((4, 4, 1, 1), 0.25)
    assert not grid(thin(u, 1.0)).any()
    assert grid(thin(u, math.nextafter(1.0, 0))).all()
    assert not grid(thin(u, 1.0, "relative")).any()
    assert grid(thin(u, math.nextafter(1.0, 0), "relative")).all()


def test_both_sums_are_of_the_same_update():
    """Channel 0 is heavy because of filter 1, which is left out; the channel counts with it all the same."""
    u = torch.tensor([[1.0, 6.0], [4.0, 0.0]])[:, :, None]
    np.testing.assert_array_equal(grid(thin(u, 4.5)), [[True, True], [False, False]])


@settings(deadline=None)
@given(updates(), st.lists(st.integers(0, 60), min_size=2, max_size=6), st.sampled_from(["absolute", "relative"]))
def test_a_higher_threshold_never_sends_more(u, steps, mode):
    sent_of = [grid(thin(u, step / (4 if mode == "absolute" else 40), mode)) for step in sorted(steps)]
    for low, high in itertools.pairwise(sent_of):
        assert not (high & ~low).any()


@settings(deadline=None)
@given(updates())
def test_zero_drops_only_what_is_all_zero_and_infinity_sends_nothing(u):
    np.testing.assert_array_equal(thin(u, 0.0).value[0].numpy(), u)
    np.testing.assert_array_equal(thin(u, 0.0, "relative").value[0].numpy(), u)
    filters, channels = np.abs(u).sum((1, 2)) > 0, np.abs(u).sum((0, 2)) > 0
    np.testing.assert_array_equal(grid(thin(u, 0.0)), np.outer(filters, channels))
    for mode in ("absolute", "relative"):
        leaf = thin(u, INF, mode)
        assert not leaf.value.any()
        assert int(parcel_sizes(Parcel({"w": leaf}, {}))["value"]) == 0


def test_relative_does_not_mind_the_scale_and_a_silent_layer_sends_nothing():
    u = torch.randn(5, 4, 3, 3, generator=torch.Generator().manual_seed(1))
    np.testing.assert_array_equal(grid(thin(u, 0.7, "relative")), grid(thin(u * 1024, 0.7, "relative")))
    assert 0 < grid(thin(u, 0.8, "relative")).sum() < 20
    leaf = thin(torch.zeros(5, 4, 3, 3), 0.0, "relative")
    assert not grid(leaf).any()
    assert not leaf.value.isnan().any()


@settings(deadline=None)
@given(updates(), st.integers(1, 20), st.integers(0, 99))
def test_the_budget_is_kept_within_a_scope(u, step, seed):
    """At most the share of what is shared, by the lowest threshold; where nothing fits, the strongest structures."""
    scope = torch.rand(1, *u.shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    u = u * scope[0].numpy()
    leaf, size = thin(u, step / 20, "budget", scope), scope[0].sum(-1).numpy()
    want = reference.within(np.abs(u).sum((1, 2)), np.abs(u).sum((0, 2)), size, step / 20)
    np.testing.assert_array_equal(leaf.value[0].numpy(), u * want[..., None])
    assert not (sent_mask(leaf) & ~scope).any()
    assert bool(sent_mask(leaf).any()) == bool(u.any()), "a layer that moved is heard of"


def test_a_full_budget_sends_all_and_a_whole_share_is_met_exactly():
    u = torch.arange(1.0, 101.0)[:, None, None]
    assert grid(thin(u, 1.0, "budget")).all()
    for share in (0.29, 0.07, 0.5, 0.01):
        assert grid(thin(u, share, "budget")).sum() == round(100 * share)
    assert grid(thin(u, 0.001, "budget")).sum() == 1, "less than one filter: the strongest one"


@pytest.mark.parametrize("mode", ["absolute", "relative", "budget"])
def test_what_is_not_a_number_is_sent_so_that_the_server_can_refuse_it(mode):
    for bad in (math.nan, INF):
        u = torch.ones(3, 4, 2)
        u[1, 2, 0] = bad
        assert not thin(u, 0.9, mode).value[0, 1, 2, 0].isfinite()


def test_dense_layers_are_thinned_only_when_asked():
    parcel, view = update_parcel(LAYOUT, 2), view_of(make_ctx([1, 2]))
    out, _ = structured_codec(LAYOUT, INF).encode(parcel, {}, view)
    assert {name for name, leaf in out.leaves.items() if leaf.keep} == {"0.weight"}
    out, _ = structured_codec(LAYOUT, 2.5, dense=True).encode(parcel, {}, view)
    assert {name for name, leaf in out.leaves.items() if leaf.keep} == {"0.weight", "3.weight"}
    for k in range(2):
        mask = reference.blocks(parcel.leaves["3.weight"].value[k].double().numpy(), 2.5)
        assert 0 < mask.sum() < mask.size
        np.testing.assert_array_equal((sent_mask(out.leaves["3.weight"])[k]).numpy(), mask)


CODECS = {
    "absolute": lambda: structured_codec(LAYOUT, 14.0),
    "relative": lambda: structured_codec(LAYOUT, 0.8, "relative", dense=True),
    "budget": lambda: structured_codec(LAYOUT, 0.4, "budget", dense=True),
    "fedscr+int8": lambda: chain(structured_codec(LAYOUT, 14.0), quantisers.uniform_codec(LAYOUT, 8)),
    "fedscr+topk": lambda: chain(structured_codec(LAYOUT, 14.0), sparsifiers.topk_codec(LAYOUT, 0.5)),
    "topk+fedscr": lambda: chain(sparsifiers.topk_codec(LAYOUT, 0.5), structured_codec(LAYOUT, 9.0)),
    "fedscr+randk": lambda: chain(structured_codec(LAYOUT, 14.0), sparsifiers.randk_codec(LAYOUT, 0.5)),
    "randk+fedscr": lambda: chain(sparsifiers.randk_codec(LAYOUT, 0.5), structured_codec(LAYOUT, 9.0)),
}


def scoped(k, seed, kind):
    if kind == "whole":
        return {}
    g = torch.Generator().manual_seed(seed)
    return {n: torch.rand(1 if kind == "shared" else k, *LAYOUT.shapes[n], generator=g) < 0.8 for n in LAYOUT.params}


laws = pytest.mark.parametrize("name", CODECS)
masks = pytest.mark.parametrize("kind", ["whole", "shared", "per client"])


@laws
@masks
def test_rows_are_as_alone_and_the_receiver_knows_what_to_expect(name, kind):
    codec, ctx, scope = CODECS[name](), make_ctx([2, 5, 9]), scoped(3, 2, kind)
    parcel = update_parcel(LAYOUT, 3, scope=scope)
    out, _ = codec.encode(parcel, {}, view_of(ctx))
    assert any(leaf.keep for leaf in out.leaves.values())
    for k in range(3):
        one, pick = ctx.at(slice(k, k + 1)), {n: x if len(x) == 1 else x[k : k + 1] for n, x in scope.items()}
        alone, _ = codec.encode(parcel_row(parcel, k), {}, view_of(one))
        assert to_bytes(alone, 0) == to_bytes(out, k)
        assert len(to_bytes(out, k)) == int(nbytes(out)[k])
        specs = {n: spec_of_cut(LAYOUT.shapes[n], LAYOUT.dtypes[n], Cut(pick.get(n))) for n in LAYOUT.shapes}
        back = from_bytes(to_bytes(out, k), codec.schema(Schema(specs, {"n": 1, "loss": 1}), one))
        got, want = codec.decode(back, one), codec.decode(parcel_row(out, k), one)
        for n, leaf in want.leaves.items():
            assert torch.equal(leaf.value, got.leaves[n].value), n
        seen, meant = (METER.watch(parcel, one)["pruned"] for parcel in (back, parcel_row(out, k)))
        np.testing.assert_array_equal(seen, meant)


@laws
@masks
def test_what_is_sent_and_what_is_remembered_is_what_was_wanted(name, kind):
    codec, exact = feedback(CODECS[name]()), "int8" not in name
    state, held = expand_rows(codec.init(LAYOUT), 2), 0
    for t in range(1, 4):
        ctx, parcel = make_ctx([4, 6], t=t), update_parcel(LAYOUT, 2, seed=t, scope=scoped(2, t, kind))
        inputs = {n: (parcel.leaves[n].value.clone(), state[f"residual/{n}"].clone()) for n in LAYOUT.params}
        before = state
        out, state = codec.encode(parcel, state, view_of(ctx))
        decoded, lost = codec.decode(out, ctx), codec.lost(out, state, ctx)
        for n, (value, old) in inputs.items():
            assert torch.equal(parcel.leaves[n].value, value), "inputs are not mutated"
            assert torch.equal(before[f"residual/{n}"], old)
            scope = parcel.leaves[n].scope
            inside = torch.ones_like(value, dtype=torch.bool) if scope is None else scope.expand_as(value)
            residual, got = state[f"residual/{n}"], decoded.leaves[n].value
            assert torch.allclose((got + residual)[inside], (value + old)[inside], atol=0 if exact else 1e-5)
            assert torch.allclose(lost[f"residual/{n}"][inside], (value + old)[inside], atol=0 if exact else 1e-5)
            assert torch.equal(residual[~inside], old[~inside]), "out of scope the residual waits"
            left_out = inside & (got == 0) & (value + old != 0)
            assert bool(residual[left_out].all()), "what was left out is in the residual"
            held += int(left_out.sum()) if n == "0.weight" else 0
    assert held


def test_the_residual_is_a_row_of_its_own():
    codec = feedback(structured_codec(LAYOUT, 14.0))
    parcel, ctx = update_parcel(LAYOUT, 3), make_ctx([2, 5, 9])
    state = expand_rows(codec.init(LAYOUT), 3)
    _, after = codec.encode(parcel, state, view_of(ctx))
    for k in range(3):
        one = slice(k, k + 1)
        _, alone = codec.encode(parcel_row(parcel, k), take_rows(state, one), view_of(ctx.at(one)))
        assert all(torch.equal(x[one], alone[n]) for n, x in after.items())


def test_what_was_not_sent_is_counted_exactly():
    """A zero inside a block that was sent, was sent; outside the scope there is nothing to send."""
    conv = nn.Conv2d(4, 2, 1, bias=False)
    u = torch.tensor([[3.0, 0.0, 4.0, 0.1], [0.1, 0.1, 0.1, 0.1]]).reshape(1, 2, 4, 1, 1)
    scope = torch.ones(1, 2, 4, 1, 1, dtype=torch.bool)
    scope[0, 1, 3] = False
    codec, ctx = structured_codec(layout_of(conv), 0.05), make_ctx([0])

    def share(parcel):
        meter = pruned_share(layout_of(conv), dense=False)
        return meter.watch(codec.encode(parcel, {}, view_of(ctx))[0], ctx)["pruned"][0].tolist()

    assert share(Parcel({"weight": Leaf(u)}, {})) == [0.0, 0.0]
    assert share(Parcel({"weight": Leaf(u * scope, scope=scope)}, {})) == [0.0, 0.0]
    codec = structured_codec(layout_of(conv), 0.45)
    assert share(Parcel({"weight": Leaf(u)}, {})) == [0.75, 0.75]
    assert share(Parcel({"weight": Leaf(u * scope, scope=scope)}, {})) == [5 / 7, 5 / 7]
    assert all(math.isnan(x) for x in share(Parcel({"weight": Leaf(u * 0, scope=scope & False)}, {})))
    assert all(math.isnan(x) for x in share(Parcel({}, {"n": torch.ones(1)})))


def test_the_two_numbers_a_client_reports():
    start, after = random_tree(LAYOUT, 1, seed=1), random_tree(LAYOUT, 2, seed=2)
    parcel = Parcel({n: Leaf(after[n] - start[n]) for n in LAYOUT.shapes}, {})
    told = {"threshold": torch.tensor([15.0, 20.0])}
    codec = structured_codec(LAYOUT, 99.0, adaptive=True, dense=True)
    out, _ = codec.encode(parcel, {}, View(make_ctx([3, 4]), start, after, told))
    for k in range(2):
        moved, sent_sum, size = 0.0, 0.0, 0.0
        for n in ("0.weight", "3.weight"):
            w, u = after[n][k].double().numpy(), parcel.leaves[n].value[k].double().numpy()
            mask = reference.blocks(u, float(told["threshold"][k]))
            moved += np.abs(u).sum() / np.abs(w).sum()
            sent_sum, size = sent_sum + np.abs(u[mask]).sum(), size + np.abs(w).sum()
        assert float(out.notes["divergence"][k]) == pytest.approx(math.sqrt(moved), rel=1e-6)
        assert float(out.notes["significance"][k]) == pytest.approx(math.sqrt(sent_sum / size), rel=1e-6)
    assert bool((out.notes["significance"] > 0).all()), "both sent something"
    assert codec.schema(Schema({}, {"n": 1}), make_ctx([3])).notes == {"n": 1, "divergence": 1, "significance": 1}


def test_a_model_of_zeros_reports_zeros():
    still = {n: torch.zeros_like(x) for n, x in random_tree(LAYOUT, 1).items()}
    view = View(make_ctx([3]), still, still, {"threshold": torch.ones(1)})
    out, _ = structured_codec(LAYOUT, 1.0, adaptive=True).encode(
        Parcel({n: Leaf(x) for n, x in still.items()}, {}), {}, view
    )
    assert (out.notes["divergence"].item(), out.notes["significance"].item()) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threshold": -0.1}, r"fedscr\.threshold is -0\.1; it must be at least 0"),
        ({"threshold": math.nan}, r"fedscr\.threshold is nan"),
        ({"threshold": 0.3, "mode": "quantile"}, r"fedscr\.threshold_mode is 'quantile'; use one of 'absolute', "),
        (
            {"threshold": 0.0, "mode": "budget"},
            r"fedscr\.threshold, the share .* is 0\.0; it must be above 0 and at most 1",
        ),
        ({"threshold": 1.5, "mode": "budget"}, r"fedscr\.threshold, the share .* is 1\.5"),
        ({"threshold": math.nan, "mode": "budget"}, r"fedscr\.threshold, the share .* is nan"),
        ({"threshold": 0.3, "mode": "budget", "adaptive": True}, r"fedscr\.adaptive moves a threshold, and budget"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        structured_codec(LAYOUT, **options)


def test_a_model_with_nothing_to_thin_is_refused():
    dense, bare = layout_of(nn.Linear(3, 2)), layout_of(nn.BatchNorm1d(3))
    with pytest.raises(
        MethodError, match=r"would thin out nothing: the model has no convolution layer; set dense: true"
    ):
        structured_codec(dense, 0.3)
    structured_codec(dense, 0.3, dense=True)
    with pytest.raises(MethodError, match=r"no convolution or dense layer; drop fedscr"):
        structured_codec(bare, 0.3, dense=True)


@pytest.mark.parametrize("name", ["plain", "fedscr+int8"])
def test_where_every_parcel_arrives_nothing_is_remembered_of_what_is_never_changed(name):
    inner = structured_codec(LAYOUT, 2.0)
    inner = inner if name == "plain" else chain(inner, quantisers.uniform_codec(LAYOUT, 8))
    ways = [feedback(inner, arrives=arrives) for arrives in (False, True)]
    states = [expand_rows(codec.init(LAYOUT), 2) for codec in ways]
    assert states[1].keys() == ({"residual/0.weight"} if name == "plain" else states[0].keys())
    for t in range(1, 5):
        ctx, parcel = make_ctx([4, 6], t=t), update_parcel(LAYOUT, 2, seed=t)
        outs = []
        for i, codec in enumerate(ways):
            out, states[i] = codec.encode(parcel, states[i], view_of(ctx))
            outs.append(out)
        assert to_bytes(outs[0], 1) == to_bytes(outs[1], 1)
        assert all(torch.equal(x, states[0][n]) for n, x in states[1].items())
        untouched = outs[1].leaves.keys() - {"0.weight"}
        assert name != "plain" or all(outs[1].leaves[n].value is parcel.leaves[n].value for n in untouched)
