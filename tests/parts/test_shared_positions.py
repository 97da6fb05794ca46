"""randk with shared positions: the same for all clients of a round, others in the next, and unbiased if asked."""

import numpy as np
import torch

from sparing.core.codec import feedback
from sparing.core.parcel import Leaf, Parcel, Schema, Spec
from sparing.core.tree import Layout
from sparing.parts.code.sparsifiers import randk_codec
from support import make_ctx, view_of

LAYOUT = Layout({"w": (30, 4), "n": ()}, {"w": torch.float32, "n": torch.int64}, frozenset({"n"}))


def sent(ids, t=1, scope=None, **options):
    ctx = make_ctx(ids, t=t)
    value = torch.arange(1.0, 121.0).reshape(1, 30, 4).repeat(len(ids), 1, 1)
    value = value if scope is None else value * scope
    codec = randk_codec(LAYOUT, 0.25, shared=True, **options)
    parcel = Parcel({"w": Leaf(value, scope=scope), "n": Leaf(torch.ones(len(ids), dtype=torch.int64))}, {})
    return codec.encode(parcel, {}, view_of(ctx))[0].leaves["w"], codec, ctx


def mask_of(leaf, k):
    return leaf.scope.expand(k, 30, 4)


def test_everybody_sends_the_same_positions_whoever_asks():
    leaf, codec, ctx = sent([3, 8, 20])
    masks = mask_of(leaf, 3)
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])
    assert int(masks[0].sum()) == 30
    assert torch.equal(mask_of(sent([44])[0], 1)[0], masks[0])
    assert torch.equal(leaf.value != 0, masks)
    expected = codec.schema(Schema({"w": Spec((30, 4), torch.float32)}, {}), ctx)
    assert torch.equal(expected.leaves["w"].scope.expand(3, 30, 4), masks)


def test_rounds_differ_and_come_to_all_positions_alike():
    masks = torch.stack([mask_of(sent([0], t)[0], 1)[0] for t in range(1, 401)]).double()
    assert not torch.equal(masks[0], masks[1])
    assert (masks.mean(0) - 0.25).abs().max() < 5 * np.sqrt(0.25 * 0.75 / 400)


def test_within_a_scope_it_draws_from_the_scope():
    scope = torch.arange(120).reshape(1, 30, 4) % 3 == 0
    leaf, _, _ = sent([1, 2], scope=scope)
    mask = mask_of(leaf, 2)[0]
    assert int(mask.sum()) == 10
    assert not (mask & ~scope[0]).any()


def test_unbiased_values_are_scaled_so_that_their_mean_is_right():
    value = torch.arange(1.0, 121.0).reshape(30, 4)
    found = torch.stack([sent([0], t, unbiased=True)[0].value[0] for t in range(1, 401)])
    assert set((found[0] / value).unique().tolist()) == {0.0, 4.0}
    assert ((found.mean(0) / value - 1).abs() < 5 * np.sqrt(3 / 400)).all()


def test_each_client_has_a_mask_of_its_own_without_it():
    codec, ctx = randk_codec(LAYOUT, 0.25), make_ctx([1, 2])
    leaf = codec.encode(Parcel({"w": Leaf(torch.ones(2, 30, 4))}, {}), {}, view_of(ctx))[0].leaves["w"]
    assert not torch.equal(leaf.scope[0], leaf.scope[1])


def test_memory_keeps_what_was_not_sent():
    """What went out and what is remembered add up to all that was ever given."""
    codec = feedback(randk_codec(LAYOUT, 0.25, shared=True))
    state = codec.init(LAYOUT)
    given, gone = torch.zeros(1, 30, 4), torch.zeros(1, 30, 4)
    for t in range(1, 4):
        value = torch.full((1, 30, 4), float(t))
        out, state = codec.encode(Parcel({"w": Leaf(value)}, {}), state, view_of(make_ctx([0], t=t)))
        given, gone = given + value, gone + out.leaves["w"].value
    assert torch.equal(gone + state["residual/w"], given)
