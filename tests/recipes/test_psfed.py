"""PSFed as a study runs it: every "must hold" of the method, and its company."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

import sparing
from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError, SparingError
from sparing.core.method import Local, Phase, Trained
from sparing.core.optimiser import Optimiser
from sparing.core.round import begin, client, first_client, first_server, incoming, outgoing, settle
from sparing.core.tree import expand_rows, layout_of
from sparing.fleet.fleet import Fleet
from sparing.models import build_network
from sparing.recipes.personal import personal
from sparing.recipes.psfed import psfed
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.start import new_run, settle_study
from sparing.runs.study import study_from
from sparing.train.optim import velocities
from sparing.wire import parcel_sizes
from support import changed, make_ctx, random_tree, small_layout

LAYOUT = small_layout()
MODEL = random_tree(LAYOUT, 1, seed=4)
SELECTORS = ["random", "magnitude", "gradient", "layers", "fixed", {"union": ["random", "magnitude"]}]
QUICK = {
    "rounds": 4,
    "sample": 5,
    "seed": 5,
    "local": {"epochs": 1, "batch": 8},
    "plan": {"path": "loop"},
    "evaluate": {"every": 4, "who": ["global"]},
}


def build():
    return nn.Sequential(nn.Linear(6, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 20), nn.Linear(20, 3))


def samples(n, i):
    g = torch.Generator().manual_seed(i)
    y = torch.randint(3, (n,), generator=g)
    return torch.randn(n, 6, generator=g) + torch.randn(3, 6, generator=g)[y], y


TASK = sparing.Task(
    build,
    train=[samples(20 + i, i) for i in range(10)],
    test=[samples(20, 100 + i) for i in range(10)],
    probe=samples(40, 200),
)
PROBE = {"selector": "gradient", "source": "probe"}


def run(method, **options):
    return sparing.run(TASK, method, **{**QUICK, **options})


def with_psfed(**options):
    return [{"psfed": options}]


def training(lesson, ctx):
    after = {}
    for name, x in lesson.start.items():
        noise = ctx.uniform(f"move/{name}", x[0].numel()).reshape(-1, *x.shape[1:]) - 0.5
        after[name] = x + noise if x.is_floating_point() else (x + 2).expand(len(ctx.ids), *x.shape[1:]).clone()
    return Trained(after, lesson.memory, {"loss": torch.zeros(len(ctx.ids))})


def play(method, rounds=4, ids=(1, 4, 7)):
    """(ctx, server before, parcel down, models at start, states after, server after) of every round."""
    server, state, seen = first_server(method, MODEL, 50), expand_rows(first_client(method, MODEL), len(ids)), []
    for t in range(1, rounds + 1):
        ctx = make_ctx(list(ids), t=t)
        ctx = changed(ctx, first=~server.seen[ctx.ids])
        starts = []

        def watched(lesson, ctx, starts=starts):
            starts.append(expand_rows(lesson.start, len(ctx.ids)))
            return training(lesson, ctx)

        fold, down = begin(method, server, ctx), outgoing(method, server, ctx)
        before, old = server, state
        up, state = client(method, state, down, watched, ctx)
        incoming(method, server, fold, down, up, ctx)
        server, _ = settle(method, server, fold, ctx)
        seen.append((ctx, before, old, down, up, starts[0], server))
    return seen


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_at_one_it_is_fedavg_bit_for_bit(selector):
    plain, partial = run("fedavg"), run(with_psfed(fraction=1.0, selector=selector))
    assert partial.model_sha256 == plain.model_sha256
    assert (partial.up_bytes, partial.down_bytes) == (plain.up_bytes, plain.down_bytes)


def test_at_zero_it_is_local_training_with_no_payload():
    looks = {"evaluate": {"every": 2}}
    alone, partial = run("local", **looks), run(with_psfed(fraction=0.0), **looks)
    assert [r.personal_accuracy for r in partial.table] == [r.personal_accuracy for r in alone.table]
    assert partial.model_sha256 == alone.model_sha256, "the server learns nothing"
    assert (partial.up_bytes, partial.down_bytes) == (alone.up_bytes, alone.down_bytes)
    for _, _, _, down, up, *_ in play(compose(LAYOUT, psfed(fraction=0.0))):
        for parcel in (down, up):
            spent = parcel_sizes(parcel)
            assert not any(int(spent[kind].sum()) for kind in ("value", "index", "scale"))


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_outside_the_mask_the_server_stands_still_and_the_client_keeps_its_own(selector):
    method = compose(LAYOUT, psfed(fraction=0.3, selector=selector))
    for ctx, before, old, down, up, start, after in play(method)[1:]:
        for name in LAYOUT.params:
            mask = down.leaves[name].scope
            assert torch.equal(up.leaves[name].scope, mask), "the same mask on both ends"
            assert torch.equal(after.model[name][~mask], before.model[name][~mask])
            assert not (after.model[name][mask] == before.model[name][mask]).any()
            for k in range(len(ctx.ids)):
                assert torch.equal(start[name][k][~mask[0]], old[f"own/{name}"][k][~mask[0]])
                assert torch.equal(start[name][k][mask[0]], before.model[name][mask])


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_after_a_full_sync_all_start_equal(selector):
    apart = {}
    for ctx, _, _, _, _, start, _ in play(compose(LAYOUT, psfed(fraction=0.3, selector=selector, sync=3)), rounds=6):
        apart[ctx.round] = any(not torch.equal(x[0], x[1]) for name, x in start.items() if name in LAYOUT.params)
    assert apart == {1: False, 2: True, 3: False, 4: True, 5: True, 6: False}


@pytest.mark.parametrize(
    "options",
    [
        {"selector": "magnitude"},
        {"selector": "gradient", "per_client": True},
        {"selector": "gradient", "first": "seed", "sync": 3},
        {"selector": "layers", "per_client": True, "start": 0.0, "warmup": 2},
        {"selector": "fixed", "fraction": 0.0, "sync": 2},
        {"selector": {"union": ["random", "magnitude"]}, "per_client": True, "sync": 3},
        {"selector": {"intersection": ["gradient", "layers"]}, "start": 1.0, "warmup": 3, "schedule": "cosine"},
        PROBE,
        {"selector": {"union": ["gradient", "random"]}, "source": "probe", "per_client": True, "sync": 3},
    ],
    ids=str,
)
def test_both_engines_agree(options):
    method = [*with_psfed(**{"fraction": 0.3, **options}), "topk", "int8", "memory"]
    plain = run(method, engine="debug")
    fast = run(method, plan={"path": "loop", "chunk": 3})
    assert fast.model_sha256 == plain.model_sha256
    assert (fast.up_bytes, fast.down_bytes) == (plain.up_bytes, plain.down_bytes)
    assert fast.metric("mask_count") == plain.metric("mask_count")


@pytest.mark.parametrize(("p", "megabytes"), [(1.0, 102.2), (0.5, 51.1), (0.1, 10.2)])
def test_resnet50_costs_what_it_must(p, megabytes):
    with torch.device("meta"):
        layout = layout_of(build_network("resnet50", (3, 224, 224), 1000))
    assert layout.size == 25_557_032
    zero = {name: torch.zeros(1, *shape) for name, shape in layout.shapes.items()}
    method, ctx = compose(layout, psfed(fraction=p)), make_ctx([3])
    down = outgoing(method, first_server(method, zero, 50), ctx)

    def still(lesson, ctx):
        return Trained(lesson.start, lesson.memory, {"loss": torch.zeros(1)})

    up, _ = client(method, first_client(method, zero), down, still, ctx)
    for parcel in (down, up):
        spent = {kind: int(x[0]) for kind, x in parcel_sizes(parcel).items()}
        assert spent["value"] == 4 * math.floor(p * layout.size + 0.5)
        assert spent["index"] == 0
        assert round(sum(spent.values()) / 1e6, 1) == megabytes


def test_a_mask_chosen_from_values_pays_for_its_index_downstream_only():
    for selector, paid in (("random", False), ("layers", False), ("fixed", False), ("magnitude", True)):
        _, _, _, down, up, *_ = play(compose(LAYOUT, psfed(selector=selector)), rounds=2)[1]
        assert bool(parcel_sizes(down)["index"].sum() > 0) == paid
        assert int(parcel_sizes(up)["index"].sum()) == 0


def test_stale_divergence_falls_with_p_and_is_zero_at_a_full_sync():
    stale = {p: run(with_psfed(fraction=p)).metric("stale_divergence") for p in (0.1, 0.5, 0.9)}
    assert stale[0.1][-1] > 2 * stale[0.5][-1] > 4 * stale[0.9][-1] > 0
    synced = run(with_psfed(fraction=0.1, sync=2)).metric("stale_divergence")
    assert synced[1] == synced[3] == 0
    assert 0 < synced[2] < stale[0.1][2]


def test_coverage_and_mask_count_are_reported():
    shared, apart = run(with_psfed(fraction=0.3)), run(with_psfed(fraction=0.3, per_client=True))
    count = shared.metric("mask_count")[0]
    assert shared.metric("mask_count") == apart.metric("mask_count") == [count] * 4
    assert all(r.coverage == pytest.approx(0.3, abs=1e-3) for r in shared.table)
    assert all(r.coverage == pytest.approx(1 - 0.7**5, abs=0.02) for r in apart.table)
    ramp = run(with_psfed(fraction=0.3, start=0.1, warmup=2)).metric("mask_count")
    assert ramp == pytest.approx([count / 3, count * 2 / 3, count, count], abs=1)


def test_after_t_rounds_a_share_of_1_minus_1_minus_p_to_the_t_has_travelled():
    method, rounds, p = compose(LAYOUT, psfed(fraction=0.3)), 6, 0.3
    seen = {name: torch.zeros(1, *LAYOUT.shapes[name], dtype=torch.bool) for name in LAYOUT.params}
    travelled = []
    for t in range(1, rounds + 1):
        cuts = method.share.down(method.share.init(MODEL), MODEL, make_ctx([0], t=t))
        seen = {name: mask | cuts[name].mask for name, mask in seen.items()}
        travelled.append(sum(int(mask.sum()) for mask in seen.values()) / LAYOUT.size)
    spread = 3 * math.sqrt(0.25 / LAYOUT.size)
    assert travelled == pytest.approx([1 - (1 - p) ** t for t in range(1, rounds + 1)], abs=spread)
    assert len(set(travelled)) == rounds


def test_evaluating_has_no_side_effect_on_what_is_kept():
    method = with_psfed(selector="gradient", reset_momentum=True)
    local = {"epochs": 1, "batch": 8, "momentum": 0.9, "velocity": "kept"}
    all_of_it = {"every": 1, "who": ["global", "before", "after"]}
    looked_at, left_alone = run(method, local=local, evaluate=all_of_it), run(method, local=local)
    assert looked_at.model_sha256 == left_alone.model_sha256


@pytest.mark.parametrize("options", [{"selector": "gradient"}, PROBE], ids=str)
def test_a_broken_run_takes_up_its_scores_again(options, tmp_path):
    class Broken(Exception):
        pass

    def stop(record):
        if record.round == 2:
            raise Broken

    whole = run(with_psfed(**options))
    with pytest.raises(Broken):
        run(with_psfed(**options), out=tmp_path / "run", loggers=[stop])
    assert sparing.resume(tmp_path / "run", task=TASK).model_sha256 == whole.model_sha256


def scores_of(task, **options):
    """The server's scores before the first round and after three, and its models then."""
    study = study_from({**QUICK, "method": with_psfed(fraction=0.3, **options)})
    job, study = settle_study(study, task)
    state = new_run(study, job, None)
    seen = [state.server]
    for t in range(1, 4):
        server, _ = state.engine.round(seen[-1], torch.arange(5), t)
        seen.append(server)
    return job, seen


def test_the_score_is_the_gradient_on_the_probe_set_at_the_model_of_the_round():
    job, seen = scores_of(TASK, **PROBE)
    net, (x, y) = build().eval(), TASK.probe
    for t, server in enumerate(seen, 1):
        net.load_state_dict({name: value[0] for name, value in server.model.items()})
        slope = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
        for (name, _), g in zip(net.named_parameters(), slope, strict=True):
            assert torch.allclose(server.share[f"b/{name}"][0], g.abs(), rtol=1e-3, atol=1e-6)
        best = torch.cat([g.abs().flatten() for g in slope])
        cuts = job.method.share.down(server.share, server.model, make_ctx([1], t=t))
        mask = torch.cat([cuts[name].mask.flatten() for name, _ in net.named_parameters()])
        count = math.floor(0.3 * len(mask) + 0.5)
        assert int(mask.sum()) == count
        assert bool(mask[best.topk(int(0.85 * count)).indices].all()), "but for a tenth that explores"


def test_a_probe_set_costs_nothing_on_the_wire_up_and_changes_what_is_learned():
    updates, probe = run(with_psfed(selector="gradient")), run(with_psfed(**PROBE))
    assert abs(probe.up_bytes - updates.up_bytes) <= 8 * 4 * 5, "but for lengths of lengths"
    assert probe.metric("mask_count") == updates.metric("mask_count")
    assert probe.model_sha256 != updates.model_sha256
    other = copy.copy(TASK)
    other.probe = samples(40, 201)
    assert sparing.run(other, with_psfed(**PROBE), **QUICK).model_sha256 != probe.model_sha256
    assert sparing.run(other, "psfed", **QUICK).model_sha256 == run("psfed").model_sha256, "only whoever asks looks"


def test_a_run_on_another_probe_set_is_not_taken_up(tmp_path):
    run(with_psfed(**PROBE), rounds=1, out=tmp_path / "run")
    other = copy.copy(TASK)
    other.probe = samples(40, 201)
    with pytest.raises(SparingError, match="another task: the server's probe samples changed"):
        sparing.resume(tmp_path / "run", task=other)


def test_a_probe_set_is_asked_for_and_can_be_taken_from_the_training_samples(tmp_path):
    task = {"data": "digits", "clients": 8, "model": "mlp"}
    message = r"gradient on the server's probe set .* set task\.probe to a share .* your own Task a probe=\(x, y\)"
    with pytest.raises(ConfigError, match=message):
        sparing.run(task, with_psfed(**PROBE), **QUICK, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    task["probe"] = 60
    plain, fast = (sparing.run(task, with_psfed(**PROBE), **QUICK, engine=engine) for engine in ("debug", "vector"))
    assert plain.model_sha256 == fast.model_sha256


def test_a_core_without_a_probe_set_does_not_fall_back():
    with pytest.raises(MethodError, match="the server has none"):
        first_server(compose(LAYOUT, psfed(**PROBE)), MODEL, 5)


def test_layers_that_stay_home_have_no_score():
    personal_too = ["personal", *with_psfed(**PROBE)]
    plain, fast = (run(personal_too, engine=engine) for engine in ("debug", "vector"))
    assert plain.model_sha256 == fast.model_sha256
    method = compose(LAYOUT, personal(), psfed(**PROBE))
    server = first_server(method, MODEL, 5, gradient=lambda model: model)
    assert not any(name.startswith("b/3.") for name in server.share)


def test_momentum_is_forgotten_exactly_where_the_server_wrote():
    """Against a loop over single numbers: x falls along x^2 / 2 with momentum, two steps a round."""
    lr, beta = 0.1, 0.9

    def descend(lesson, ctx):
        after, memory = dict(expand_rows(lesson.start, 2)), expand_rows(lesson.memory, 2)
        velocity = {name: x.clone() for name, x in memory.items()}
        for name in LAYOUT.params:
            for _ in range(2):
                velocity[f"velocity/{name}"] = beta * velocity[f"velocity/{name}"] + after[name]
                after[name] = after[name] - lr * velocity[f"velocity/{name}"]
        return Trained(after, velocity, {"loss": torch.zeros(2)})

    local = Local((Phase(optimiser=Optimiser(momentum=beta)),), init=velocities)
    method = compose(LAYOUT, psfed(fraction=0.4, reset_momentum=True), local=local)
    server, state = first_server(method, MODEL, 50), expand_rows(first_client(method, MODEL), 2)
    name, k, places = "3.weight", 1, [(0, 1), (1, 7), (2, 5), (2, 15)]
    x, v = dict.fromkeys(places, 0.0), dict.fromkeys(places, 0.0)
    written = set()
    for t in range(1, 6):
        ctx = make_ctx([3, 8], t=t)
        ctx = changed(ctx, first=~server.seen[ctx.ids])
        fold, down = begin(method, server, ctx), outgoing(method, server, ctx)
        mask, value = (part.expand(2, 3, 16)[k] for part in (down.leaves[name].scope, down.leaves[name].value))
        up, state = client(method, state, down, descend, ctx)
        for at in places:
            written |= {bool(mask[at])}
            if mask[at]:
                x[at], v[at] = float(value[at]), 0.0
            for _ in range(2):
                v[at] = beta * v[at] + x[at]
                x[at] = x[at] - lr * v[at]
            assert float(state[f"own/{name}"][k][at]) == pytest.approx(x[at], rel=1e-4)
            assert float(state[f"local/velocity/{name}"][k][at]) == pytest.approx(v[at], rel=1e-4)
        incoming(method, server, fold, down, up, ctx)
        server, _ = settle(method, server, fold, ctx)
    assert written == {True, False}


def test_resetting_momentum_changes_training_and_keeping_it_does_too():
    local = {"epochs": 1, "batch": 8, "momentum": 0.9}
    kept = {**local, "velocity": "kept"}
    seen = {
        run("psfed", local=local).model_sha256,
        run("psfed", local=kept).model_sha256,
        run(with_psfed(reset_momentum=True), local=kept).model_sha256,
    }
    assert len(seen) == 3
    whole = run(with_psfed(fraction=1.0, reset_momentum=True), local=kept)
    assert whole.model_sha256 == run("fedavg", local=local).model_sha256, "everything synced: nothing is kept"


def test_momentum_that_is_not_kept_cannot_be_reset():
    with pytest.raises(MethodError, match=r"psfed\.reset_momentum: clients keep no momentum .* local\.velocity: kept"):
        run(with_psfed(reset_momentum=True))


@pytest.mark.parametrize("selector", ["magnitude", "gradient", "layers"])
def test_it_takes_its_part_of_what_the_recipes_before_let_through(selector):
    method = compose(LAYOUT, personal(), psfed(fraction=0.5, selector=selector, first="seed"))
    home = {"3.weight", "3.bias"}
    left = sum(MODEL[name].numel() for name in LAYOUT.params if name not in home)
    for _, _, _, down, up, *_ in play(method):
        assert not home & (down.leaves.keys() | up.leaves.keys())
        sent = sum(int(leaf.scope[0].sum()) for name, leaf in down.leaves.items() if name in LAYOUT.params)
        assert sent == math.floor(0.5 * left + 0.5) or selector == "layers"
        assert sent > 0
    assert compose(LAYOUT, *recipes_from_entries(["local", "psfed"])).share.down({}, MODEL, make_ctx([1])) == {}


def test_with_fedprox():
    free, held = (run("psfed", local={"epochs": 1, "batch": 8, "prox": mu}) for mu in (0.0, 10.0))
    assert held.up_bytes == free.up_bytes
    assert held.metric("stale_divergence")[-1] < 0.7 * free.metric("stale_divergence")[-1], "clients stay nearer"


def test_with_gradient_compression():
    """topk keeps a tenth of what is inside the mask, and memory keeps the rest of it, and all outside it."""
    method = compose(LAYOUT, *recipes_from_entries([{"psfed": {"fraction": 0.4}}, "topk", "memory"]))
    for (_, _, old, down, up, *_), (_, _, state, *_) in itertools.pairwise(play(method)):
        for name in LAYOUT.params:
            leaf, mask = up.leaves[name], up.leaves[name].scope
            assert not (leaf.value != 0)[~mask.expand_as(leaf.value)].any()
            residual, earlier = state[f"up/residual/{name}"], old[f"up/residual/{name}"]
            moved = state[f"own/{name}"] - down.leaves[name].value
            wanted = torch.where(mask, moved + earlier, earlier)
            assert torch.equal(leaf.value + residual, wanted)
    lean, full = run("psfed+topk+memory"), run("psfed")
    assert lean.up_bytes < 0.3 * full.up_bytes
    assert lean.down_bytes == full.down_bytes


def test_with_partial_participation():
    """A newcomer pays for one full download, and whoever sits out keeps its own model."""
    everyone, few = run("psfed", sample=10), run("psfed", sample=3, rounds=8)
    full, half = (everyone.table[t].down_bytes / 10 for t in (0, 1))
    assert full > 1.5 * half
    met = set()
    for record in few.table:
        ids = set(Fleet().cohort(QUICK["seed"], record.round, 10, 3).tolist())
        assert record.down_bytes == pytest.approx(full * len(ids - met) + half * len(ids & met), abs=10)
        met |= ids
    absent = {"dropout": 0.4, "available": 0.7}
    vanishing, other_engine = (run("psfed", fleet=absent, rounds=6, engine=e) for e in ("vector", "debug"))
    assert vanishing.model_sha256 == other_engine.model_sha256


def test_options_are_checked():
    for options, message in (
        ({"fraction": "half"}, r"psfed\.fraction is 'half'"),
        ({"selector": ["random", "fixed"]}, r"psfed\.selector is \['random', 'fixed'\]"),
        ({"sync": 0}, r"psfed\.sync is 0"),
        ({"fractoin": 0.5}, "did you mean 'fraction'"),
    ):
        with pytest.raises(ConfigError, match=message):
            compose(LAYOUT, *recipes_from_entries(with_psfed(**options)))
