"""What must hold of Stein-rule shrinkage, beside the formula itself (tests/reference)."""

import warnings

import numpy as np
import pytest
import torch

import sparing
from reference import stein as reference
from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError
from sparing.core.method import Arrival, Blended
from sparing.core.round import begin, first_server, settle
from sparing.core.tree import Layout, under
from sparing.parts.blend.stein import SteinSettings, stein_step
from sparing.recipes.stein import stein as named
from support import changed, make_ctx, numbers

P = 40
LAYOUT = Layout({"w": (P,), "buffer": (3,)}, {"w": torch.float32, "buffer": torch.float32}, frozenset({"buffer"}))
STUDY = {"task": "digits", "rounds": 4, "sample": 5, "seed": 1, "local": {"steps": 3}, "evaluate": {"every": 4}}


def shrink(deltas, settings, m=None, t=9, n=None, clients=50, covered=None, step=None, state=None):
    """(g, c, state) of one round over the tensor w."""
    deltas = torch.as_tensor(np.asarray(deltas), dtype=torch.float32)
    k = len(deltas)
    ctx = make_ctx(list(range(k)), n=n or [10] * k, t=t, clients=clients)
    step = step or stein_step(LAYOUT, settings)
    if state is None:
        state = step.init({"w": torch.zeros(1, P), "buffer": torch.zeros(1, 3)}, clients)
        if m is not None:
            m = torch.as_tensor(np.asarray(m, np.float64)).reshape(1, P)
            state |= {"rounds": torch.ones(1, dtype=torch.int64), "mass0/w": torch.ones(1, 1).double()}
            state |= {"sum0/w": m, "target0/w": m}
    update = {"w": deltas, "buffer": torch.zeros(k, 3)}
    seen = step.watch(state, Arrival(update, {"w": covered, "buffer": None}, {}, {}, ctx))
    weight = ctx.n.double()
    x = ((weight / weight.sum())[:, None] * deltas.double()).sum(0, keepdim=True)
    if covered is not None:
        x = x * covered
    plain = {"w": deltas.double().mean(0, keepdim=True), "buffer": torch.zeros(1, 3).double()}
    total = {"w": x, "buffer": torch.ones(1, 3).double()}
    blended = Blended(total, {"w": covered, "buffer": None}, ctx.ids, weight, seen, plain)
    update, after, report = step.apply(state, blended, ctx)
    assert torch.equal(update["buffer"], total["buffer"]), "buffers move by X itself"
    return update["w"][0].numpy(), numbers(report)["c/w"], after


def noisy(scale=1.0, k=6, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=P) + scale * rng.normal(size=(k, P))


@pytest.mark.slow
def test_warm_up_rounds_are_fedavg_bit_for_bit():
    plain = sparing.run(method="fedavg", **STUDY)
    shrunk = sparing.run(method=[{"sr-fedavg": {"warmup": 4}}], **STUDY)
    assert shrunk.model_sha256 == plain.model_sha256
    assert sparing.run(method=[{"sr-fedavg": {"warmup": 3}}], **STUDY).model_sha256 != plain.model_sha256


@pytest.mark.slow
def test_beta_changes_results():
    runs = {b: sparing.run(method=[{"stein": {"warmup": 1, "beta": b}}], **STUDY).model_sha256 for b in (0.5, 0.9)}
    assert runs[0.5] != runs[0.9]


def test_c_lies_in_its_range_and_follows_the_noise():
    m = np.zeros(P)
    found = [shrink(noisy(scale), SteinSettings(), m)[1] for scale in (0.1, 0.5, 1.0, 2.0, 8.0)]
    assert all(0.2 <= c <= 1 for c in found)
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.95 > found[2] > found[-1] == 0.2


@pytest.mark.parametrize("case", ["identical", "one", "tiny", "exact"])
def test_where_c_is_one_x_itself_comes_back(case):
    m, deltas = np.full(P, 0.3), noisy()
    if case == "identical":
        deltas = np.repeat(deltas[:1], 5, axis=0)
    if case == "one":
        deltas = deltas[:1]
    covered = None
    if case == "tiny":
        covered = torch.zeros(1, P, dtype=torch.bool)
        covered[0, :2] = True
    if case == "exact":
        deltas = np.round(noisy(k=4) * 8) / 8  # sums of eighths are exact, so |X - m| is truly zero
        m = deltas.mean(0)
    g, c, _ = shrink(deltas, SteinSettings(), m, covered=covered)
    x = np.float32(deltas).astype(np.float64).mean(0) * (1 if covered is None else covered[0].numpy())
    assert c == pytest.approx(1, abs=1e-9)
    np.testing.assert_allclose(g, x, atol=1e-12)


def test_a_common_shift_of_updates_and_target_shifts_the_result():
    m, deltas = np.full(P, 0.25), np.float32(noisy())
    plain, c, _ = shrink(deltas, SteinSettings(), m)
    moved, same, _ = shrink(deltas + 2.0, SteinSettings(), m + 2.0)
    assert c == pytest.approx(same, abs=1e-4)
    np.testing.assert_allclose(moved, plain + 2.0, atol=1e-4)


def test_clients_are_compared_with_their_unweighted_mean_where_that_is_the_target():
    """While they arrive they can be compared with zero only; what that is off by is made good once all are there."""
    deltas, n = np.float32(noisy(0.5)), [60, 10, 10, 10, 10, 10]
    deltas[0] += 1.0
    wanted, g = reference.shrink(deltas, n, deltas.mean(0, dtype=np.float64), 8)
    assert 0.3 < wanted < 0.9, "so that no bound hides an error"
    found, c, _ = shrink(deltas, SteinSettings(warmup=0, target="uniform"), n=n, clients=8)
    assert c == pytest.approx(wanted, abs=1e-6)
    np.testing.assert_allclose(found, g, atol=1e-6)


def test_risk_is_no_higher_than_fedavgs():
    """Clients scatter around a mean that the target is near: shrinking must come closer to it, on average."""
    rng = np.random.default_rng(3)
    lost = {"mean": 0.0, "shrunk": 0.0}
    for _ in range(300):
        truth = 0.3 * rng.normal(size=P)
        deltas = truth + rng.normal(size=(5, P))
        g, _, _ = shrink(deltas, SteinSettings(), np.zeros(P), clients=5000)
        lost["mean"] += ((deltas.mean(0) - truth) ** 2).sum()
        lost["shrunk"] += ((g - truth) ** 2).sum()
    assert lost["shrunk"] < 0.8 * lost["mean"]


def test_the_target_never_contains_this_round():
    step = stein_step(LAYOUT, SteinSettings(warmup=0))
    _, c, state = shrink(noisy(seed=1), SteinSettings(), t=1, step=step)
    assert c == 1
    second = noisy(seed=2)
    g, c, after = shrink(second, SteinSettings(), t=2, step=step, state=state)
    m = np.float32(noisy(seed=1)).astype(np.float64).mean(0)
    x = np.float32(second).astype(np.float64).mean(0)
    np.testing.assert_allclose(g, m + c * (x - m), atol=1e-9)
    corrected = (after["sum0/w"] / after["mass0/w"])[0].numpy()
    np.testing.assert_allclose(corrected, (0.9 * 0.1 * m + 0.1 * x) / (1 - 0.9**2), atol=1e-9)


def test_coefficient_role_smooths_c_and_is_fedavg_at_one():
    step = stein_step(LAYOUT, SteinSettings(warmup=0, beta=0.5, beta_role="coefficient"))
    _, c1, state = shrink(noisy(seed=1), SteinSettings(), t=1, step=step)
    _, c2, state = shrink(noisy(4.0, seed=2), SteinSettings(), t=2, step=step, state=state)
    assert c1 == 1
    assert 0.5 * 1 + 0.5 * 0.2 <= c2 < 1
    g, c, _ = shrink(noisy(4.0), SteinSettings(beta=1.0, beta_role="coefficient", warmup=0), np.zeros(P))
    assert c == 1
    np.testing.assert_allclose(g, np.float32(noisy(4.0)).astype(np.float64).mean(0), rtol=1e-12)


def test_smoothing_is_a_recursion_over_rounds():
    step, state, wanted = stein_step(LAYOUT, SteinSettings(warmup=0, beta=0.5, beta_role="coefficient")), None, 1.0
    plain, other = stein_step(LAYOUT, SteinSettings(warmup=0)), None
    for t in range(1, 6):
        deltas = noisy(2.0, seed=t)
        _, c, other = shrink(deltas, SteinSettings(), t=t, step=plain, state=other)
        _, smooth, state = shrink(deltas, SteinSettings(), t=t, step=step, state=state)
        wanted = 0.5 * wanted + 0.5 * c if t > 1 else 1.0
        assert smooth == pytest.approx(wanted, abs=1e-12)
    x, c, _ = shrink(noisy(2.0)[:1], SteinSettings(), t=9, step=step, state=state)
    assert c == 1, "one client: X itself, whatever was smoothed before"
    np.testing.assert_allclose(x, np.float32(noisy(2.0)[0]), atol=1e-12)


def test_under_a_common_mask_only_what_is_shared_counts_and_the_target_of_an_entry_is_its_own():
    rng, step, state = np.random.default_rng(5), stein_step(LAYOUT, SteinSettings(warmup=0, beta=0.8)), None
    sums, mass = np.zeros(P), np.zeros(P)
    for t in range(1, 8):
        mask = rng.random(P) < 0.5
        deltas = np.float32(rng.normal(size=P) * 0.3 + rng.normal(size=(5, P))) * mask
        covered = torch.tensor(mask)[None]
        g, c, state = shrink(deltas, SteinSettings(), t=t, step=step, state=state, covered=covered)
        known, x = mask & (mass > 0), deltas.astype(np.float64).mean(0)
        m = np.divide(sums, mass, out=np.zeros(P), where=mass > 0)
        wanted, part = (1.0, x[known]) if t == 1 else reference.shrink(deltas[:, known], np.ones(5), m[known], 50)
        assert c == pytest.approx(wanted, abs=1e-9)
        np.testing.assert_allclose(g[known], part, atol=1e-9)
        np.testing.assert_allclose(g[~known], x[~known], atol=1e-12)
        sums, mass = np.where(mask, 0.8 * sums + 0.2 * x, sums), np.where(mask, 0.8 * mass + 0.2, mass)


@pytest.mark.slow
def test_masks_of_their_own_leave_the_mean_alone_and_say_so():
    spec = [{"psfed": {"per_client": True}}, {"stein": {"warmup": 1}}]
    with pytest.warns(UserWarning, match="vote on different coordinates"):
        result = sparing.run(method=spec, **STUDY)
    assert result.model_sha256 == sparing.run(method=spec[:1], **STUDY).model_sha256


def test_identical_clients_give_one_through_the_real_fold():
    """The fold rounds to a grid; what that leaves of |X - m| is nothing."""
    x = torch.full((4, P), 0.1234567)
    method = compose(LAYOUT, named(warmup=0))
    server = first_server(method, {"w": torch.zeros(1, P), "buffer": torch.zeros(1, 3)}, 50)
    for t in range(1, 9):
        ctx = make_ctx([1, 2, 3, 4], n=[3, 5, 7, 11], t=t)
        fold = begin(method, server, ctx)
        arrival = Arrival({"w": x}, {"w": None}, {"n": ctx.n.float()}, server.model, ctx)
        seen = {f"0/{k}": v for k, v in method.blend.steps[0].watch(under("0", server.blend), arrival).items()}
        fold.add(arrival, ctx.n.double(), seen)
        server, report = settle(method, server, fold, ctx)
        assert report["c_min"] == 1


def test_clients_held_out_are_not_part_of_the_population():
    task = {"data": "digits", "held_out": 5}
    with pytest.warns(UserWarning, match="all clients take part"):
        result = sparing.run(task, [{"stein": {"warmup": 1}}], rounds=3, sample=15, local={"steps": 2}, seed=1)
    assert result.metric("c_min") == [1, 1, 1]


def test_learned_beta_finds_the_slow_target_of_a_steady_drift():
    rng, drift = np.random.default_rng(0), np.random.default_rng(1).normal(size=P)
    step = stein_step(LAYOUT, SteinSettings(warmup=0, learn_beta=True, beta=0.5))
    state, said = None, []
    for t in range(1, 30):
        deltas = torch.as_tensor(drift + rng.normal(size=(4, P)), dtype=torch.float32)
        ctx = make_ctx([0, 1, 2, 3], n=[10] * 4, t=t)
        state = state or step.init({"w": torch.zeros(1, P), "buffer": torch.zeros(1, 3)}, 50)
        seen = step.watch(state, Arrival({"w": deltas}, {"w": None}, {}, {}, ctx))
        blended = Blended({"w": deltas.double().mean(0, keepdim=True)}, {"w": None}, ctx.ids, ctx.n.double(), seen)
        _, state, report = step.apply(state, blended, ctx)
        said.append(report["beta/w"])
    assert said[0] == 0.5
    assert said[-1] in (0.9, 0.95)


def test_only_the_noisiest_layers_are_shrunk():
    result = sparing.run(method=[{"stein": {"warmup": 1, "only": 0.3}}], **STUDY)
    cs = [v for k, v in result.table[-1].metrics.items() if k.startswith("c/")]
    assert len(cs) == 8
    assert sum(c < 1 for c in cs) == 3


@pytest.mark.slow
def test_full_participation_is_fedavg_and_says_so():
    study = {**STUDY, "sample": 20}
    with pytest.warns(UserWarning, match="all clients take part"):
        shrunk = sparing.run(method=[{"stein": {"warmup": 1}}], **study)
    assert shrunk.model_sha256 == sparing.run(method="fedavg", **study).model_sha256
    with pytest.warns(UserWarning, match="one client a round"):
        sparing.run(method=[{"stein": {"warmup": 1}}], **{**STUDY, "sample": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = sparing.run(method=[{"stein": {"warmup": 1, "population": "infinite"}}], **study)
    assert other.metric("c_min")[-1] < 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["psfed+stein", "psfed+topk+stein+fedavgm", "personal+stein+int8"])
def test_both_engines_agree(method):
    spec = [{"stein": {"warmup": 1, "learn_beta": "psfed" in method}} if m == "stein" else m for m in method.split("+")]
    runs = [sparing.run(method=spec, engine=e, plan={"path": "loop"}, **STUDY) for e in ("vector", "debug")]
    assert runs[0].model_sha256 == runs[1].model_sha256
    assert runs[0].up_bytes == runs[1].up_bytes
    assert runs[0].metric("c_min") == runs[1].metric("c_min")
    assert runs[0].metric("c_min")[-1] < 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": 1.5}, "stein.beta is 1.5"),
        ({"warmup": -1}, "stein.warmup is -1"),
        ({"only": 0}, "stein.only is 0"),
        ({"learn_beta": True, "target": "zero"}, "learn_beta"),
    ],
)
def test_settings_that_cannot_be_meant(options, words):
    with pytest.raises(ConfigError, match=words):
        stein_step(LAYOUT, SteinSettings(**options))


def test_not_over_a_blend_that_collects():
    def median(method):
        return method._replace(blend=method.blend._replace(collect=lambda values, votes, weight: values.median(0)[0]))

    with pytest.raises(MethodError, match="needs a weighted mean"):
        compose(LAYOUT, median, named())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "settings",
    [SteinSettings(warmup=0), SteinSettings(warmup=0, target="uniform"), SteinSettings(warmup=0, learn_beta=True)],
)
def test_a_gpu_gives_the_same_bits(settings):
    found = []
    for device in ("cpu", "cuda"):
        step, said = stein_step(LAYOUT, settings), []
        state = step.init({"w": torch.zeros(1, P, device=device), "buffer": torch.zeros(1, 3, device=device)}, 50)
        for t in range(1, 4):
            deltas = torch.as_tensor(noisy(seed=t), dtype=torch.float32)
            mask = torch.rand(1, P, generator=torch.Generator().manual_seed(t)) < 0.8
            ctx = changed(make_ctx(list(range(6)), n=[10, 20, 30, 40, 50, 60], t=t), device=device)
            weight = ctx.n.double()
            mean = {"w": ((weight / weight.sum())[:, None] * deltas.double()).sum(0, keepdim=True) * mask}
            plain = {"w": deltas.double().mean(0, keepdim=True) * mask}
            mean, plain = ({name: x.to(device) for name, x in tree.items()} for tree in (mean, plain))
            there = {"w": mask.to(device)}
            arrival = Arrival({"w": (deltas * mask).to(device)}, there, {}, {}, ctx)
            blended = Blended(mean, there, ctx.ids, weight.to(device), step.watch(state, arrival), plain)
            update, state, report = step.apply(state, blended, ctx)
            said.append((update["w"].tolist(), numbers(report)))
        found.append(said)
    assert found[0] == found[1]
