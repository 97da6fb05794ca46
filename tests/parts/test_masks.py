"""Partial sharing over the rounds: fractions, full syncs, and the ends of the range."""

import pytest
import torch

from sparing.core.errors import ConfigError
from sparing.core.method import Blended
from sparing.core.parcel import Cut
from sparing.parts.share import schedule as masks
from sparing.parts.share.selectors import selected_share, selector_of
from support import changed, make_ctx, random_tree, small_layout

LAYOUT = small_layout()
MODEL = random_tree(LAYOUT, 1)
WHOLE = {name: Cut() for name in LAYOUT.shapes}
SELECTORS = ["random", "magnitude", "gradient", "layers", "fixed", {"union": ["random", "magnitude"]}]


def share_of(fraction=0.5, selector="random", sync=None, **schedule):
    count = masks.shared_counts(LAYOUT.size, fraction, **schedule)
    part = selected_share(LAYOUT, selector_of(selector, LAYOUT, count, False, 0.1), count)
    return masks.partial_share(LAYOUT, part, count, sync)


def both_ways(share, t):
    ctx = make_ctx([1], t=t)
    down = share.down(share.init(MODEL), MODEL, ctx)
    return down, share.up(down, ctx)


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_the_ends_of_the_range(selector):
    nothing, all_of_it = share_of(0, selector), share_of(1, selector)
    assert both_ways(nothing, 1) == ({}, {})
    assert nothing.own == nothing.private == frozenset(LAYOUT.shapes)
    assert both_ways(all_of_it, 1) == (WHOLE, WHOLE)
    assert all_of_it.own == frozenset()
    half = share_of(0.5, selector)
    assert half.own == frozenset(LAYOUT.params)
    assert half.private == frozenset()
    assert all(cut.mask is not None for name, cut in both_ways(half, 1)[0].items() if name in half.own)


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_a_full_sync_goes_both_ways_and_needs_no_index(selector):
    share = share_of(0.5, selector, sync=3)
    for t in range(1, 8):
        down, up = both_ways(share, t)
        assert ((down, up) == (WHOLE, WHOLE)) == (t % 3 == 0)


def test_sync_every_round_keeps_nothing_and_sync_at_fraction_0_keeps_buffers_too():
    assert share_of(0.5, sync=1).own == frozenset()
    share = share_of(0.0, sync=2)
    assert both_ways(share, 2) == (WHOLE, WHOLE)
    for t in (1, 3):
        down, up = both_ways(share, t)
        assert up == {}
        assert down.keys() == LAYOUT.shapes.keys()
        assert not any(bool(cut.mask.any()) for cut in down.values()), "nothing for clients already met"
        met = changed(make_ctx([0, 1], t=t), first=torch.tensor([False, True]))
        first = share.down(share.init(MODEL), MODEL, met)
        assert all(not bool(cut.mask[0].any()) and bool(cut.mask[-1].all()) for cut in first.values()), (
            "all for a new one"
        )
    assert share.own == frozenset(LAYOUT.shapes)
    assert share.private == frozenset(), "it crosses the wire in every other round"


def test_a_warm_up_from_nothing_and_one_to_everything():
    share = share_of(0.5, start=0.0, warmup=2)
    assert both_ways(share, 1)[1] == {}
    assert not any(bool(cut.mask.any()) for cut in both_ways(share, 1)[0].values())
    assert share.own == frozenset(LAYOUT.shapes)
    sent = [sum(int(c.mask.sum()) for c in both_ways(share, t)[0].values() if c.mask is not None) for t in (2, 3, 9)]
    assert sent == [round(0.25 * LAYOUT.size), *[round(0.5 * LAYOUT.size)] * 2]
    share = share_of(1.0, start=0.5, warmup=2)
    assert both_ways(share, 2) != (WHOLE, WHOLE)
    assert both_ways(share, 3) == (WHOLE, WHOLE)
    assert share.own == frozenset(LAYOUT.params)


def test_counts():
    assert masks.shared_counts(7, 0.5)(1) == 4
    assert masks.shared_counts(9, 0.1)(5) == 1
    assert masks.shared_counts(4, 0.1)(1) == 0
    step = masks.shared_counts(100, 0.5, start=1.0, warmup=3, schedule="step")
    assert [step(t) for t in (1, 3, 4, 50)] == [100, 100, 50, 50]
    cosine = masks.shared_counts(1000, 0.5, start=0.1, warmup=4, schedule="cosine")
    assert [cosine(t) for t in range(1, 7)] == [100, 159, 300, 441, 500, 500]


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_the_size_of_the_mask_is_reported(selector):
    share = share_of(0.4, selector, sync=2)
    for t in (1, 2, 3):
        down, _ = both_ways(share, t)
        covered = {name: cut.mask for name, cut in down.items()}
        update = {name: torch.zeros(1, *LAYOUT.shapes[name]).double() for name in down}
        blended = Blended(update, covered, torch.tensor([1]), torch.ones(1), {})
        _, report = share.learn(share.init(MODEL), blended, make_ctx([1], t=t))
        sizes = [update[n][0].numel() if covered[n] is None else int(covered[n].sum()) for n in LAYOUT.params]
        assert report == {"mask_count": sum(sizes)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 1.1}, r"psfed\.fraction is 1\.1; it must lie between 0 and 1"),
        ({"fraction": -0.1}, r"psfed\.fraction is"),
        ({"fraction": float("nan")}, r"psfed\.fraction is nan"),
        ({"sync": 0}, r"psfed\.sync is 0; it must be 1 or more"),
        ({"start": 0.1}, r"psfed\.start is 0\.1 and psfed\.warmup 0; a warm-up needs both"),
        ({"warmup": 5}, r"psfed\.start is None and psfed\.warmup 5"),
        ({"start": 0.1, "warmup": -2}, "a warm-up needs both"),
        ({"start": 1.1, "warmup": 2}, r"psfed\.start is 1\.1"),
        ({"start": 0.1, "warmup": 2, "schedule": "cos"}, r"psfed\.schedule is 'cos'; did you mean 'cosine'"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        share_of(**options)
