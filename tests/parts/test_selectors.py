"""Partial sharing: which positions are selected, and that both ends know them."""

import math

import pytest
import torch

from reference.psfed import chance
from sparing.core.errors import ConfigError
from sparing.core.method import Blended
from sparing.core.parcel import Cut
from sparing.core.tree import Layout
from sparing.fleet.fleet import Fleet
from sparing.parts.share.schedule import shared_counts
from sparing.parts.share.selectors import SELECTORS, _top_scores, selected_share, selector_of
from support import changed, make_ctx, random_tree, small_layout

LAYOUT = small_layout()
MODEL = random_tree(LAYOUT, 1)
FREE, TOLD = ["random", "fixed", "layers"], ["magnitude", "gradient"]
JOINED = [{"union": ["random", "magnitude"]}, {"intersection": ["gradient", "layers"]}, {"union": ["fixed", "layers"]}]


def share_of(layout=LAYOUT, fraction=0.5, selector="random", per_client=False, first=None, explore=0.1, **more):
    count = shared_counts(layout.size, fraction)
    select = selector_of(selector, layout, count, per_client, explore, **more)
    return selected_share(layout, select, count, per_client, first)


def drawn(share, ctx, model=MODEL, state=None):
    return share.down(share.init(model) if state is None else state, model, ctx)


def chosen(cuts, k=0, layout=LAYOUT):
    return torch.cat([cuts[n].mask[min(k, cuts[n].mask.shape[0] - 1)].flatten() for n in layout.params])


def size(fraction, d=LAYOUT.size):
    return math.floor(fraction * d + 0.5)


def flat_layout(d):
    return Layout({"w": (d,)}, {"w": torch.float32})


@pytest.mark.parametrize("selector", ["random", "fixed"])
@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("per_client", [False, True])
def test_exactly_round_p_d_positions_known_to_both_ends(selector, fraction, per_client):
    share = share_of(fraction=fraction, selector=selector, per_client=per_client)
    ctx = make_ctx([1, 4, 6])
    down, up = drawn(share, ctx), share.up({}, ctx)
    for k in range(3):
        assert int(chosen(down, k).sum()) == size(fraction)
        other_end = share_of(fraction=fraction, selector=selector, per_client=per_client)
        assert torch.equal(chosen(down, k), chosen(drawn(other_end, ctx.at(slice(k, k + 1)))))
        assert torch.equal(chosen(down, k), chosen(up, k))
    assert torch.equal(chosen(down, 0), chosen(down, 1)) != per_client


@pytest.mark.parametrize("selector", [*FREE, *TOLD, *JOINED], ids=str)
def test_a_mask_chosen_from_values_is_told_downstream_and_known_upstream(selector):
    share, ctx = share_of(selector=selector), make_ctx([1, 4])
    names = [selector] if isinstance(selector, str) else next(iter(selector.values()))
    down = drawn(share, ctx)
    up = share.up(down, ctx)
    at_client = drawn(share, ctx, random_tree(LAYOUT, 1, seed=9))
    for name in LAYOUT.params:
        assert down[name].told == at_client[name].told == bool(set(names) & set(TOLD))
        assert not up[name].told
        assert torch.equal(up[name].mask, down[name].mask)
    for name in LAYOUT.buffers:
        assert down[name] == up[name] == Cut(), "buffers go whole"
    if down["3.weight"].told:
        without = {name: cut for name, cut in down.items() if name != "3.weight"}
        assert share.up(without, ctx)["3.weight"] == Cut(), "what only goes up is for others to cut"


def test_masks_differ_between_rounds_and_between_layers_of_one_size():
    layout = Layout({"a": (64,), "b": (64,)}, {"a": torch.float32, "b": torch.float32})
    share = share_of(layout)
    one, two = share.up({}, make_ctx([0], t=1)), share.up({}, make_ctx([0], t=2))
    assert not torch.equal(one["a"].mask, one["b"].mask)
    assert not torch.equal(one["a"].mask, two["a"].mask)


@pytest.mark.parametrize("fraction", [0.5, 0.1])
def test_the_chance_to_be_chosen_within_t_rounds(fraction):
    """P = 1 - (1 - p)^T; p = .5, T = 10: .9990."""
    assert round(chance(0.5, 10), 4) == 0.9990
    share = share_of(flat_layout(20_000), fraction)
    ever = torch.zeros(20_000, dtype=torch.bool)
    for t in range(1, 11):
        ever |= share.up({}, make_ctx([0], t=t))["w"].mask[0]
    want = chance(fraction, 10)
    assert abs(float(ever.double().mean()) - want) < 5 * math.sqrt(want * (1 - want) / 20_000)


@pytest.mark.parametrize("per_client", [False, True])
def test_the_chance_to_reach_one_client_that_takes_part_now_and_then(per_client):
    """P = 1 - (1 - p q)^T at participation q."""
    clients, d, p, q, rounds = 300, 2000, 0.3, 0.4, 8
    share = share_of(flat_layout(d), p, per_client=per_client)
    ever = torch.zeros(clients, d, dtype=torch.bool)
    for t in range(1, rounds + 1):
        ids = Fleet().cohort(seed=0, t=t, clients=clients, count=int(q * clients))
        ever[ids] |= share.up({}, make_ctx(ids.tolist(), t=t, clients=clients))["w"].mask
    by_client = ever.double().mean(dim=1)
    error = by_client.std() / math.sqrt(clients) + ever.double().mean(dim=0).std() / math.sqrt(d)
    assert abs(float(by_client.mean()) - chance(p, rounds, q)) < 4 * float(error)
    assert abs(float(by_client.mean()) - chance(p, rounds)) > 10 * float(error)


def test_fixed_never_changes_and_grows_where_the_fraction_does():
    layout = flat_layout(500)
    masks = [chosen(share_of(layout, 0.3, "fixed").up({}, make_ctx([2], t=t)), layout=layout) for t in (1, 2, 9)]
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])
    more = chosen(share_of(layout, 0.6, "fixed").up({}, make_ctx([2])), layout=layout)
    assert bool((more | ~masks[0]).all())
    assert not torch.equal(masks[0], chosen(share_of(layout, 0.3).up({}, make_ctx([2])), layout=layout))


@pytest.mark.parametrize("per_client", [False, True])
@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.6])
def test_layers_go_whole_and_take_turns(fraction, per_client):
    share = share_of(fraction=fraction, selector="layers", per_client=per_client)
    began, turns = set(), dict.fromkeys(("0", "1", "3"), 0)
    for t in range(1, 31):
        cuts = share.up({}, make_ctx([0, 1, 2], t=t))
        for k in range(3):
            layers = set()
            for name in LAYOUT.params:
                mask = cuts[name].mask[k if per_client else 0]
                assert bool(mask.any()) == bool(mask.all()), "whole or not at all"
                layers |= {name.rpartition(".")[0]} if bool(mask.any()) else set()
            assert layers, "no round without a layer"
            if k == 2:
                turns = {layer: n + (layer in layers) for layer, n in turns.items()}
            if t == 1:
                began.add(frozenset(layers))
    assert min(turns.values()) > 0
    assert max(turns.values()) - min(turns.values()) <= 1, "all have as many turns"
    assert len(began) == (3 if per_client else 1)


def test_magnitude_takes_the_largest_weights():
    for fraction in (0.1, 0.7):
        mask = chosen(drawn(share_of(fraction=fraction, selector="magnitude"), make_ctx([1])))
        weight = torch.cat([MODEL[name].flatten() for name in LAYOUT.params]).abs()
        assert int(mask.sum()) == size(fraction)
        assert float(weight[mask].min()) > float(weight[~mask].max())


def test_magnitude_looks_at_the_model_it_is_given_even_in_one_round():
    share, ctx, other = share_of(selector="magnitude"), make_ctx([1]), random_tree(LAYOUT, 1, seed=5)
    first = chosen(drawn(share, ctx))
    assert not torch.equal(chosen(drawn(share, ctx, other)), first)
    assert torch.equal(chosen(drawn(share, ctx)), first)
    assert torch.equal(chosen(drawn(share_of(selector="magnitude"), ctx, other)), chosen(drawn(share, ctx, other)))


def test_magnitude_of_models_served_to_each_client_is_each_client_s_own():
    models = random_tree(LAYOUT, 3, seed=2)
    models["3.weight"][:, :, 8:] = 0
    share, ctx = share_of(selector="magnitude", fraction=0.9), make_ctx([2, 5, 6])
    together = drawn(share, ctx, models)
    for k in range(3):
        alone = drawn(share, ctx.at(slice(k, k + 1)), {name: x[k : k + 1] for name, x in models.items()})
        assert torch.equal(chosen(alone), chosen(together, k))
    few = drawn(share_of(selector="magnitude", fraction=0.3), ctx, models)
    assert not torch.equal(chosen(few, 0), chosen(few, 1))


def test_equals_are_drawn_so_that_none_is_always_passed_over():
    score = torch.tensor([[3.0, 0.0, 0.0, 0.0, 0.0, 7.0]])
    masks = torch.cat([_top_scores(score, 3, make_ctx([0], t=t)) for t in range(1, 60)])
    assert bool((masks.sum(dim=1) == 3).all())
    assert bool(masks[:, [0, 5]].all())
    assert bool(masks.any(dim=0).all())
    assert not _top_scores(score, 0, make_ctx([0])).any()
    assert _top_scores(score, 6, make_ctx([0])).all()


def blended(update, covered):
    return Blended(update, covered, torch.tensor([0]), torch.ones(1), {})


def test_gradient_follows_what_moved_and_forgets_slowly():
    layout = flat_layout(6)
    share, ctx = share_of(layout, 0.5, "gradient", explore=0.0), make_ctx([0])
    state = share.init({"w": torch.zeros(1, 6)})
    moved, seen = torch.tensor([[1.0, -9.0, 8.0, 2.0, 3.0, 4.0]]).double(), torch.tensor([[True] * 5 + [False]])
    state, _ = share.learn(state, blended({"w": moved}, {"w": seen}), ctx)
    assert state["w"].tolist() == [[1, 9, 8, 2, 3, 0]]
    assert chosen(drawn(share, ctx, {"w": moved}, state), layout=layout).tolist() == [
        False,
        True,
        True,
        False,
        True,
        False,
    ]
    seen = torch.tensor([[False, True, True, False, False, True]])
    state, _ = share.learn(state, blended({"w": torch.full((1, 6), 0.95).double()}, {"w": seen}), ctx)
    assert torch.allclose(state["w"], torch.tensor([[0.9, 0.95, 0.95, 1.8, 2.7, 0.95]]))
    state, _ = share.learn(state, blended({}, {}), ctx)
    assert torch.allclose(state["w"][0, 3:5], torch.tensor([1.62, 2.43])), "a round without it ages it, too"


@pytest.mark.parametrize("per_client", [False, True])
def test_gradient_explores_a_share_of_its_positions(per_client):
    layout, ctx = flat_layout(1000), make_ctx([3, 4])
    share = share_of(layout, 0.2, "gradient", per_client, explore=0.25)
    score = torch.rand(1, 1000, generator=torch.Generator().manual_seed(0)) + 0.1
    best = _top_scores(score, 150, ctx)[0]
    cuts = drawn(share, ctx, {"w": score}, {"w": score})
    for k in range(2):
        mask = chosen(cuts, k, layout)
        assert int(mask.sum()) == 200
        assert bool(mask[best].all())
    assert torch.equal(chosen(cuts, 0, layout), chosen(cuts, 1, layout)) != per_client
    ever = torch.zeros(1000, dtype=torch.bool)
    for t in range(1, 301):
        ever |= chosen(drawn(share, make_ctx([3, 4], t=t), {"w": score}, {"w": score}), layout=layout)
    assert bool(ever.all()), "no coordinate starves"


def test_gradient_selects_at_random_before_anything_moved():
    share = share_of(selector="gradient")
    masks = [chosen(drawn(share, make_ctx([1], t=t))) for t in (1, 2)]
    assert all(int(mask.sum()) == size(0.5) for mask in masks)
    assert not torch.equal(masks[0], masks[1])
    spread = [float(cut.mask.double().mean()) for cut in drawn(share, make_ctx([1])).values() if cut.mask is not None]
    assert min(spread[0], spread[3]) > 0.3, "not the first positions only"


def test_a_probe_s_gradient_is_the_score_until_the_next_one():
    layout, ctx = flat_layout(6), make_ctx([0])
    share = share_of(layout, 0.5, "gradient", explore=0.0, source="probe")
    state = share.look(share.init({"w": torch.zeros(1, 6)}), {"w": torch.tensor([[-7.0, 1, 5, 2, -6, 0]])})
    moved = blended({"w": torch.full((1, 6), 99.0).double()}, {"w": None})
    assert share.learn(state, moved, ctx)[0] is state, "updates do not count"
    assert state["w"].tolist() == [[7, 1, 5, 2, 6, 0]]
    mask = chosen(drawn(share, ctx, {"w": torch.ones(1, 6)}, state), layout=layout)
    assert mask.tolist() == [True, False, True, False, True, False]
    state = share.look(state, {"w": torch.tensor([[0.0, 1, 0, 2, 3, 0]]).double()})
    assert chosen(drawn(share, ctx, {"w": torch.ones(1, 6)}, state), layout=layout).tolist()[3:] == [True, True, False]


def test_a_probe_s_gradient_explores_too_and_can_be_joined():
    layout, ctx = flat_layout(1000), make_ctx([3])
    slope = {"w": torch.rand(1, 1000, generator=torch.Generator().manual_seed(0)) - 0.5}
    best = _top_scores(slope["w"].abs(), 150, ctx)[0]
    share = share_of(layout, 0.2, "gradient", explore=0.25, source="probe")
    mask = chosen(drawn(share, ctx, slope, share.look(share.init(slope), slope)), layout=layout)
    assert int(mask.sum()) == 200
    assert bool(mask[best].all())
    both = share_of(layout, 0.2, {"union": ["fixed", "gradient"]}, explore=0.25, source="probe")
    drawn_too = chosen(share_of(layout, 0.2, "fixed").up({}, ctx), layout=layout)
    either = chosen(drawn(both, ctx, slope, both.look(both.init(slope), slope)), layout=layout)
    assert torch.equal(either, mask | drawn_too)


def test_union_and_intersection():
    def mask(selector):  # each in a round of its own: a mask that follows from the round is drawn once in it
        return chosen(drawn(share_of(selector=selector), make_ctx([1])))

    one, two, both = mask("random"), mask("magnitude"), mask({"intersection": ["random", "magnitude"]})
    assert torch.equal(mask({"union": ["random", "magnitude"]}), one | two)
    assert torch.equal(both, one & two)
    assert not torch.equal(one, mask("fixed"))
    assert torch.equal(mask({"intersection": ["random", "magnitude", "fixed"]}), both & mask("fixed"))
    assert torch.equal(mask({"union": ["random", "fixed"]}), one | mask("fixed"))


@pytest.mark.parametrize("selector", [*FREE, *TOLD, *JOINED], ids=str)
def test_first_contact_is_a_full_download_unless_seeded_or_told(selector):
    ctx = changed(make_ctx([1, 2, 5]), first=torch.tensor([True, False, False]))
    share, settled = share_of(selector=selector), share_of(selector=selector, first="seed")
    cuts, seeded = drawn(share, ctx), drawn(settled, ctx)
    mask = chosen(cuts, 1)
    told = cuts["0.weight"].told
    assert torch.equal(chosen(cuts, 0), mask) if told else bool(chosen(cuts, 0).all())
    assert 0 < int(mask.sum()) < LAYOUT.size
    assert all(torch.equal(chosen(seeded, k), mask) for k in range(3))
    back = share.up(cuts, ctx)
    assert torch.equal(chosen(back, 1), mask)
    assert torch.equal(chosen(back, 0), mask), "the upload is masked all the same"
    assert torch.equal(chosen(settled.up(seeded, ctx), 0), mask)
    for k in range(3):
        alone = ctx.at(slice(k, k + 1))
        assert torch.equal(chosen(share.up(drawn(share, alone), alone)), chosen(back, k)), "rows"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selector": "top"}, r"psfed\.selector: nothing is called 'top'; known: fixed"),
        ({"selector": "magnitud"}, "did you mean 'magnitude'"),
        ({"selector": {"union": ["random"]}}, r"write a name, or \{union: \[a, b\]\}"),
        ({"selector": {"union": ["random", "random"]}}, "of two names"),
        ({"selector": {"sum": ["random", "fixed"]}}, "write a name"),
        ({"selector": {}}, "write a name"),
        ({"selector": {"union": ["random", "fixed"], "intersection": ["random", "fixed"]}}, "write a name"),
        ({"selector": {"union": ["random", "top"]}}, "nothing is called 'top'"),
        ({"selector": "magnitude", "per_client": True}, r"psfed\.per_client: magnitude selects the same"),
        ({"selector": "gradient", "explore": 1.5}, r"psfed\.explore is 1\.5"),
        ({"selector": "gradient", "source": "prob"}, r"psfed\.source is 'prob'; did you mean 'probe'"),
        ({"selector": "magnitude", "source": "probe"}, r"psfed\.source is 'probe', but only selector: gradient"),
        ({"first": "x"}, r"psfed\.first is 'x'; use 'download'"),
        ({"first": "download", "selector": "magnitude"}, "cannot tell which part was selected"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        share_of(**options)


def test_every_selector_is_listed():
    assert set(SELECTORS) == set(FREE + TOLD)
