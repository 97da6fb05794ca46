"""Laws of a round, seen on the parcels themselves."""

import itertools
import math

import pytest
import torch

import sparing
from sparing.core.compose import compose, narrow_share
from sparing.core.errors import MethodError, TrainingError, WireError
from sparing.core.method import Codec, Fit, Local, Resize, Serving, Share, Step, Trained, by_samples
from sparing.core.parcel import Cut, Parcel, parcel_row
from sparing.core.reduce import largest_in_rows
from sparing.core.registry import REGISTRY, RecipeEntry
from sparing.core.round import begin, client, first_client, first_server, incoming, outgoing, schema_down, settle
from sparing.core.tree import Layout, column, expand_rows, flat, tree_to, under
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.study import method_list
from sparing.wire import from_bytes, nbytes, to_bytes
from support import changed, make_ctx, random_tree, small_layout

LAYOUT = small_layout()
MODEL = random_tree(LAYOUT, 1, seed=4)


def method_of(spec, local=None):
    return compose(LAYOUT, *recipes_from_entries(method_list(spec)), local=local)


def fake_training(lesson, ctx):
    """Moves every tensor by keyed noise: as good as training for the algebra, and row-exact."""
    after = {}
    for name, x in lesson.start.items():
        size = x[0].numel()
        noise = ctx.uniform(f"move/{name}", size).reshape(-1, *x.shape[1:]) - 0.5
        after[name] = x + noise if x.is_floating_point() else (x + 2).expand(len(ctx.ids), *x.shape[1:]).clone()
    return Trained(after, lesson.memory, {"loss": torch.zeros(len(ctx.ids), device=ctx.device)})


def play(method, rounds=3, ids=(1, 4, 7), seed=0, device="cpu"):
    """Run rounds; give back the server, each client's state, and everything that crossed."""
    model = tree_to(MODEL, device)
    server = first_server(method, model, 50)
    state = expand_rows(first_client(method, model), len(ids))
    crossed = []
    for t in range(1, rounds + 1):
        ctx = make_ctx(list(ids), seed=seed, t=t)
        ctx = changed(ctx, device=device, first=~server.seen[ctx.ids])
        fold = begin(method, server, ctx)
        down = outgoing(method, server, ctx)
        up, state = client(method, state, down, fake_training, ctx)
        incoming(method, server, fold, down, up, ctx)
        before = server
        server, report = settle(method, server, fold, ctx)
        crossed.append((ctx, before, down, up, state, server, report))
    return server, state, crossed


def same_model(a, b):
    return all(torch.equal(a.model[name], b.model[name]) for name in a.model)


COMBINED = "personal+psfed+topk+int8+memory+fedavgm"


@pytest.mark.parametrize("spec", ["personal", COMBINED, [{"personal": {"layers": ["0", "1"]}}, "randk"]], ids=str)
def test_private_tensors_never_appear_in_a_parcel(spec):
    method = method_of(spec)
    shared = set(method.share.down({}, MODEL, make_ctx([0])))
    private = set(LAYOUT.shapes) - shared
    assert private
    server, state, crossed = play(method)
    for _, _, down, up, *_ in crossed:
        assert not private & down.leaves.keys()
        assert not private & up.leaves.keys()
    for name in private:
        assert torch.equal(server.model[name], MODEL[name]), "the server never learns it"
        assert not torch.equal(state[f"own/{name}"], expand_rows(MODEL, 3)[name]), "the client does"


def test_personal_tensors_pass_through_a_round_bit_for_bit():
    method = method_of("personal")
    _, _, crossed = play(method)
    for (_, _, _, _, state, *_), (ctx, _, down, *_) in itertools.pairwise(crossed):
        seen = {}

        def look(lesson, ctx, seen=seen):
            seen.update(lesson.start)
            return fake_training(lesson, ctx)

        client(method, state, down, look, ctx)
        for name in method.share.own:
            assert torch.equal(seen[name], state[f"own/{name}"])


def test_psfed_at_one_is_fedavg_bit_for_bit():
    assert same_model(play(method_of([{"psfed": {"fraction": 1.0}}]))[0], play(method_of("fedavg"))[0])


def test_psfed_at_zero_sends_nothing_and_learns_nothing_from_others():
    server, state, crossed = play(method_of([{"psfed": {"fraction": 0.0}}]))
    assert same_model(server, first_server(method_of("fedavg"), MODEL, 50))
    for _, _, down, up, *_ in crossed:
        assert not down.leaves
        assert not up.leaves
    assert not torch.equal(state["own/3.weight"], expand_rows(MODEL, 3)["3.weight"])


@pytest.mark.parametrize("per_client", [False, True])
def test_psfed_changes_the_server_inside_the_mask_only(per_client):
    method = method_of([{"psfed": {"fraction": 0.3, "per_client": per_client}}])
    for ctx, before, _, _, _, after, report in play(method)[2]:
        cuts = method.share.up({}, ctx)
        for name in LAYOUT.params:
            covered = cuts[name].mask.any(dim=0)
            assert torch.equal(after.model[name][0][~covered], before.model[name][0][~covered])
            assert not (after.model[name][0][covered] == before.model[name][0][covered]).any()
        hit = sum(int(cuts[name].mask.any(dim=0).sum()) for name in LAYOUT.params)
        assert float(report["coverage"]) == pytest.approx(hit / LAYOUT.size)


def test_psfed_client_keeps_its_own_values_outside_the_mask():
    method = method_of("psfed")
    _, _, crossed = play(method)
    state = crossed[0][4]
    ctx, before, down, *_ = crossed[1]
    seen = {}

    def look(lesson, ctx):
        seen.update(lesson.start)
        return fake_training(lesson, ctx)

    client(method, state, down, look, ctx)
    cuts = method.share.down({}, before.model, ctx)
    for name in LAYOUT.params:
        mask = cuts[name].mask.expand_as(seen[name])
        assert torch.equal(seen[name][mask], before.model[name].expand_as(mask)[mask])
        assert torch.equal(seen[name][~mask], state[f"own/{name}"][~mask])


def test_psfed_per_client_averages_over_those_who_covered():
    method = method_of([{"psfed": {"per_client": True}}])
    ctx, before, _, up, _, after, _ = play(method, rounds=1)[2][0]
    for name in LAYOUT.params:
        leaf = up.leaves[name]
        weight = ctx.n.double().reshape(-1, *[1] * (leaf.value.dim() - 1)) * leaf.scope
        mean = (weight * leaf.value).sum(dim=0) / weight.sum(dim=0).clamp(min=1)
        want = (before.model[name][0].double() + mean).float()
        assert torch.allclose(after.model[name][0], want, rtol=0, atol=1e-6)


def test_fedavg_is_the_weighted_mean_of_client_models():
    method = method_of("fedavg")
    ctx, before, _, up, _, after, _ = play(method, rounds=1)[2][0]
    for name, x in before.model.items():
        value = x.double() + up.leaves[name].value.double()
        weight = (ctx.n.double() / ctx.n.sum()).reshape(-1, *[1] * (value.dim() - 1))
        want = (weight * value).sum(dim=0)
        got = after.model[name][0].double()
        assert torch.allclose(got, want if x.is_floating_point() else want.round(), atol=1e-6), name


def test_the_server_aggregates_exactly_what_was_sent():
    """In scope but not kept counts as a zero update."""
    method = method_of("topk")
    ctx, before, _, up, _, after, _ = play(method, rounds=1)[2][0]
    share = ctx.n.double() / ctx.n.sum()
    x = up.leaves["3.weight"].value.double()
    assert (x == 0).any()
    want = (before.model["3.weight"][0].double() + torch.einsum("k,kij->ij", share, x)).float()
    assert torch.allclose(after.model["3.weight"][0], want, atol=1e-6)


@pytest.mark.parametrize("spec", ["fedavg", "psfed", COMBINED, "randk+memory"])
def test_a_cohort_is_a_sum_of_its_clients(spec):
    """One call with K clients, or K calls with one: the same parcels, states and server, in every bit."""
    method = method_of(spec)
    _, _, crossed = play(method, rounds=3)
    state = {k: expand_rows(first_client(method, MODEL), 1) for k in range(3)}
    for cohort, before, _, up, states, after, _ in crossed:
        fold = begin(method, before, cohort)
        for k in (2, 0, 1):
            ctx = cohort.at(slice(k, k + 1))
            down = outgoing(method, before, ctx)
            alone, state[k] = client(method, state[k], down, fake_training, ctx)
            incoming(method, before, fold, down, alone, ctx)
            for name, leaf in parcel_row(up, k).leaves.items():
                assert torch.equal(leaf.value, alone.leaves[name].value)
            for name, x in states.items():
                assert torch.equal(x[k : k + 1], state[k][name])
        assert same_model(settle(method, before, fold, cohort)[0], after)


@pytest.mark.parametrize("policy", ["own", "static"])
def test_buffers_stay_home_when_asked(policy):
    method = method_of("fedavg", Local(buffers=policy))
    server, state, crossed = play(method)
    for _, _, down, up, *_ in crossed:
        assert not LAYOUT.buffers & down.leaves.keys()
        assert not LAYOUT.buffers & up.leaves.keys()
    assert {f"own/{name}" for name in LAYOUT.buffers} <= state.keys()
    assert torch.equal(server.model["1.running_mean"], MODEL["1.running_mean"])


def test_integer_buffers_are_averaged_and_stay_integers():
    server, *_ = play(method_of("fedavg"), rounds=3)
    counter = server.model["1.num_batches_tracked"]
    assert counter.dtype == torch.int64
    assert torch.equal(counter, MODEL["1.num_batches_tracked"] + 6)


def test_state_is_allocated_only_as_the_method_needs():
    assert first_client(method_of("fedavg+topk+int8"), MODEL) == {}
    assert set(first_client(method_of("personal"), MODEL)) == {"own/3.weight", "own/3.bias"}
    assert set(under("own", first_client(method_of("psfed"), MODEL))) == set(LAYOUT.params)
    assert set(under("up/residual", first_client(method_of("topk+memory"), MODEL))) == set(LAYOUT.params)


def test_clients_of_another_size():
    """The signatures carry models of different size: half the rows of a layer, grown back with their coverage."""
    full = Layout({"w": (4, 3)}, {"w": torch.float32})
    small = Layout({"w": (2, 3)}, {"w": torch.float32})

    def grow(tree, size, ctx):
        x = tree["w"]
        out = torch.zeros(x.shape[0], 4, 3)
        out[:, : x.shape[1]] = x
        cover = torch.zeros(1, 4, 3, dtype=torch.bool)
        cover[:, : x.shape[1]] = True
        return {"w": out}, {"w": cover}

    fit = Fit(
        sizes=lambda ctx: torch.where(ctx.ids < 5, 0, 1),
        layouts=(small, full),
        resize=Resize(lambda state, tree, size, ctx: {"w": tree["w"][:, : 2 * size + 2]}, grow),
        module=lambda model, size: model,
    )
    method = compose(full, lambda method: method._replace(fit=fit))
    model = {"w": torch.ones(1, 4, 3)}
    server = first_server(method, model, 10)
    cohort = make_ctx([1, 8], n=[10, 30])
    fold = begin(method, server, cohort)
    for k, shape in ((0, (1, 2, 3)), (1, (1, 4, 3))):
        ctx = cohort.at(slice(k, k + 1))
        down = outgoing(method, server, ctx)
        assert down.leaves["w"].value.shape == shape

        def plus(lesson, ctx, k=k):
            return Trained({"w": lesson.start["w"] + k + 1}, lesson.memory, {"loss": torch.zeros(1)})

        up, _ = client(method, {}, down, plus, ctx)
        incoming(method, server, fold, down, up, ctx)
    after, _ = settle(method, server, fold, cohort)
    assert torch.allclose(after.model["w"][0, :2], torch.tensor(1 + (10 * 1 + 30 * 2) / 40))
    assert torch.allclose(after.model["w"][0, 2:], torch.tensor(3.0)), "only the large client voted here"


def test_a_client_without_a_vote_leaves_no_trace():
    """Even where a codec's decoder fills in every coordinate, as a rotation would."""
    fill = Codec(
        encode=lambda parcel, state, view: (parcel, state),
        decode=lambda parcel, ctx: Parcel(
            {name: leaf._replace(value=torch.full_like(leaf.value, 0.5)) for name, leaf in parcel.leaves.items()},
            parcel.notes,
        ),
    )
    method = method_of([{"psfed": {"per_client": True, "fraction": 0.3}}])._replace(up=(fill,))
    _, before, _, _, _, after, _ = play(method, rounds=1)[2][0]
    moved = (after.model["3.weight"] - before.model["3.weight"]).flatten()
    assert torch.allclose(moved[moved != 0], torch.tensor(0.5), atol=1e-5)


def told_share(layout):
    """The largest half of each tensor: chosen from values, so its index travels down; known on the way up."""

    def down(state, model, ctx):
        cuts = {}
        for name, shape in layout.shapes.items():
            x = flat(model[name]).double()
            cuts[name] = Cut(largest_in_rows(x, max(1, x.shape[1] // 2)).reshape(1, *shape), told=True)
        return cuts

    return Share(
        down=down,
        up=lambda got, ctx: {name: Cut(cut.mask) for name, cut in got.items()},
        init=lambda model: {"rounds": torch.zeros(1)},
        learn=lambda state, blended, ctx: ({"rounds": state["rounds"] + len(blended.ids)}, {"met": 1.0}),
        own=frozenset(layout.shapes),
    )


def test_a_told_scope_travels_and_the_share_learns():
    method = method_of("topk+int8+memory")
    method = method._replace(share=narrow_share(method.share, told_share(LAYOUT)))
    server, _, crossed = play(method)
    assert server.share["b/rounds"].item() == 9
    for ctx, before, down, *_ in crossed:
        one = ctx.at(slice(0, 1))
        expected = schema_down(method, MODEL, one)
        arrived = from_bytes(to_bytes(down, 0, expected.about), expected)
        for name, leaf in arrived.leaves.items():
            assert leaf.told
            assert torch.equal(leaf.value, torch.where(leaf.scope, before.model[name], torch.zeros_like(leaf.value)))
            assert not leaf.scope.all() or leaf.scope.numel() == 1
        assert int(nbytes(down)[0]) > int(nbytes(outgoing(method_of("topk"), before, one))[0]) // 2


def test_serve_gives_every_client_its_own_model_and_notes():
    def serve(state, model, ctx, rows):
        gift = column(ctx.ids.float(), model["3.weight"])
        return model | {"3.weight": model["3.weight"] + gift}, {"hint": ctx.ids.float()}

    method = method_of("fedavg")
    step = Step(lambda state, blended, ctx: (blended.update, state, {}), serving=Serving(serve, {"hint": 1}))
    method = method._replace(blend=method.blend._replace(steps=(step,)))
    ctx, _, down, up, _, after, _ = play(method, rounds=1)[2][0]
    assert torch.equal(down.notes["hint"], ctx.ids.float())
    expected = schema_down(method, MODEL, ctx.at(slice(1, 2)))
    assert from_bytes(to_bytes(down, 1, expected.about), expected).notes["hint"].tolist() == [4.0]
    share = (ctx.n.double() / ctx.n.sum()).reshape(-1, 1, 1)
    want = (share * (down.leaves["3.weight"].value + up.leaves["3.weight"].value).double()).sum(dim=0)
    assert torch.allclose(after.model["3.weight"][0].double(), want, atol=1e-5), "value = sent + increment"


@pytest.mark.parametrize("engine", ["vector", "debug"])
def test_what_did_not_come_down_cannot_go_up(engine, monkeypatch):
    def apply(method):
        half = {n: torch.arange(math.prod(s)).reshape(1, *s) % 2 == 0 for n, s in method.layout.shapes.items()}
        part = Share(
            down=lambda state, model, ctx: {name: Cut(mask) for name, mask in half.items()},
            up=lambda got, ctx: {name: Cut() for name in got},
            own=frozenset(half),
        )
        return method._replace(share=part)

    monkeypatch.setitem(REGISTRY, "greedy", RecipeEntry("greedy", lambda: apply, "", ""))
    with pytest.raises(MethodError, match=r"entries of 'conv1.bias' go up though they did not come down"):
        sparing.run("digits", "greedy", rounds=1, sample=2, engine=engine)


def signs(parcel, state, view):
    leaves = {
        name: leaf._replace(value=torch.where(leaf.value < 0, -1, 1).to(torch.int8), bits=1)
        for name, leaf in parcel.leaves.items()
    }
    return Parcel(leaves, parcel.notes), state


def as_signs(schema, ctx):
    return schema._replace(leaves={name: spec._replace(dtype=torch.int8) for name, spec in schema.leaves.items()})


@pytest.mark.parametrize(
    ("codec", "blend", "message"),
    [
        (
            Codec(signs),
            by_samples,
            "'conv1.weight' the codecs write dtype torch.int8, and their schema says torch.f",
        ),
        (Codec(signs, schema=as_signs), by_samples, "'conv1.weight' arrives as codes, which no codec has decoded"),
        (
            None,
            by_samples._replace(of=lambda state, arrival: (arrival.ctx.n.double(), {"x": torch.zeros(3)})),
            r"'weigh/x', which a part of the blend remembers of 1 clients, has shape \[3\]",
        ),
    ],
)
def test_a_mistake_in_a_new_part_is_named(codec, blend, message, monkeypatch):
    def apply(method):
        up = method.up if codec is None else (codec,)
        return method._replace(up=up, blend=method.blend._replace(weigh=blend))

    monkeypatch.setitem(REGISTRY, "mine", RecipeEntry("mine", lambda: apply, "", ""))
    with pytest.raises(MethodError, match=message):
        sparing.run("digits", "mine", rounds=1, sample=2, engine="debug")


def test_a_tensor_that_only_goes_up_is_an_increment_on_zero():
    cuts = {name: Cut() for name in LAYOUT.shapes}
    head = {name for name in cuts if name.startswith("3.")}
    share = Share(
        down=lambda state, model, ctx: {name: cut for name, cut in cuts.items() if name not in head},
        up=lambda got, ctx: cuts,
        own=frozenset(head),
    )
    method = method_of("fedavg")._replace(share=share)
    ctx, _, down, up, state, after, _ = play(method, rounds=1)[2][0]
    assert not head & down.leaves.keys()
    assert torch.equal(up.leaves["3.bias"].value, state["own/3.bias"])
    weight = (ctx.n.double() / ctx.n.sum())[:, None]
    assert torch.allclose(after.model["3.bias"][0].double(), (weight * state["own/3.bias"]).sum(dim=0), atol=1e-6)


@pytest.mark.parametrize(
    ("notes", "words"), [({"n": 0.0}, "reported 0 samples"), ({"n": float("nan")}, "reported nan")]
)
def test_senseless_notes_are_refused(notes, words):
    method = method_of("fedavg")
    ctx, before, down, up, *_ = play(method, rounds=1)[2][0]
    bad = up._replace(notes=up.notes | {"n": torch.full((3,), notes["n"])})
    with pytest.raises(WireError, match=words):
        incoming(method, before, begin(method, before, ctx), down, bad, ctx)


def test_a_parcel_with_other_tensors_is_refused():
    method = method_of("fedavg")
    ctx, before, down, up, *_ = play(method, rounds=1)[2][0]
    leaves = {name: leaf for name, leaf in up.leaves.items() if name != "3.bias"}
    with pytest.raises(WireError, match=r"disagree about '3.bias'"):
        incoming(method, before, begin(method, before, ctx), down, up._replace(leaves=leaves), ctx)


def test_a_parcel_of_another_round_or_client_is_refused():
    method = method_of("fedavg")
    ctx, _, down, *_ = play(method, rounds=1)[2][0]
    one = ctx.at(slice(0, 1))
    data = to_bytes(down, 0, schema_down(method, MODEL, one).about)
    for other in (one._replace(round=2), ctx.at(slice(1, 2)), changed(one, seed=9)):
        with pytest.raises(WireError):
            from_bytes(data, schema_down(method, MODEL, other))


def test_a_model_that_is_not_finite_is_refused():
    method = method_of([{"fedavgm": {"lr": 1e300}}])
    with pytest.raises(TrainingError, match=r"layer .* is not finite after round 1"):
        play(method, rounds=1)
    with pytest.raises(TrainingError, match="is not finite at the start"):
        first_server(method, {name: x / 0 for name, x in MODEL.items()}, 5)


def test_large_integers_are_moved_exactly():
    layout = Layout({"w": (2,), "steps": ()}, {"w": torch.float32, "steps": torch.int64}, frozenset({"steps"}))
    method = compose(layout)
    server = first_server(method, {"w": torch.zeros(1, 2), "steps": torch.tensor([2**62 + 1])}, 5)
    ctx = make_ctx([0, 1])

    def train(lesson, ctx):
        steps = lesson.start["steps"].expand(2) + torch.tensor([3, 5])
        return Trained({"w": lesson.start["w"].expand(2, 2), "steps": steps}, lesson.memory, {"loss": torch.zeros(2)})

    fold, down = begin(method, server, ctx), outgoing(method, server, ctx)
    up, _ = client(method, {}, down, train, ctx)
    incoming(method, server, fold, down, up, ctx)
    assert settle(method, server, fold, ctx)[0].model["steps"].item() == 2**62 + 1 + 4


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ["fedavg", "psfed", COMBINED, "randk+memory", "topk+fp16", "bf16+fedavgm"])
def test_the_algebra_gives_the_same_bits_on_cpu_and_gpu(spec):
    """Masks, codes, bytes, residuals and the fold: everything but local training."""
    here, there = play(method_of(spec)), play(method_of(spec), device="cuda")
    for (_, _, down, up, state, *_), (_, _, down_gpu, up_gpu, state_gpu, *_) in zip(here[2], there[2], strict=True):
        for one, two in ((down, down_gpu), (up, up_gpu)):
            assert torch.equal(nbytes(one).expand(len(nbytes(two))), nbytes(two).cpu())
            for k in range(3):
                assert to_bytes(parcel_row(one, k), 0) == to_bytes(parcel_row(two, k), 0)
        for name, x in state.items():
            assert torch.equal(x, state_gpu[name].cpu()), name
    for name, x in here[0].model.items():
        assert torch.equal(x, there[0].model[name].cpu()), name


def test_whoever_was_served_has_been_met_even_if_nothing_came_back():
    method = method_of("psfed")
    server = first_server(method, MODEL, 50)
    cohort = make_ctx([1, 4, 9])
    fold = begin(method, server, cohort)
    ctx = cohort.at(slice(0, 1))
    down = outgoing(method, server, ctx)
    up, _ = client(method, first_client(method, MODEL), down, fake_training, ctx)
    incoming(method, server, fold, down, up, ctx)
    after, _ = settle(method, server, fold, cohort)
    assert after.seen.nonzero()[:, 0].tolist() == [1, 4, 9]
