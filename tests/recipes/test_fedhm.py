"""FedHM as people run it: engines, combinations, capacities, resuming, and what it refuses."""

import pytest
import torch

import sparing
from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError
from sparing.core.method import Local, Phase
from sparing.core.optimiser import Optimiser
from sparing.core.tree import layout_of
from sparing.models.small import cnn
from sparing.parts.factors import along_factors, factor_pace
from sparing.parts.size.fedhm.svd import begins_anew
from sparing.recipes.fedhm import fedhm
from sparing.runs.cost import run_cost_trial
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.start import start_run
from sparing.runs.study import method_list, study_from
from sparing.train.optim import frobenius, velocities
from support import declared

LAYOUT = layout_of(cnn(1, 10, 8))
QUICK = {"rounds": 3, "sample": 6, "seed": 5, "local": {"steps": 3, "batch": 16, "momentum": 0.9}}
TASK = {"data": "digits", "clients": 12, "split": {"dirichlet": 0.3}, "model": "cnn"}


PRODUCTS, PARTITIONED = ({"fedhm": {"blend": blend}} for blend in ("products", "partitioned"))


def play(method, **options):
    return sparing.run(options.pop("task", TASK), method, **{**QUICK, **options})


@pytest.fixture
def capacity(tmp_path):
    """Clients 0 to 11 declare what they can afford, in no order."""
    return declared(tmp_path / "devices.csv", "rank")


@pytest.mark.parametrize(
    "method",
    [
        "fedhm",
        [PRODUCTS],
        [PARTITIONED],
        "fedhm+int8",
        [PARTITIONED, "int8"],
        "personal+fedhm+topk",
        ["personal", {"fedhm": {"weighting": "samples", "ratios": [0.5, 0.25]}}, {"randk": {"ratio": 0.5}}, "fedavgm"],
        [{"fedhm": {"weighting": "samples"}}, "fedsim", "topk", "int8", "stein"],
    ],
    ids=str,
)  # fmt: skip
def test_both_engines_agree_in_every_bit(method, capacity):
    for fleet, chunk, threads in (({}, 64, 1), ({"capacity": capacity, "dropout": 0.2}, 2, 2)):
        how = {"fleet": fleet, "evaluate": {"every": 3}}
        plain = play(method, engine="debug", plan={"path": "loop"}, **how)
        fast = play(method, plan={"path": "loop", "chunk": chunk, "threads": threads}, **how)
        assert fast.model_sha256 == plain.model_sha256
        assert (fast.up_bytes, fast.down_bytes) == (plain.up_bytes, plain.down_bytes)
        assert fast.personal_accuracy == plain.personal_accuracy


@pytest.mark.accel
@pytest.mark.parametrize("model", ["cnn", {"mlp": {"hidden": [40, 30]}}], ids=str)
def test_stacked_clients_agree_within_rounding(model):
    task = {**TASK, "model": model}
    plain, fast = (play("fedhm", task=task, plan={"path": path}) for path in ("loop", "stacked"))
    assert (fast.up_bytes, fast.down_bytes) == (plain.up_bytes, plain.down_bytes)
    for name, x in plain.model.items():
        assert torch.allclose(fast.model[name], x, rtol=1e-3, atol=1e-4), name


def test_a_decomposition_that_is_not_waited_for_changes_nothing(monkeypatch):
    how = {"plan": {"path": "loop"}, "evaluate": {"who": ["global", "before", "after"]}}
    monkeypatch.setattr(begins_anew, "body", lambda m, rank: True)
    one = play("fedhm", **how)
    monkeypatch.setattr("sparing.accel.fedhm_bodies._handed", lambda m: True)
    other = play("fedhm", **how)
    for name, x in one.model.items():
        assert torch.allclose(other.model[name], x, rtol=1e-3, atol=1e-5), name
    for name in ("approximation_error", "factor_norm/dense", "fallbacks"):
        assert other.metric(name) == pytest.approx(one.metric(name), rel=1e-5)


@pytest.mark.gpu
def test_gpu_agrees_with_the_cpu():
    with torch.backends.cudnn.flags(allow_tf32=False):
        cpu = play("fedhm", rounds=1, plan={"path": "loop"})
        gpu = play("fedhm", rounds=1, device="cuda", plan={"path": "stacked"})
    assert (gpu.up_bytes, gpu.down_bytes) == (cpu.up_bytes, cpu.down_bytes)
    assert max(float((gpu.model[name].cpu() - x).abs().max()) for name, x in cpu.model.items()) < 2e-3


def test_bits_do_not_depend_on_torch_threads():
    before, seen = torch.get_num_threads(), set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            seen.add(play("fedhm", plan={"path": "loop", "threads": threads}).model_sha256)
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 1


def equal_shares():
    """12 clients with 16 samples each: a power of two, so that their shares are the same numbers as uniform ones."""
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(16, 1, 8, 8, generator=g), torch.randint(0, 10, (16,), generator=g)) for _ in range(12)]
    return sparing.Task(lambda: cnn(1, 10, 8), train=data)


@pytest.mark.parametrize("blend", ["products", "increments", "partitioned"])
def test_all_of_ratio_one_and_equal_weights_is_fedavg(blend):
    want = play("fedavg", task=equal_shares())
    for options in ({"weighting": "uniform"}, {"weighting": "samples"}, {}):
        got = play([{"fedhm": {"ratios": [1], "blend": blend, **options}}], task=equal_shares())
        assert got.model_sha256 == want.model_sha256
        assert (got.up_bytes, got.down_bytes) == (want.up_bytes, want.down_bytes)


def test_where_only_clients_of_ratio_one_come_all_blends_are_one(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text("client,rank\n" + "".join(f"{i},1\n" for i in range(12)))
    first, *others = (
        play([{"fedhm": {"blend": blend}}], fleet={"capacity": str(path)})
        for blend in ("products", "increments", "partitioned")
    )
    for other in others:
        assert all(torch.allclose(other.model[name], x, atol=2e-5) for name, x in first.model.items())


def test_all_blends_send_the_same_bytes():
    runs = [play([{"fedhm": {"blend": blend}}]) for blend in ("products", "increments", "partitioned")]
    assert len({(run.up_bytes, run.down_bytes) for run in runs}) == 1
    assert len({run.model_sha256 for run in runs}) == 3
    assert ["history" in run.table[-1].metrics for run in runs] == [True, False, False]


def untrained(blend, ratio):
    """How much of the model's rank is left after three rounds of clients who learn nothing."""
    task, local = equal_shares(), {"steps": 1, "batch": 8, "lr": 1e-9}
    run = play([{"fedhm": {"blend": blend, "ratios": [1, ratio], "decay": 0.0}}], task=task, local=local, sample=12)
    first = play("fedavg", task=task, local=local).model
    return float((run.model["dense.weight"] - first["dense.weight"]).norm() / first["dense.weight"].norm())


def test_what_truncation_cut_away_does_not_vote_for_zero():
    assert untrained("products", 0.25) > 0.3, "half of the cohort counts it as zero, three times"
    assert untrained("increments", 0.25) < 1e-5
    assert untrained("partitioned", 0.25) < 1e-5


def test_capacity_decides_what_travels(capacity):
    by_id = play("fedhm", rounds=1, sample=12)
    declared = play("fedhm", rounds=1, sample=12, fleet={"capacity": capacity})
    assert declared.down_bytes != by_id.down_bytes
    everyone = play([{"fedhm": {"ratios": [0.125]}}], rounds=1, sample=12)
    assert everyone.down_bytes < min(declared.down_bytes, by_id.down_bytes)


def test_check_foretells_the_bytes_of_clients_of_all_sizes(capacity):
    study = study_from({"task": TASK, "method": "fedhm", "fleet": {"capacity": capacity}, **QUICK, "sample": 1.0})
    cost, result = run_cost_trial(study), start_run(study)
    assert cost.down_bytes * 3 == result.down_bytes
    assert cost.up_bytes * 3 == result.up_bytes


def test_resuming_goes_on_in_every_bit(tmp_path):
    method = [{"fedhm": {"ratios": [0.25, 0.1], "full": 0}}, "int8"]
    task = {**TASK, "model": {"mlp": {"hidden": [100, 100]}}}
    whole = play(method, task=task, rounds=4)

    class Stop(Exception):
        pass

    def stop(record):
        if record.round == 2:
            raise Stop

    with pytest.raises(Stop):
        play(method, task=task, rounds=4, out=tmp_path / "run", loggers=[stop])
    again = sparing.resume(tmp_path / "run")
    assert again.model_sha256 == whole.model_sha256
    assert again.table[-1].metrics == whole.table[-1].metrics


def test_every_round_reports_the_approximation():
    result = play("fedhm", evaluate={"who": ["global", "before", "after"]})
    for layer in ("conv2", "dense"):
        assert all(0 < x < 1 for x in result.metric(f"approximation/{layer}"))
        assert all(x > 0 for x in result.metric(f"factor_norm/{layer}"))
    assert len(result.metric("approximation_error")) == 3
    assert result.metric("fallbacks")[-1] == 0


def test_the_history_rule_keeps_the_old_model_when_only_small_clients_come(tmp_path):
    path = tmp_path / "devices.csv"
    path.write_text("client,rank\n" + "".join(f"{i},0.25\n" for i in range(12)))
    result = play([PRODUCTS], fleet={"capacity": str(path)})
    assert all(0 < x < 1 for x in result.metric("history"))


@pytest.mark.parametrize("buffers", ["shared", "static"])
def test_networks_with_batch_norm(buffers):
    def net():
        norms = [torch.nn.BatchNorm2d(16) for _ in range(2)]
        convs = [torch.nn.Conv2d(c, 16, 3) for c in (1, 16)]
        return torch.nn.Sequential(convs[0], norms[0], convs[1], norms[1], torch.nn.Flatten(), torch.nn.Linear(256, 4))

    data = [(torch.rand(8, 1, 8, 8), torch.arange(8) % 4)] * 3
    task = sparing.Task(net, train=data, test=data)
    local = {"steps": 1, "batch": 8, "lr": 0.01, "buffers": buffers}
    result = sparing.run(task, "fedhm", rounds=2, sample=1.0, local=local)
    assert result.metric("approximation/2")[-1] > 0


def test_frobenius_decay_reaches_training_and_is_the_gradient():
    local = Local((Phase(epochs=2), Phase(epochs=1, optimiser=Optimiser(weight_decay=0.1))))
    method = compose(LAYOUT, fedhm(), local=local)
    assert [phase.frobenius for phase in method.local.phases] == [1e-4, 1e-4]
    assert [phase.epochs for phase in method.local.phases] == [2, 1]


def test_no_gradient_adds_up_to_a_longer_step_where_factors_are_trained():
    plain = Phase(optimiser=Optimiser(lr=0.05))
    own = Local(
        (
            plain,
            plain._replace(optimiser=plain.optimiser._replace(momentum=0.9)),
            plain._replace(optimiser=plain.optimiser._replace(clip=1.0)),
            plain._replace(optimiser=plain.optimiser._replace(name="adam")),
        )
    )
    assert [phase.optimiser.clip for phase in compose(LAYOUT, fedhm(step=2.0), local=own).local.phases] == [
        pytest.approx(40),
        pytest.approx(4),
        1,
        None,
    ]
    assert compose(LAYOUT, fedhm(step=None)).local.phases[0].optimiser.clip is None
    assert compose(LAYOUT, fedhm(ratios=[1])).local.phases[0].optimiser.clip is None, "nobody trains factors"


def test_frobenius_decay_is_the_gradient():
    g = torch.Generator().manual_seed(0)
    for k in ((), (3,)):
        for form in (((5, 2, 3, 1), (2, 4, 1, 2)), ((5, 2), (2, 4))):
            a, b = (torch.randn(*k, *shape, generator=g, dtype=torch.float64).requires_grad_() for shape in form)
            if len(form[0]) == 4:
                whole = torch.einsum("...mrh,...rnw->...mnhw", a[..., 0], b.squeeze(-2))
            else:
                whole = a @ b
            want = torch.autograd.grad(0.3 / 2 * whole.square().sum(), [a, b])
            zeros = [torch.zeros_like(a), torch.zeros_like(b)]
            got = frobenius(zeros, [a.detach(), b.detach()], [(0, 1)], 0.3)
            slow = along_factors(factor_pace(a, b), a)
            assert all(torch.allclose(x, y * z, atol=1e-12) for x, y, z in zip(got, want, slow, strict=True))


def test_decay_changes_the_factors_only():
    runs = [play([{"fedhm": {"decay": decay, "ratios": [0.5]}}], rounds=1, sample=1) for decay in (0.0, 0.1)]
    far = {name: float((runs[0].model[name] - x).abs().max()) for name, x in runs[1].model.items()}
    assert far["dense.weight"] > 1e-3
    whole = [play([{"fedhm": {"decay": decay, "ratios": [1]}}], rounds=1, sample=1) for decay in (0.0, 0.1)]
    assert whole[0].model_sha256 == whole[1].model_sha256, "nothing is factored here"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("fedhm+topk+memory", r"copy or a memory of 'conv2.a'.*another basis.*a personal layer too, or keep it whole"),
        ("psfed+fedhm", r"copy or a memory of 'conv2.a'.*partial sharing"),
        ("fedhm+local", "copy or a memory of 'conv2.a'"),
        ([{"personal": {"layers": ["dense"]}}, "fedhm"], "copy or a memory of 'dense.a'.*a personal layer"),
        ("fedscr+fedhm", "copy or a memory of 'conv2.a'"),
        (
            ["fedhm", {"pfedsim": {"mode": "published"}}],
            "warms up with FedAvg, but 'rank .ratio.' weighs otherwise",
        ),
        ("fedsim+fedhm", "both say how much a client counts.*fedhm.weighting to samples"),
        ("fedhm+fedsim", "both say how much a client counts"),
        ("fedhm+fedhm", "names 'fedhm' twice"),
        ("heterofl+fedhm", "another part resizes already"),
        ([{"fedhm": {"ratios": [2]}}], "fedhm.ratios is 2"),
        ([{"fedhm": {"decay": -1}}], "fedhm.decay is -1"),
        ([{"fedhm": {"blend": "mean"}}], "fedhm.blend is 'mean'"),
        ([PARTITIONED, "stein"], "'partitioned'.*'stein' looks at whole updates.*set fedhm.blend to increments"),
        ([PARTITIONED, "median"], "'partitioned'.*'a robust blend' looks at whole updates"),
        ([{"fedhm": {"blend": "partitioned", "weighting": "samples"}}, "fedsim"], "'fedsim' looks at whole updates"),
        ([{"fedhm": {"weighting": "size"}}], "fedhm.weighting is 'size'"),
        ([{"fedhm": {"temperature": 0}}], "fedhm.temperature is 0"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(spec, words):
    with pytest.raises((MethodError, ConfigError), match=words):
        compose(LAYOUT, *recipes_from_entries(method_list(spec)))


def test_kept_momentum_is_refused_over_factors():
    with pytest.raises(MethodError, match=r"copy or a memory of 'conv2.a'"):
        compose(LAYOUT, fedhm(), local=Local((Phase(optimiser=Optimiser(momentum=0.9)),), init=velocities))


def test_a_layer_kept_whole_may_be_remembered():
    compose(LAYOUT, *recipes_from_entries([{"personal": {"layers": ["dense"]}}, {"fedhm": {"keep": ["dense"]}}]))


def test_a_forward_that_looks_into_its_layers_is_refused_before_the_first_round():
    class Nosy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            return self.c(self.b(self.a(x))) * self.b.in_features

    data = [(torch.rand(8, 4), torch.arange(8) % 4)] * 3
    with pytest.raises(ConfigError, match=r"does not run once resized.*in_features.*keep that layer whole"):
        sparing.run(sparing.Task(Nosy, train=data), "fedhm", rounds=1)
    kept = sparing.run(sparing.Task(Nosy, train=data), [{"fedhm": {"full": 0, "keep": ["b"]}}], rounds=1)
    assert kept.rounds == 1
