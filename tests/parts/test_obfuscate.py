"""Noise by the size of a layer, and a change of basis that only the key undoes."""

import math

import pytest
import torch

from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError
from sparing.core.parcel import Leaf, Parcel
from sparing.core.tree import Layout
from sparing.parts.code import obfuscate
from sparing.recipes.int8 import int8
from sparing.recipes.memory import memory
from sparing.recipes.obfuscate import obfuscate as recipe
from sparing.recipes.topk import topk
from support import changed, make_ctx, view_of

SHAPES = {"a": (33, 30), "b": (7,), "c": (1,)}
LAYOUT = Layout(SHAPES, dict.fromkeys(SHAPES, torch.float32))


def parcel(k=3, masked=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    leaves = {}
    for name, shape in SHAPES.items():
        mask = torch.rand(k, *shape, generator=g) < 0.4 if masked else None
        value = torch.randn(k, *shape, generator=g)
        leaves[name] = Leaf(value if mask is None else value * mask, scope=mask)
    return Parcel(leaves, {})


@pytest.mark.parametrize("masked", [False, True])
def test_a_rotation_keeps_lengths_and_angles_and_is_undone_with_the_key(masked):
    codec, ctx, before = obfuscate.basis_change_codec(LAYOUT), make_ctx([0, 4, 2]), parcel(masked=masked)
    out, _ = codec.encode(before, {}, view_of(ctx))
    back = codec.decode(out, ctx)
    wrong = codec.decode(out, changed(ctx, seed=1))
    for name, leaf in before.leaves.items():
        x, y = leaf.value.double().flatten(1), out.leaves[name].value.double().flatten(1)
        torch.testing.assert_close(y.norm(dim=1), x.norm(dim=1), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(back.leaves[name].value, leaf.value, rtol=0, atol=2e-6)
        if leaf.scope is not None:
            assert not out.leaves[name].value[~leaf.scope].any()
            assert not back.leaves[name].value[~leaf.scope].any()
    a = before.leaves["a"].value.flatten(1)
    for other in (out, wrong):
        alike = torch.cosine_similarity(other.leaves["a"].value.flatten(1), a)
        assert float(alike.abs().max()) < 5 / math.sqrt(990 * 0.4)


def test_one_key_is_one_orthogonal_matrix():
    """The same for any vector of that client, layer and round, and another for others."""
    codec, ctx = obfuscate.basis_change_codec(LAYOUT), make_ctx([0, 1])
    x, y = parcel(2, seed=1), parcel(2, seed=2)
    both = Parcel({n: Leaf(x.leaves[n].value + y.leaves[n].value) for n in SHAPES}, {})
    turned = [codec.encode(p, {}, view_of(ctx))[0].leaves["a"].value for p in (x, y, both)]
    torch.testing.assert_close(turned[0] + turned[1], turned[2], rtol=0, atol=1e-5)
    same = Parcel({n: Leaf(leaf.value[:1].expand(2, *leaf.value.shape[1:])) for n, leaf in x.leaves.items()}, {})
    rows = codec.encode(same, {}, view_of(ctx))[0].leaves["a"].value
    later = codec.encode(same, {}, view_of(ctx._replace(round=2)))[0].leaves["a"].value
    for other in (rows[1:], later[:1]):
        assert abs(float(torch.cosine_similarity(rows[:1].flatten(1), other.flatten(1)))) < 0.2


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 64, 100])
def test_blocks_of_hadamard_matrices_are_their_own_inverse(n):
    matrix = (
        torch.stack([obfuscate._hadamard_blocks(row) for row in torch.eye(n, dtype=torch.float64)])
        if n
        else torch.eye(0)
    )
    torch.testing.assert_close(matrix @ matrix, torch.eye(n, dtype=matrix.dtype))
    torch.testing.assert_close(matrix, matrix.T)


def test_one_entry_is_spread_over_its_block():
    """What an eavesdropper sees of a single large entry is many small ones."""
    lone = Parcel({"a": Leaf(torch.zeros(1, 33, 30).index_fill(1, torch.tensor([4]), 0.0))}, {})
    lone.leaves["a"].value[0, 3, 3] = 1.0
    out, _ = obfuscate.basis_change_codec(LAYOUT).encode(lone, {}, view_of(make_ctx([0])))
    assert int((out.leaves["a"].value != 0).sum()) >= 2


@pytest.mark.parametrize("masked", [False, True])
def test_noise_is_as_large_as_asked_beside_the_layer(masked):
    codec, before = obfuscate.noise_codec(LAYOUT, 0.5), parcel(masked=masked)
    leaves = {
        name: leaf._replace(value=100 * leaf.value) if name == "b" else leaf for name, leaf in before.leaves.items()
    }
    out, _ = codec.encode(Parcel(leaves, {}), {}, view_of(make_ctx([0, 4, 2])))
    for k in range(3):
        was, now, scope = leaves["a"].value[k], out.leaves["a"].value[k], leaves["a"].scope
        here = scope[k] if scope is not None else torch.ones_like(was, dtype=torch.bool)
        rms = float(was[here].square().mean().sqrt())
        assert float((now - was)[here].std()) == pytest.approx(0.5 * rms, rel=5 / math.sqrt(2 * int(here.sum())))
        assert not (now - was)[~here].any()
    moved = (out.leaves["b"].value - leaves["b"].value).abs().max()
    assert 1 < float(moved) < 500


def test_lists_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="obfuscate does nothing"):
        recipe()
    with pytest.raises(
        MethodError, match="'obfuscate' needs values, and a quantiser before it gives codes; put it first"
    ):
        compose(LAYOUT, int8(), recipe(noise=0.1))
    with pytest.raises(MethodError, match="put it first"):
        compose(LAYOUT, topk(), recipe(rotate=True))
    with pytest.raises(MethodError, match="larger than the update"):
        compose(LAYOUT, recipe(noise=2.0), memory())
    with pytest.raises(MethodError, match="nothing to remember"):
        compose(LAYOUT, recipe(rotate=True), memory())
    compose(LAYOUT, topk(), recipe(noise=0.1), int8(), memory())
    compose(LAYOUT, recipe(noise=0.1, rotate=True), topk(), int8(), memory())
