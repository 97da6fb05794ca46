"""Robust rules and norm bounding, alone."""

import pytest
import torch

from sparing.core.errors import ConfigError, MethodError
from sparing.core.fold import Collect, Fold, without_unsound
from sparing.core.grid import limits_of
from sparing.core.method import Arrival
from sparing.parts.blend import robust
from sparing.parts.blend.norm_bound import norm_bound_step
from support import make_ctx, random_tree, small_layout

LAYOUT = small_layout()
RULES = {
    "median": robust.coordinate_median,
    "trimmed mean": robust.trimmed_mean_rule(0.4),
    "krum": robust.krum_rule(0.4, 1),
    "multi-krum": robust.krum_rule(0.4, "most"),
    "geomed": robust.geometric_median_rule(1e-6, 30),
}
ANY = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def everywhere(values):
    return {name: torch.ones_like(x, dtype=torch.bool) for name, x in values.items()}


def blend(rule, values, votes=None, weight=None):
    n = len(next(iter(values.values())))
    return rule(values, votes or everywhere(values), torch.ones(n).double() if weight is None else weight)


@ANY
@pytest.mark.parametrize("size", [30.0, -1e4])
def test_four_of_ten_attackers_cannot_pull_the_blend_away(rule, size):
    values = random_tree(LAYOUT, 10)
    for x in values.values():
        x[:4] = size
    update, _ = blend(rule, values)
    honest = torch.cat([x[4:].double().flatten(1) for x in values.values() if x.is_floating_point()], dim=1)
    found = torch.cat([update[name].flatten(1) for name, x in values.items() if x.is_floating_point()], dim=1)
    centre = honest.mean(dim=0)
    assert float((found - centre).norm()) < 2 * float((honest - centre).norm(dim=1).max())


@ANY
def test_one_client_alone_and_clients_that_agree(rule):
    one = random_tree(LAYOUT, 1)
    same = {name: x.expand(6, *x.shape[1:]) for name, x in one.items()}
    for values in (one, same):
        update, covered = blend(rule, values)
        for name, x in one.items():
            assert torch.allclose(update[name], x.double(), rtol=1e-15)
            assert bool(covered[name].all())
            assert update[name].dtype == torch.float64


@ANY
def test_where_nobody_votes_nothing_happens(rule):
    values = random_tree(LAYOUT, 5)
    votes = everywhere(values)
    votes["3.weight"][:, 0] = False
    values["3.weight"][:, 0] = 0.0
    update, covered = blend(rule, values, votes)
    assert not bool(covered["3.weight"][:, 0].any())
    assert not bool(update["3.weight"][:, 0].any())
    assert bool(covered["3.weight"][:, 1:].all())


@ANY
def test_nothing_shared_is_nothing_blended(rule):
    assert rule({}, {}, torch.ones(4).double()) == ({}, {})


@ANY
def test_the_order_of_arrival_does_not_matter(rule):
    update, ids = random_tree(LAYOUT, 7), list(range(7))
    votes = {name: torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.7 for name, x in update.items()}
    blends = []
    for groups in ([ids], [[6, 2], [0, 5, 1], [3], [4]]):
        fold = Collect(limits_of(random_tree(LAYOUT, 1, seed=9)), 7.0, rule)
        for group in groups:
            rows = torch.tensor(group)
            one = {name: x[rows] * votes[name][rows] for name, x in update.items()}
            scope = {name: x[rows] for name, x in votes.items()}
            fold.add(Arrival(one, scope, {}, {}, make_ctx(group)), torch.ones(len(group)).double(), {})
        blends.append(fold.mean(make_ctx([0])))
    for name in update:
        assert torch.equal(blends[0].update[name], blends[1].update[name])
        assert torch.equal(blends[0].covered[name], blends[1].covered[name])


def column_of(*values):
    return {"w": torch.tensor(values)[:, None]}


def test_the_median_is_unweighted_and_halves_the_middle_two():
    weight = torch.tensor([100.0, 1, 1, 1]).double()
    assert blend(robust.coordinate_median, column_of(9.0, 1.0, 2.0, 4.0), weight=weight)[0]["w"].item() == 3.0
    assert blend(robust.coordinate_median, column_of(9.0, 1.0, 2.0))[0]["w"].item() == 2.0


def test_a_client_without_a_vote_is_not_in_the_median():
    votes = {"w": torch.tensor([[True], [False], [True], [True]])}
    assert blend(robust.coordinate_median, column_of(5.0, 0.0, 7.0, 9.0), votes)[0]["w"].item() == 7.0


@pytest.mark.parametrize(("share", "want"), [(0.0, 22.0), (0.2, 5.0), (0.19, 22.0), (0.4, 4.0), (0.49, 4.0)])
def test_what_is_trimmed(share, want):
    rule = robust.trimmed_mean_rule(share)
    assert blend(rule, column_of(100.0, 3.0, 4.0, 8.0, -5.0))[0]["w"].item() == want


def test_krum_takes_one_client_as_it_is():
    values = random_tree(LAYOUT, 9)
    update, _ = blend(robust.krum_rule(0.2, 1), values)
    same = [i for i in range(9) if all(torch.equal(update[name][0], x[i].double()) for name, x in values.items())]
    assert len(same) == 1


def test_krum_counts_the_right_number_of_neighbours():
    """Of 0, 1, 2, 10, 11, 12, 13 with f = 2, n - f - 2 = 3: one of the four, not of the three."""
    line = column_of(0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 13.0)
    assert blend(robust.krum_rule(0.3, 1), line)[0]["w"].item() == 11.0
    assert blend(robust.krum_rule(0.3, 2), line)[0]["w"].item() == 11.5
    assert blend(robust.krum_rule(0.3, "most"), line)[0]["w"].item() == pytest.approx((10 + 11 + 12) / 3)


def test_krum_covers_only_what_the_chosen_voted_on():
    values = random_tree(LAYOUT, 6)
    votes = {name: torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.5 for name, x in values.items()}
    _, covered = blend(robust.krum_rule(0.2, 1), values, votes)
    masks = [i for i in range(6) if all(torch.equal(covered[name][0], votes[name][i]) for name in values)]
    assert len(masks) == 1


def test_counters_do_not_decide_who_is_near():
    values = {"w": torch.tensor([0.0, 0.1, 0.2, 5.0, 6.0])[:, None], "count": torch.tensor([1, 99, 999, 7, 7])}
    assert blend(robust.krum_rule(0.2, 1), values)[0]["w"].item() < 1


def test_the_geometric_median_is_where_the_distances_are_least():
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 4, generator=g).double(), torch.rand(9, generator=g).double() + 0.2

    def cost(z):
        return float((weight * (x - z).norm(dim=1)).sum())

    z = blend(robust.geometric_median_rule(1e-9, 300), {"w": x}, weight=weight)[0]["w"]
    for i in range(4):
        for step in (-1e-3, 1e-3):
            moved = z.clone()
            moved[0, i] += step
            assert cost(moved) > cost(z)
    early = blend(robust.geometric_median_rule(1e-9, 3), {"w": x}, weight=weight)[0]["w"]
    assert cost(z) < cost(early) < cost((weight[:, None] * x).sum(0) / weight.sum())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: robust.trimmed_mean_rule(0.5), r"trimmed-mean.share is 0.5; it must be 0 or more and below 0.5"),
        (lambda: robust.krum_rule(-0.1, 1), r"krum.share is -0.1"),
        (lambda: robust.krum_rule(0.1, 0), r"krum.m is 0; it must be 1 or more"),
        (lambda: robust.geometric_median_rule(0.0, 4), r"geomed.nu is 0.0"),
        (lambda: robust.geometric_median_rule(1e-6, 0), r"geomed.steps is 0"),
        (lambda: norm_bound_step(0.0), r"norm-bound.bound is 0.0"),
    ],
)
def test_settings_that_cannot_be_meant(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def received(bound, update):
    k = len(next(iter(update.values())))
    step = norm_bound_step(bound)
    assert step.receive is not None
    return step.receive({}, Arrival(update, {}, {}, {}, make_ctx(list(range(k)))))


def lengths(update):
    return torch.cat([x.double().flatten(1) for x in update.values() if x.is_floating_point()], 1).norm(dim=1)


def test_no_update_is_longer_than_the_bound_and_short_ones_stay_as_they_are():
    update = random_tree(LAYOUT, 6)
    update = {n: x * 0.01 if i % 2 and x.is_floating_point() else x for i, (n, x) in enumerate(update.items())}
    length = lengths(update)
    bound = float(length.median())
    got = received(bound, update)
    assert bool((lengths(got.update) <= bound * (1 + 1e-6)).all())
    assert torch.allclose(got.notes["norm"], length)
    for name, x in update.items():
        here = (length <= bound) if x.is_floating_point() else torch.ones(6, dtype=torch.bool)
        assert torch.equal(got.update[name][here], x[here])
        assert got.update[name].dtype == x.dtype
        factor = (bound / length[~here]).reshape(-1, *[1] * (x.dim() - 1))
        assert torch.allclose(got.update[name][~here].double(), x[~here] * factor, rtol=1e-6)


def test_each_row_is_bounded_as_if_alone():
    update = random_tree(LAYOUT, 5)
    whole = received(1.0, update).update
    for k in range(5):
        alone = received(1.0, {name: x[k : k + 1] for name, x in update.items()}).update
        assert all(torch.equal(alone[name][0], whole[name][k]) for name in update)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e30])
def test_unsound_arrivals_are_left_out_and_counted(bad):
    model, update = random_tree(LAYOUT, 1, seed=9), random_tree(LAYOUT, 4)
    update["3.bias"][2, 0] = bad
    scope = {"3.weight": torch.ones(4, *LAYOUT.shapes["3.weight"], dtype=torch.bool), "3.bias": None}
    notes, fold = (
        {"n": torch.arange(4.0) + 1, "loss": torch.tensor([0.0, torch.nan, 0.0, 0.0])},
        Fold(limits_of(model), 1.0),
    )
    got = without_unsound(Arrival(update, scope, notes, model, make_ctx([5, 6, 7, 8])), fold)
    assert got.ctx.ids.tolist() == [5, 8]
    assert fold.roster.refused == 2
    assert got.notes["n"].tolist() == [1, 4]
    assert got.scope["3.weight"].shape[0] == 2
    assert torch.equal(got.update["3.weight"], update["3.weight"][[0, 3]])


WRONG = {
    "nothing": lambda values, votes, weight: ({}, {}),
    "torch.float32": lambda values, votes, weight: (take_first(values), take_first(votes)),
    r"torch.float64 \[": lambda values, votes, weight: ({n: x[0].double() for n, x in values.items()}, {}),
    "nothing as covered": lambda values, votes, weight: ({n: x[:1].double() for n, x in values.items()}, {}),
}


def take_first(tree):
    return {name: x[:1] for name, x in tree.items()}


@pytest.mark.parametrize("said", WRONG)
def test_a_collect_that_gives_something_else_is_refused_by_name(said):
    update = {name: x.float() for name, x in random_tree(LAYOUT, 3).items()}
    ctx = make_ctx([0, 1, 2])
    fold = Collect(limits_of(take_first(update)), 3.0, WRONG[said])
    fold.add(Arrival(update, dict.fromkeys(update), {}, update, ctx), torch.ones(3).double(), {})
    with pytest.raises(MethodError, match=f"of '.*' the blend's `collect` gives {said}.*; let it give"):
        fold.mean(ctx)
