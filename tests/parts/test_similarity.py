import math

import pytest
import torch

from sparing.core import reduce
from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError
from sparing.core.method import Arrival, Blended, by_samples
from sparing.core.parcel import Leaf, Parcel
from sparing.core.round import begin, first_server, incoming, outgoing, settle
from sparing.core.tree import under
from sparing.parts.blend.fedsim import Similarity, cosine_similarity, similarity_weigh
from sparing.recipes.fedsim import fedsim
from sparing.recipes.pfedsim import pfedsim
from support import changed, make_ctx, numbers, random_tree, small_layout

LAYOUT = small_layout()
MODEL = random_tree(LAYOUT, 1, seed=4)


def arrival(update, n, scope=None, model=MODEL, notes=None):
    ctx = make_ctx(list(range(len(n))), n)
    return Arrival(update, scope or dict.fromkeys(update), {"n": torch.tensor(n).float()} | (notes or {}), model, ctx)


def by_cosine(**options):
    return similarity_weigh(LAYOUT, frozenset(), Similarity(**options))


def ctx_of(k):
    return make_ctx(list(range(k)))


def moved(k, seed=1, size=1.0):
    return {name: x * size if x.is_floating_point() else x for name, x in random_tree(LAYOUT, k, seed).items()}


def blend(method, update, n, server=None):
    """One round in which the clients' updates are these: (server before, server after, report)."""
    server = server or first_server(method, MODEL, 50)
    ctx = make_ctx(list(range(len(n))), n)
    ctx = changed(ctx, first=~server.seen[ctx.ids])
    down, fold = outgoing(method, server, ctx), begin(method, server, ctx)
    leaves = {name: Leaf(update[name]) for name in method.share.up({}, ctx)}
    up = Parcel(leaves, {"n": ctx.n.float(), "loss": torch.zeros(len(n))})
    incoming(method, server, fold, down, up, ctx)
    after, report = settle(method, server, fold, ctx)
    return server, after, numbers(report)


def test_the_cosine_is_the_cosine():
    update = moved(4)
    got = cosine_similarity(update, MODEL, MODEL, {}, ctx_of(4))
    for k in range(4):
        one = torch.cat([(MODEL[x][0].double() + update[x][k]).flatten() for x in update])
        other = torch.cat([MODEL[x][0].double().flatten() for x in update])
        assert float(got[k]) == pytest.approx(float(torch.cosine_similarity(one, other, dim=0)), abs=1e-12)


@pytest.mark.parametrize("shared", [True, False])
def test_only_what_a_client_voted_on_is_compared(shared):
    update = {"3.weight": moved(3)["3.weight"]}
    mask = torch.rand(1 if shared else 3, 3, 16, generator=torch.Generator().manual_seed(0)) < 0.5
    elsewhere = {"3.weight": torch.where(mask, MODEL["3.weight"], 1e6)}
    zeroed = {"3.weight": torch.where(mask, update["3.weight"], 0.0)}
    scope = {"3.weight": mask}
    wanted = cosine_similarity(zeroed, MODEL, MODEL, scope, ctx_of(3))
    assert torch.equal(cosine_similarity(zeroed, elsewhere, elsewhere, scope, ctx_of(3)), wanted)
    assert not torch.equal(cosine_similarity(zeroed, MODEL, MODEL, {}, ctx_of(3)), wanted)


def test_a_row_of_many_is_that_row_alone(monkeypatch):
    update, n = moved(5), [10, 20, 30, 40, 50]
    weigh = by_cosine(q=0.7, softmax=0.4)
    whole, seen = weigh.of({}, arrival(update, n))
    monkeypatch.setattr(reduce, "AT_ONCE", 100)
    blocked, _ = weigh.of({}, arrival(update, n))
    assert torch.equal(whole, blocked)
    for k in range(5):
        alone, said = weigh.of({}, arrival({name: x[k : k + 1] for name, x in update.items()}, n[k : k + 1]))
        assert torch.equal(alone, whole[k : k + 1])
        assert torch.equal(said["cos"], seen["cos"][k : k + 1])


@pytest.mark.filterwarnings("ignore:round 1. most of the cohort")
@pytest.mark.parametrize("options", [{}, {"q": 0.0}, {"q": 2.0}, {"softmax": 0.2}, {"on": "updates"}])
def test_weights_are_at_least_zero_and_add_up_to_one(options):
    method, n = compose(LAYOUT, fedsim(**options)), [5, 60, 700]
    server = None
    for seed in range(3):
        _, server, report = blend(method, moved(3, seed, 0.5), n, server)
        assert 0 <= report["min_weight"] <= 1 / 3 <= report["max_weight"] <= 1
        assert 0 <= report["weight_entropy"] <= math.log(3) + 1e-12
        assert -1 <= report["avg_similarity"] <= 1
        assert 0 <= report["similarity_variance"] <= 1
        assert report["shared_param_count"] + report["personal_param_count"] == LAYOUT.size


def test_what_a_cohort_may_add_up_to():
    weigh, n = by_cosine(q=1.5), [3, 40, 500]
    weights, _ = weigh.of({}, arrival(moved(3), n))
    assert weigh.most(make_ctx([0, 1, 2], n)) == pytest.approx(sum(x**1.5 for x in n))
    assert 0 < float(weights.sum()) <= weigh.most(make_ctx([0, 1, 2], n))


@pytest.mark.parametrize(("q", "n"), [(1.0, [9, 9, 9, 9]), (0.0, [1, 20, 300, 4000])])
@pytest.mark.parametrize("at", ["server", "client"])
def test_identical_models_count_alike(q, n, at):
    one = moved(1)
    weigh = by_cosine(q=q, at=at)
    notes = {"similarity": torch.full((4,), 0.25)} if at == "client" else {}
    update = {name: x.expand(4, *x.shape[1:]) for name, x in one.items()}
    weights, _ = weigh.of({}, arrival(update, n, notes=notes))
    assert (weights / weights.sum()).tolist() == [0.25] * 4


def test_one_client_alone_is_taken_over():
    update = moved(1)
    _, after, report = blend(compose(LAYOUT, fedsim()), update, [7])
    assert report["max_weight"] == report["min_weight"] == 1
    for name in LAYOUT.params:
        assert torch.allclose(after.model[name], MODEL[name] + update[name], atol=1e-6)


def test_weights_follow_the_samples():
    update = {name: x.expand(2, *x.shape[1:]) for name, x in moved(1).items()}
    for q, wanted in ((0, 0.5), (0.5, 2 / 3), (1, 0.8), (2, 16 / 17)):
        weights, _ = by_cosine(q=q).of({}, arrival(update, [10, 40]))
        assert float(weights[1] / weights.sum()) == pytest.approx(wanted)


def test_who_points_the_other_way_does_not_count():
    update = {name: torch.cat([x * 0.1, -2 * MODEL[name]]) for name, x in moved(1).items()}
    before, after, report = blend(compose(LAYOUT, fedsim()), update, [10, 10])
    assert report["min_weight"] == 0
    assert report["max_weight"] == 1
    assert report["similar_clients"] == 1
    assert torch.allclose(after.model["0.weight"], before.model["0.weight"] + update["0.weight"][:1], atol=1e-6)


def test_nobody_similar_keeps_the_model_and_says_so():
    update = {name: (-2 * x).expand(3, *x.shape[1:]) for name, x in MODEL.items()}
    with pytest.warns(UserWarning, match="nobody is similar to the server, so its model stays as it was"):
        before, after, report = blend(compose(LAYOUT, fedsim()), update, [10, 20, 30])
    assert all(torch.equal(after.model[name], before.model[name]) for name in MODEL)
    assert report["similar_clients"] == report["max_weight"] == report["weight_entropy"] == 0
    assert report["avg_similarity"] == -1


def test_a_model_of_zeros_is_left_out():
    good = moved(1, size=0.1)
    update = {name: torch.cat([x, -MODEL[name]]) for name, x in good.items()}
    with pytest.warns(UserWarning, match="client 1 has nothing but zeros"):
        before, after, report = blend(compose(LAYOUT, fedsim()), update, [10, 1000])
    assert torch.allclose(after.model["0.weight"], before.model["0.weight"] + good["0.weight"], atol=1e-6)
    assert report["similar_clients"] == 1


def test_a_server_of_zeros_has_no_direction_to_differ_from():
    zeros = {name: torch.zeros_like(x) for name, x in MODEL.items()}
    weights, _ = by_cosine().of({}, arrival(moved(3), [10, 20, 30], model=zeros))
    assert weights.tolist() == [10, 20, 30]


def test_updates_are_compared_with_the_last_mean_update():
    method = compose(LAYOUT, fedsim(on="updates"))
    first, after, _ = blend(method, moved(3, seed=1), [10, 20, 30])
    plain = blend(compose(LAYOUT), moved(3, seed=1), [10, 20, 30])[1]
    assert all(torch.equal(after.model[name], plain.model[name]) for name in MODEL), "nothing to compare with yet"
    last = {name: after.model[name] - first.model[name] for name in LAYOUT.params}
    update = moved(2, seed=2)
    wanted = cosine_similarity({name: update[name] for name in LAYOUT.params}, {}, last, {}, ctx_of(2))
    weights, seen = by_cosine(on="updates").of(under("weigh", after.blend), arrival(update, [10, 10]))
    assert torch.allclose(seen["cos"], wanted, atol=1e-5)
    assert torch.allclose(weights, 10 * wanted.clamp(min=0), atol=1e-4)


def test_the_server_remembers_no_more_than_the_shared_parameters():
    home = frozenset({"3.weight", "3.bias"})
    assert similarity_weigh(LAYOUT, home, Similarity()).init(MODEL, 1000) == {}
    kept = similarity_weigh(LAYOUT, home, Similarity(on="updates")).init(MODEL, 1000)
    assert under("reference", kept).keys() == set(LAYOUT.params) - home
    assert sum(x.numel() for x in kept.values()) == 2 + sum(MODEL[x].numel() for x in under("reference", kept))


WAY = moved(1, size=0.1)


def along(*parts):
    """Updates of so many clients, each so many times one common way."""
    return {name: torch.cat([x * part for part in parts]) for name, x in WAY.items()}


def in_turn(method, *rounds, n=(10, 10, 10)):
    """The last coordinates of models and the reports, after rounds of clients that go this far along one way."""
    server, found = None, []
    for parts in rounds:
        before, server, report = blend(method, along(*parts), list(n), server)
        gone = (server.model["0.weight"] - before.model["0.weight"])[0, 0, 0, 0, 0] / WAY["0.weight"][0, 0, 0, 0, 0]
        found.append((round(float(gone), 4), report["reference_forgotten"]))
    return found


@pytest.mark.filterwarnings("ignore:round 1. most of the cohort")
@pytest.mark.parametrize("parts", [(-1, -1, -1), (-2, -2, 1)], ids=["nobody similar", "one of three"])
def test_what_most_do_not_follow_is_forgotten(parts):
    found = in_turn(compose(LAYOUT, fedsim(on="updates")), (1, 1, 1), parts, parts, parts)
    assert found[:2] == [(1, 0), (0, 1)], "the model stays as it was, once"
    mean = round(sum(parts) / 3, 4)
    assert found[2] == (mean, 0), "and the next round is FedAvg's"
    assert found[3][0] < 0, "whose mean update is the next one's reference"


@pytest.mark.filterwarnings("ignore:round 1. most of the cohort")
def test_a_reference_that_fails_again_is_left_alone_for_twice_as_long():
    back, forth = (-1, -1, -1), (1, 1, 1)
    found = in_turn(compose(LAYOUT, fedsim(on="updates")), *[forth, back] * 7)
    assert [gone == 0 for gone, _ in found] == [bool(forgotten) for _, forgotten in found]
    assert [t for t, (_, forgotten) in enumerate(found) if forgotten] == [1, 3, 6, 11], "pauses of 1, 2, 4, 8 rounds"


def test_most_is_counted_in_samples():
    method = compose(LAYOUT, fedsim(on="updates"))
    assert in_turn(method, (1, 1, 1), (1, -1, -1), n=(21, 10, 10)) == [(1, 0), (1, 0)]
    with pytest.warns(UserWarning, match="most of the cohort is not similar to the last mean update"):
        assert in_turn(method, (1, 1, 1), (1, -1, -1), n=(20, 10, 10))[1] == (0, 1)


@pytest.mark.filterwarnings("ignore:round 1. (most of the cohort|clients 0, 1, 2 have nothing)")
def test_clients_that_sent_nothing_leave_the_next_round_to_fedavg():
    found = in_turn(compose(LAYOUT, fedsim(on="updates")), (1, 1, 1), (0, 0, 0), (-1, 2, 2))
    assert found == [(1, 0), (0, 1), (1, 0)]


def test_the_reference_keeps_older_entries_outside_the_last_mask():
    weigh, name = by_cosine(on="updates"), "3.weight"
    state, n = weigh.init(MODEL, 50), torch.tensor([10.0])
    masks = [torch.zeros(1, 3, 16, dtype=torch.bool) for _ in range(2)]
    masks[0][:, 0], masks[1][:, 1] = True, True
    for value, mask in zip((2.0, 3.0), masks, strict=True):
        update = {name: torch.where(mask, value, 0.0).double()}
        seen = {"cos": torch.ones(1, dtype=torch.float64), "n": n}
        told = Blended(update, {name: mask}, torch.tensor([0]), torch.ones(1, dtype=torch.float64), seen)
        state, _ = weigh.learn(state, told, make_ctx([0]))
    assert under("reference", state)[name][0, :, 0].tolist() == [2.0, 3.0, 0.0]
    against = arrival({name: -masks[0].float()}, [10], scope={name: masks[0]})
    assert float(weigh.of(state, against)[1]["cos"][0]) == pytest.approx(-1), "not 1, as beside a reference of zeros"


def test_softmax_is_the_softmax():
    update = moved(3)
    _, seen = by_cosine().of({}, arrival(update, [10, 20, 30]))
    weights, _ = by_cosine(q=0, softmax=0.3).of({}, arrival(update, [10, 20, 30]))
    assert torch.allclose(weights / weights.sum(), torch.softmax(seen["cos"] / 0.3, dim=0))


def test_a_client_that_lies_about_its_cosine_gains_little():
    notes = {"similarity": torch.tensor([99.0, -99.0, 0.5, math.nan])}
    weights, _ = by_cosine(at="client").of({}, arrival(moved(4), [10] * 4, notes=notes))
    assert weights.tolist() == [10, 0, 5, 0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"q": -1}, "fedsim.q is -1; it must lie between 0 and 10"),
        ({"softmax": 0}, "fedsim.softmax over weights is 0; it must be at least 0.02"),
        ({"softmax": 0.1, "on": "updates"}, "fedsim.softmax over updates is 0.1; it must be at least 0.2"),
        ({"on": "weight"}, "fedsim.on is 'weight'; use 'weights' or 'updates'"),
        ({"at": "home"}, "fedsim.at is 'home'; use 'server' or 'client'"),
        ({"on": "updates", "at": "client"}, "has no last mean update"),
    ],
)
def test_options_that_cannot_be_meant(options, words):
    for make in (fedsim, pfedsim):
        with pytest.raises(ConfigError, match=words):
            compose(LAYOUT, make(**options))


def test_two_weightings_are_refused():
    with pytest.raises(MethodError, match="both say how much a client counts"):
        compose(LAYOUT, fedsim(), pfedsim())
    assert compose(LAYOUT).blend.weigh is by_samples


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("options", [{}, {"softmax": 0.3, "q": 0.5}])
def test_weights_on_a_gpu_have_the_same_bits(options):
    update, weigh = moved(5), by_cosine(**options)
    wanted, _ = weigh.of({}, arrival(update, [10, 20, 30, 40, 50]))
    there = arrival({name: x.cuda() for name, x in update.items()}, [10, 20, 30, 40, 50])
    there = there._replace(model={name: x.cuda() for name, x in MODEL.items()}, ctx=changed(there.ctx, device="cuda"))
    assert torch.equal(weigh.of({}, there)[0].cpu(), wanted)
