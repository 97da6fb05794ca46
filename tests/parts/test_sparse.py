"""Top-k and random-k against NumPy, and what methods say must hold."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparing
from reference import topk as topk_reference
from sparing.core.compose import compose
from sparing.core.errors import ConfigError, TrainingError
from sparing.core.method import Trained
from sparing.core.parcel import Leaf, Parcel, Schema, Spec
from sparing.core.round import begin, client, first_client, first_server, incoming, outgoing
from sparing.core.tree import Layout, expand_rows
from sparing.parts.code import sparsifiers
from sparing.recipes.randk import randk
from sparing.recipes.topk import topk
from sparing.wire import parcel_sizes
from support import make_ctx, random_tree, small_layout, view_of


def one(values, **options):
    """The update after top-k, for a model of one tensor."""
    x = torch.tensor([values], dtype=torch.float32)
    layout = Layout({"w": tuple(x.shape[1:])}, {"w": torch.float32})
    codec = sparsifiers.topk_codec(layout, **options)
    out, _ = codec.encode(Parcel({"w": Leaf(x)}, {}), {}, view_of(make_ctx([0])))
    return out.leaves["w"]


def reference(x, ratio):
    x = np.asarray(x, dtype=np.float64)
    k = max(1, math.ceil(round(ratio * x.size, 9)))
    order = np.argsort(-np.abs(x), kind="stable")[:k]
    out = np.zeros_like(x)
    out[order] = x[order]
    return out


values = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=60)


@given(values, st.floats(0.01, 1))
def test_topk_is_the_stable_reference(x, ratio):
    leaf = one(x, ratio=ratio)
    np.testing.assert_array_equal(leaf.value[0].numpy(), reference(x, ratio).astype(np.float32))


@given(values, st.floats(0.01, 0.99))
def test_what_is_kept_outweighs_what_is_dropped(x, ratio):
    leaf = one(x, ratio=ratio)
    mask, size = leaf.keep[0][0], np.abs(np.array(x, dtype=np.float32))
    if mask.any() and not mask.all():
        assert size[mask.numpy()].min() >= size[~mask.numpy()].max()
    assert not (leaf.value[0][mask] == 0).any(), "zeros are never sent"
    error = np.square(size - np.abs(leaf.value[0].numpy()), dtype=np.float64).sum()
    assert error <= (1 - ratio) * np.square(size, dtype=np.float64).sum() + 1e-6


@given(values, st.floats(0.01, 0.99))
def test_quantile_mode_keeps_what_numpy_keeps(x, ratio):
    size = np.abs(np.array(x, dtype=np.float32)).astype(np.float64)
    cut = np.quantile(size, 1 - ratio)
    near = np.isclose(size, cut, rtol=1e-9, atol=0)
    want = (size >= cut) & (size > 0)
    got = one(x, ratio=ratio, mode="quantile").keep[0][0].numpy()
    assert (got == want)[~near].all()


@pytest.mark.parametrize("x", [[0.0] * 8, [3.0] * 8, [7.0]])
def test_all_zero_all_equal_and_single(x):
    leaf = one(x, ratio=0.3)
    want = reference(x, 0.3)
    assert leaf.value[0].tolist() == want.tolist()
    assert int(leaf.keep[0].sum()) == np.count_nonzero(want)


def test_k_is_exact_where_floating_point_would_round_up():
    assert int(one(list(range(1, 101)), ratio=0.07).keep[0].sum()) == 7
    assert int(one(list(range(1, 11)), ratio=0.3).keep[0].sum()) == 3


def test_over_the_whole_model_layers_compete():
    layout = Layout({"a": (4,), "b": (4,)}, {"a": torch.float32, "b": torch.float32})
    parcel = Parcel({"a": Leaf(torch.ones(1, 4) * 5), "b": Leaf(torch.ones(1, 4))}, {})
    out, _ = sparsifiers.topk_codec(layout, 0.5, over="model").encode(parcel, {}, view_of(make_ctx([0])))
    assert out.leaves["a"].value.tolist() == [[5.0] * 4]
    assert out.leaves["b"].value.tolist() == [[0.0] * 4]


def test_buffers_pass_whole():
    layout = Layout({"w": (4,), "m": (4,)}, {"w": torch.float32, "m": torch.float32}, frozenset({"m"}))
    parcel = Parcel({name: Leaf(torch.ones(1, 4)) for name in "wm"}, {})
    for codec in (sparsifiers.topk_codec(layout, 0.25), sparsifiers.randk_codec(layout, 0.25)):
        out, _ = codec.encode(parcel, {}, view_of(make_ctx([0])))
        assert out.leaves["m"] == parcel.leaves["m"]
        assert int((out.leaves["w"].value != 0).sum()) == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.floats(0.05, 0.95), st.integers(0, 99))
def test_randk_sends_exactly_k_within_scope_and_pays_no_index(d, ratio, seed):
    g = torch.Generator().manual_seed(seed)
    scope = torch.rand(2, d, generator=g) < 0.5
    layout = Layout({"w": (d,)}, {"w": torch.float32})
    value = torch.ones(2, d) * scope
    out, _ = sparsifiers.randk_codec(layout, ratio).encode(
        Parcel({"w": Leaf(value, scope=scope)}, {}), {}, view_of(make_ctx([0, 3]))
    )
    leaf = out.leaves["w"]
    assert leaf.keep == ()
    assert leaf.scope is not None
    assert not (leaf.scope & ~scope).any()
    for k in range(2):
        p = int(scope[k].sum())
        assert int(leaf.scope[k].sum()) == (max(1, math.ceil(ratio * p - 1e-9)) if p else 0)


@pytest.mark.slow
def test_randk_is_unbiased_when_asked():
    """Monte Carlo: the mean over many rounds of the scaled update is the update."""
    layout = Layout({"w": (20,)}, {"w": torch.float32})
    x, rounds = torch.arange(1.0, 21.0)[None], 4000
    codec = sparsifiers.randk_codec(layout, 0.25, unbiased=True)
    total = torch.zeros(20)
    for t in range(rounds):
        total += codec.encode(Parcel({"w": Leaf(x)}, {}), {}, view_of(make_ctx([0], t=t)))[0].leaves["w"].value[0]
    spread = x[0] * math.sqrt((1 / 0.25 - 1) / rounds)
    assert ((total / rounds - x[0]).abs() < 5 * spread).all()


@pytest.mark.parametrize(
    "options", [{"ratio": 0}, {"ratio": -0.1}, {"ratio": 1.5}, {"ratio": 0.1, "mode": "x"}, {"ratio": 0.1, "over": "x"}]
)
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError, match=r"topk\.(ratio|mode|over) is"):
        one([1.0, 2.0], **options)


@pytest.mark.parametrize("options", [{}, {"mode": "quantile"}, {"over": "model"}], ids=str)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_what_is_not_a_number_is_sent_so_that_the_server_can_refuse_it(bad, options):
    """Dropped, it would hide in a residual, or leave a hole in the update."""
    for x in ([1.0, bad, 3.0, 0.0, 4.0], [bad], [0.0] * 9 + [bad]):
        for ratio in (0.1, 0.4, 0.9):
            leaf = one(x, ratio=ratio, **options)
            assert not leaf.value[0][x.index(bad)].isfinite()
            assert not (leaf.value[0][leaf.keep[0][0]] == 0).any(), "zeros are still never sent"


@pytest.mark.parametrize("recipe", [topk, randk])
@pytest.mark.parametrize("memory", [False, True])
def test_a_client_whose_update_is_not_a_number_is_refused_by_name(recipe, memory):
    method = compose(small_layout(), recipe(0.5, memory=memory))
    model, ctx = random_tree(method.layout, 1), make_ctx([4, 6])
    server = first_server(method, model, 50)

    def broken(lesson, ctx):
        after = {name: x.repeat(2, *[1] * (x.dim() - 1)) for name, x in lesson.start.items()}
        after["3.weight"][1] = math.nan
        return Trained(after, lesson.memory, {"loss": torch.zeros(2)})

    down = outgoing(method, server, ctx)
    up, _ = client(method, expand_rows(first_client(method, model), 2), down, broken, ctx)
    with pytest.raises(TrainingError, match=r"client 6 sent an update of size nan for '3\.weight'"):
        incoming(method, server, begin(method, server, ctx), down, up, ctx)


@pytest.mark.parametrize("options", [{"mode": "quantile"}, {"over": "model"}], ids=str)
@pytest.mark.parametrize("x", [[0.0] * 8, [3.0] * 8, [7.0]])
def test_all_zero_all_equal_and_single_in_the_other_modes(x, options):
    leaf = one(x, ratio=0.3, **options)
    assert leaf.value[0].tolist() == (x if options.get("mode") else reference(x, 0.3).tolist())
    assert int(leaf.keep[0].sum()) == int((leaf.value != 0).sum())


def test_ratio_one_is_fedavg_bit_for_bit_and_byte_for_byte():
    study = {"rounds": 2, "sample": 3, "seed": 2, "local": {"epochs": 1}}
    plain = sparing.run("digits", "fedavg", **study)
    for name in ("topk", "randk"):
        whole = sparing.run("digits", [{name: {"ratio": 1.0}}], **study)
        assert (whole.model_sha256, whole.up_bytes) == (plain.model_sha256, plain.up_bytes)


def test_a_tenth_of_the_values_is_nearly_a_ninth_of_the_bytes():
    """By values alone 10 % is 10x; with 32-bit positions it would be 5x, with a bitmap 7.6x; the bound is 8.7x."""
    d = 200_000
    layout = Layout({"w": (d,)}, {"w": torch.float32})
    x = torch.randn(1, d, generator=torch.Generator().manual_seed(0))
    out, _ = sparsifiers.topk_codec(layout, 0.1).encode(Parcel({"w": Leaf(x)}, {}), {}, view_of(make_ctx([0])))
    spent = {kind: int(size[0]) for kind, size in parcel_sizes(out).items()}
    assert 4 * d / spent["value"] == 10
    entropy = -(0.1 * math.log2(0.1) + 0.9 * math.log2(0.9))
    bound = 32 / (3.2 + entropy)
    assert bound == pytest.approx(8.7, abs=0.03)
    assert 0.985 * bound < 4 * d / sum(spent.values()) <= bound


PAIR = {"q.lora_a.weight": (3, 8), "q.lora_b.weight": (5, 3), "v.lora_b.weight": (5, 3), "head.weight": (2, 5)}


def drawn_pair(seed):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(2, *shape, generator=g) for name, shape in PAIR.items()}


def of_pair(tree, after, ratio=0.2, **options):
    layout = Layout(PAIR, dict.fromkeys(PAIR, torch.float32))
    codec = sparsifiers.topk_codec(layout, ratio, **options)
    leaves = {name: Leaf(x) for name, x in tree.items()}
    out, _ = codec.encode(Parcel(leaves, {}), {}, view_of(make_ctx([0, 1]))._replace(after=after))
    sizes = {name: Spec(shape) for name, shape in PAIR.items()}
    return out.leaves, codec.schema(Schema(sizes, {}, ""), make_ctx([0]))


def test_both_factors_of_an_adapter_compete_by_what_they_do_to_the_product():
    tree, after, stretch = drawn_pair(2), drawn_pair(3), torch.tensor([64.0, 1.0, 0.125])
    masks = []
    for factor in (torch.ones(3), stretch):
        longer = {"q.lora_b.weight": factor, "q.lora_a.weight": 1 / factor[:, None]}
        mine, whole = ({n: x * longer.get(n, 1.0) for n, x in some.items()} for some in (tree, after))
        leaves, expected = of_pair(mine, whole)
        ends = [leaves[f"q.lora_{end}.weight"] for end in "ba"]
        for k in range(2):
            parts = (some[f"q.lora_{end}.weight"][k].double().numpy() for some in (mine, whole) for end in "ba")
            for leaf, mask in zip(ends, topk_reference.over_pair(*parts, 0.2), strict=True):
                assert np.array_equal(leaf.keep[0][k].numpy(), mask)
            assert sum(int(leaf.keep[0][k].sum()) for leaf in ends) == math.ceil(0.2 * 39)
        assert torch.equal(ends[0].value, torch.where(ends[0].keep[0], mine["q.lora_b.weight"], 0.0))
        assert int(leaves["v.lora_b.weight"].keep[0][0].sum()) == 3, "one without the other is a layer of its own"
        assert [expected.leaves[name].most for name in PAIR] == [8, 8, 3, 2]
        assert expected.limit is not None
        assert expected.limit.sent <= math.ceil(0.2 * 64) + 4
        masks.append([leaf.keep[0] for leaf in ends])
    assert all(torch.equal(one, other) for one, other in zip(*masks, strict=True)), "the product is the same"


def test_of_a_factor_that_does_nothing_or_is_not_finite():
    tree, after = drawn_pair(3), drawn_pair(4)
    leaves, _ = of_pair(tree, after | {"q.lora_b.weight": torch.zeros(2, 5, 3)})
    assert int(leaves["q.lora_b.weight"].keep[0][0].sum()) == 8
    assert not leaves["q.lora_a.weight"].keep[0].any(), "beside a B of zero no A moves anything"
    for bad in (math.inf, math.nan):
        tree["q.lora_a.weight"][0, 1, 1] = after["q.lora_a.weight"][0, 1, 1] = bad
        assert not of_pair(tree, after)[0]["q.lora_a.weight"].value[0, 1, 1].isfinite(), "for whoever refuses it"


def test_where_factors_cannot_be_compared_each_is_a_layer():
    tree, alone = drawn_pair(3), {name: math.ceil(0.2 * math.prod(shape)) for name, shape in PAIR.items()}
    leaves, _ = of_pair(tree, {})
    assert {name: int(leaf.keep[0][0].sum()) for name, leaf in leaves.items()} == alone, "on the server"
    codes = {name: (x * 40).to(torch.int8) for name, x in tree.items()}
    leaves, _ = of_pair(codes, tree)
    assert {name: int(leaf.keep[0][0].sum()) for name, leaf in leaves.items()} == alone, "of scales of their own"
    quantiles = {name: sparsifiers.above_quantile([x], [x[0].numel()], 0.2)[0][0] for name, x in tree.items()}
    leaves, _ = of_pair(tree, tree, mode="quantile")
    assert all(torch.equal(leaves[name].keep[0], mask) for name, mask in quantiles.items())
    leaves, _ = of_pair(tree, tree, over="model")
    assert sum(int(leaf.keep[0][0].sum()) for leaf in leaves.values()) == math.ceil(0.2 * 64)
