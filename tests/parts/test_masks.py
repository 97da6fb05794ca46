"""Partial sharing: the masks."""

import math

import pytest
import torch

from sparing.core.errors import ConfigError
from sparing.core.tree import Layout
from sparing.parts import masks
from support import make_ctx, random_tree, small_layout

LAYOUT = small_layout()
MODEL = random_tree(LAYOUT, 1)


def drawn(share, ctx):
    return share.down({}, MODEL, ctx)


def chosen(cuts, k=0):
    return torch.cat([cuts[n].mask[min(k, cuts[n].mask.shape[0] - 1)].flatten() for n in LAYOUT.params])


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("per_client", [False, True])
def test_exactly_round_p_d_positions_known_to_both_ends(fraction, per_client):
    share = masks.random(LAYOUT, fraction, per_client)
    ctx = make_ctx([1, 4, 6])
    down, up = drawn(share, ctx), share.up({}, ctx)
    for k in range(3):
        assert int(chosen(down, k).sum()) == math.floor(fraction * LAYOUT.size + 0.5)
        other_end = masks.random(LAYOUT, fraction, per_client)
        assert torch.equal(chosen(down, k), chosen(drawn(other_end, ctx.at(slice(k, k + 1)))))
        assert torch.equal(chosen(down, k), chosen(up, k))
    assert torch.equal(chosen(down, 0), chosen(down, 1)) != per_client
    assert all(not cut.told for cut in down.values()), "the index is free"
    assert down["1.running_mean"].mask is None, "buffers go whole"


def test_masks_differ_between_rounds_and_between_layers_of_one_size():
    layout = Layout({"a": (64,), "b": (64,)}, {"a": torch.float32, "b": torch.float32})
    share = masks.random(layout, 0.5)
    one, two = share.up({}, make_ctx([0], t=1)), share.up({}, make_ctx([0], t=2))
    assert not torch.equal(one["a"].mask, one["b"].mask)
    assert not torch.equal(one["a"].mask, two["a"].mask)


@pytest.mark.parametrize("fraction", [0.5, 0.1])
def test_the_chance_to_be_chosen_within_t_rounds(fraction):
    """P = 1 - (1 - p)^T; p = .5, T = 10: .9990."""
    layout = Layout({"w": (20_000,)}, {"w": torch.float32})
    share = masks.random(layout, fraction)
    ever = torch.zeros(20_000, dtype=torch.bool)
    for t in range(10):
        ever |= share.up({}, make_ctx([0], t=t))["w"].mask[0]
    want = 1 - (1 - fraction) ** 10
    assert abs(float(ever.double().mean()) - want) < 5 * math.sqrt(want * (1 - want) / 20_000)


def test_first_contact_is_a_full_download_unless_seeded():
    ctx = make_ctx([1, 2])._replace(first=torch.tensor([True, False]))
    cuts = drawn(masks.random(LAYOUT, 0.5), ctx)
    assert bool(chosen(cuts, 0).all())
    assert int(chosen(cuts, 1).sum()) == math.floor(0.5 * LAYOUT.size + 0.5)
    assert int(chosen(masks.random(LAYOUT, 0.5).up(cuts, ctx)).sum()) < LAYOUT.size, "the upload is masked all the same"
    seeded = drawn(masks.random(LAYOUT, 0.5, first="seed"), ctx)
    assert torch.equal(chosen(seeded, 0), chosen(cuts, 1))


def test_the_ends_of_the_range():
    nothing, all_of_it = masks.random(LAYOUT, 0), masks.random(LAYOUT, 1)
    assert drawn(nothing, make_ctx([1])) == {}
    assert nothing.own == frozenset(LAYOUT.shapes)
    assert all(cut.mask is None for cut in drawn(all_of_it, make_ctx([1])).values())
    assert all_of_it.own == frozenset()


@pytest.mark.parametrize("options", [{"fraction": 1.1}, {"fraction": -0.1}, {"fraction": 0.5, "first": "x"}])
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError, match=r"psfed\.(fraction|first) is"):
        masks.random(LAYOUT, **options)
