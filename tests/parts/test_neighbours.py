import itertools
import math

import pytest
import torch

from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError
from sparing.core.method import Arrival, Blended, Lesson, Trained
from sparing.core.round import begin, client, first_client, first_row, first_server, incoming, outgoing, settle
from sparing.core.tree import expand_rows, take_rows, under
from sparing.parts.blend.neighbours import TOP, heads_up_share, neighbour_weights, neighbours_step, renewed_similarities
from sparing.recipes.local import local
from sparing.recipes.personal import personal
from sparing.recipes.pfedsim import pfedsim
from sparing.recipes.topk import topk
from sparing.storage.bank import MemoryBank
from support import changed, make_ctx, random_tree, small_layout

LAYOUT = small_layout()
HOME = frozenset({"3.weight", "3.bias"})
EXTRACTOR = [name for name in LAYOUT.shapes if name not in HOME]
FLOATS = [name for name in EXTRACTOR if LAYOUT.dtypes[name].is_floating_point]
MODEL = random_tree(LAYOUT, 1, seed=4)
STEP = neighbours_step(LAYOUT, HOME, 0.25, frozenset(), {})  # 5 of make_ctx's 20 rounds
CLIENTS = 50


def state_of(pairs):
    """{(i, j): similarity}, both ways round."""
    both = sorted(
        {i * CLIENTS + j: s for (i, j), s in (pairs | {(j, i): s for (i, j), s in pairs.items()}).items()}.items()
    )
    stored = torch.zeros(CLIENTS, dtype=torch.bool)
    stored[[i for pair in pairs for i in pair]] = True
    keys, values = torch.tensor([k for k, _ in both]), torch.tensor([v for _, v in both])
    return {"pairs": keys.long(), "similarity": values.float(), "stored": stored}


def pairs_of(state):
    keys = state["pairs"].tolist()
    assert keys == sorted(set(keys))
    return {(k // CLIENTS, k % CLIENTS): s for k, s in zip(keys, state["similarity"].tolist(), strict=True)}


def unit_heads(heads):
    """What `watch` makes of heads [K, classes, width]."""
    update = random_tree(LAYOUT, len(heads)) | {"3.weight": heads - MODEL["3.weight"]}
    ctx = make_ctx(list(range(len(heads))), t=9)
    return STEP.watch({}, Arrival(update, dict.fromkeys(update), {}, MODEL, ctx))["head"]


def similarity(heads):
    z = unit_heads(heads)
    return z @ z.T / heads.shape[1]


def test_similarity_is_the_mean_cosine_over_classes():
    heads = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(0))
    heads[2] = -3 * heads[0]
    heads[3, 1] = 0
    got = similarity(heads)
    for i, j in itertools.product(range(4), repeat=2):
        wanted = torch.cosine_similarity(heads[i], heads[j], dim=1).mean()
        assert float(got[i, j]) == pytest.approx(float(wanted), abs=1e-5)
    assert float(got[0, 2]) == pytest.approx(-1, abs=1e-5)
    assert float(got[3, 3]) == pytest.approx(2 / 3, abs=1e-5)


def test_similarity_has_the_same_bits_in_any_order_of_summation():
    heads = torch.randn(30, 3, 16)
    z = unit_heads(heads)
    mixed = torch.randperm(z.shape[1])
    assert torch.equal(z @ z.T, z[:, mixed] @ z[:, mixed].T)
    assert torch.equal(z @ z.T, torch.stack([torch.stack([(a * b).sum() for b in z]) for a in z]))


def test_only_pairs_that_met_change():
    state = state_of({(1, 2): 0.5, (1, 3): 0.25, (2, 9): 0.75})
    cos = torch.tensor([[1, 0.125, -0.5], [0.125, 1, 0.375], [-0.5, 0.375, 1]], dtype=torch.float64)
    after = renewed_similarities(state, torch.tensor([1, 3, 7]), cos, CLIENTS)
    wanted = {(1, 2): 0.5, (2, 9): 0.75, (1, 3): 0.125, (3, 7): 0.375}
    assert pairs_of(after) == {**wanted, **{(j, i): s for (i, j), s in wanted.items()}}
    apart = renewed_similarities(after, torch.tensor([2, 9]), -torch.ones(2, 2).double(), CLIENTS)
    assert (2, 9) not in pairs_of(apart), "no longer alike"
    assert torch.equal(
        renewed_similarities(after, torch.tensor([4]), torch.ones(1, 1).double(), CLIENTS)["pairs"], after["pairs"]
    )


def test_weights_are_the_formula_and_add_up_to_one():
    state = state_of({(5, 2): 0.5, (5, 9): 0.99999, (2, 3): 0.1})
    (row,) = neighbour_weights(state, torch.tensor([5]), CLIENTS)
    value = {2: math.log(2), 9: -math.log(1e-4), 5: -math.log(1e-4)}
    assert row == pytest.approx({j: v / sum(value.values()) for j, v in value.items()}, rel=1e-6)
    assert sum(row.values()) == pytest.approx(1, abs=1e-12)
    assert row[9] == pytest.approx(row[5]), "no neighbour counts more than the client itself"


def test_at_the_start_a_client_is_like_itself_only():
    assert neighbour_weights(STEP.init(MODEL, CLIENTS), torch.tensor([0, 49]), CLIENTS) == [{0: 1.0}, {49: 1.0}]
    assert TOP == 0.9999


def test_the_head_goes_up_and_not_down():
    share = heads_up_share(LAYOUT, HOME, 0.25)
    ctx = changed(make_ctx([3, 4], t=6), first=torch.tensor([False, True]))
    assert all(cut.mask is None for cut in share.down({}, MODEL, ctx._replace(round=5)).values())
    down = share.down({}, MODEL, ctx)
    assert down.keys() == LAYOUT.shapes.keys()
    for name, cut in down.items():
        if name in HOME:
            assert not cut.mask[0].any()
            assert cut.mask[1].all(), "the reference head, at first contact"
            assert cut.mask.shape == (2, *LAYOUT.shapes[name])
        else:
            assert cut.mask is None
    up = share.up(down, ctx)
    assert up.keys() == {*EXTRACTOR, "3.weight"}, "of the head what is compared, and no more"
    assert all(cut.mask is None for cut in up.values())
    assert share.own == HOME
    assert not share.private


def served(ids, state, rows, model=MODEL, t=9):
    return STEP.serving.serve(state, model, make_ctx(ids, t=t), rows)[0]


def stored_rows(ids):
    rows = MemoryBank(STEP.serving.row(MODEL), CLIENTS)
    rows.write(
        torch.tensor(ids), {name: x for name, x in random_tree(LAYOUT, len(ids), seed=8).items() if name in FLOATS}
    )
    return rows


def test_each_client_is_served_its_own_blend():
    state, rows = state_of({(5, 2): 0.5, (5, 9): 0.75}), stored_rows([2, 5, 9])
    models = served([9, 5, 1], state, rows)
    for name in FLOATS:
        stored = rows.read(torch.tensor([2, 5, 9]))[name].double()
        weight = neighbour_weights(state, torch.tensor([5]), CLIENTS)[0]
        wanted = sum(w * stored[[2, 5, 9].index(j)] for j, w in weight.items())
        assert torch.allclose(models[name][1].double(), wanted, atol=1e-6)
        assert torch.equal(models[name][2], MODEL[name][0]), "the server's, as nothing of client 1 is there"
    for name in (*HOME, "1.num_batches_tracked"):
        assert torch.equal(models[name], MODEL[name])
    for k, i in enumerate([9, 5, 1]):
        alone = served([i], state, rows)
        assert all(torch.equal(take_rows(models, slice(k, k + 1))[name], alone[name]) for name in models)
    for unmixed in (served([1, 7], state, rows), served([5], state, rows, t=5)):  # nothing of them yet; warm-up
        assert unmixed.keys() == MODEL.keys()
        assert all(unmixed[name] is x for name, x in MODEL.items())


def fake_training(lesson, ctx):
    after = {}
    for name, x in lesson.start.items():
        noise = ctx.uniform(f"move/{name}", x[0].numel()).reshape(-1, *x.shape[1:]) - 0.5
        after[name] = x + noise if x.is_floating_point() else (x + 2).expand(len(ctx.ids), *x.shape[1:]).clone()
    return Trained(after, lesson.memory, {"loss": torch.zeros(len(ctx.ids))})


def play(method, cohorts, first=1):
    """Rounds `first`, ... of make_ctx's 20: yields (ctx, server before, down, state after, server after, report)."""
    rows = MemoryBank(first_row(method, MODEL), CLIENTS)
    server = first_server(method, MODEL, CLIENTS, rows)
    states = dict.fromkeys(range(CLIENTS), first_client(method, MODEL))
    for t, ids in enumerate(cohorts, first):
        ctx = make_ctx(ids, t=t)
        ctx = changed(ctx, first=~server.seen[ctx.ids])
        fold, down = begin(method, server, ctx), outgoing(method, server, ctx)
        state = {name: torch.cat([states[i][name] for i in ids]) for name in states[0]}
        up, state = client(method, state, down, fake_training, ctx)
        incoming(method, server, fold, down, up, ctx)
        before, (server, report) = server, settle(method, server, fold, ctx)
        states |= {i: take_rows(expand_rows(state, len(ids)), slice(k, k + 1)) for k, i in enumerate(ids)}
        yield ctx, before, down, up, states, server, report


METHOD = compose(LAYOUT, pfedsim(mode="published", warmup=0.25))


def test_warm_up_is_fedavg_bit_for_bit():
    cohorts = [[1, 4, 7], [2, 4], [1, 9]]
    plain = compose(LAYOUT)
    for ours, theirs in zip(play(METHOD, cohorts), play(plain, cohorts), strict=True):
        assert all(torch.equal(ours[5].model[name], theirs[5].model[name]) for name in MODEL)
        assert not ours[5].rows.state()["ids"].numel(), "nothing is stored yet"


def test_after_the_warm_up_the_reference_head_stays():
    cohorts = [[1, 4, 7], [1, 4], [4, 7, 9]]
    for _, before, _, up, _, after, report in play(METHOD, cohorts, first=6):
        assert "3.weight" in up.leaves
        for name in HOME:
            assert torch.equal(after.model[name], before.model[name])
        assert any(not torch.equal(after.model[name], before.model[name]) for name in EXTRACTOR)
        assert -1 <= report["avg_similarity"] <= 1
        assert report["personal_param_count"] == 16 * 3 + 3
        assert 0 < report["min_weight"] <= report["max_weight"] <= 1
        assert report["weight_entropy"] >= 0


def test_the_server_is_the_sample_weighted_mean_of_what_came_back():
    *_, (ctx, _, _, _, _, after, _) = play(METHOD, [[1, 4, 7], [1, 4], [4, 7, 9]], first=6)
    stored, share = under("0", after.rows.read(ctx.ids)), ctx.n.double() / ctx.n.sum()
    for name in FLOATS:
        mean = torch.einsum("k,k...->...", share, stored[name].double())
        assert torch.allclose(after.model[name][0].double(), mean, atol=1e-5)


def test_a_head_passes_through_aggregation_bit_for_bit():
    kept = {}
    for ctx, _, down, _, states, *_ in play(METHOD, [[1, 4, 7], [1, 4], [4, 7, 9]], first=6):
        for k, i in enumerate(ctx.ids.tolist()):
            for name in HOME:
                leaf = down.leaves[name]
                assert bool(leaf.scope[k].all()) == bool(ctx.first[k])
                if i in kept:
                    assert not leaf.scope[k].any()
                    moved = fake_training(Lesson({name: kept[i][name]}, {}, ()), ctx.at(slice(k, k + 1))).after[name]
                    assert torch.equal(states[i][f"own/{name}"], moved)
            kept[i] = {name: states[i][f"own/{name}"] for name in HOME}


def test_a_new_client_gets_the_reference_head_and_the_servers_extractor():
    *_, (ctx, before, down, *_) = play(METHOD, [[1, 4, 7], [1, 4], [4, 7, 9]], first=5)
    k = ctx.ids.tolist().index(9)
    assert not torch.equal(before.model["3.weight"], MODEL["3.weight"]), "round 5 was still FedAvg"
    for name, leaf in down.leaves.items():
        assert torch.equal(leaf.value[min(k, len(leaf.value) - 1)], before.model[name][0])


def test_memory_does_not_add_up_heads():
    """A head goes up as it is every round; a residual of it would grow without end."""
    method = compose(LAYOUT, pfedsim(mode="published", warmup=0.0), topk(memory=True))
    row = first_client(method, MODEL)
    assert {name for name in row if name.startswith("up/")} == {
        f"up/residual/{name}" for name in LAYOUT.params if name not in HOME
    }
    *_, (_, _, _, up, states, *_) = play(method, [[1, 2]] * 4, first=6)
    sent = up.leaves["3.weight"].value
    assert torch.equal(torch.where(sent != 0, states_of(states, [1, 2]), 0.0), sent)


def states_of(states, ids):
    return torch.cat([states[i]["own/3.weight"] for i in ids])


def test_the_similarity_of_unseen_buffers_and_odd_layers():
    with pytest.raises(MethodError, match="no personal layer has a weight with rows"):
        compose(LAYOUT, pfedsim(layers=["1"], mode="published"))
    with pytest.raises(MethodError, match="needs a personal layer"):
        compose(LAYOUT, pfedsim(layers=[], mode="published"))


@pytest.mark.parametrize("other", [personal(), local()])
def test_a_head_that_stays_home_is_refused(other):
    with pytest.raises(MethodError, match=r"compares '3.weight' of the clients, but another part .* keeps it at home"):
        next(play(compose(LAYOUT, pfedsim(mode="published"), other), [[1, 2]]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "paper"}, "mode is 'paper'; use 'seed' or 'published'"),
        ({"warmup": 0.5}, "warmup is 0.5, which belongs to mode: published"),
        ({"mode": "published", "warmup": 1.5}, "warmup is 1.5; it must lie between 0 and 1"),
        ({"mode": "published", "q": 0.0}, "belong to mode: seed"),
    ],
)
def test_options_that_cannot_be_meant(options, words):
    with pytest.raises(ConfigError, match=words):
        compose(LAYOUT, pfedsim(**options))


def test_one_client_alone_has_no_pairs():
    blended = Blended({}, {}, torch.tensor([3]), torch.ones(1).double(), {"head": unit_heads(torch.randn(1, 3, 16))})
    _, state, report = STEP.apply(STEP.init(MODEL, CLIENTS), blended, make_ctx([3], t=9))
    assert not len(state["pairs"])
    assert "avg_similarity" not in report
    assert report["max_weight"] == 1
