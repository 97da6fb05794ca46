"""HeteroFL as people run it: engines, combinations, capacities, resuming, and what it refuses."""

import pytest
import torch
from torch import nn

import sparing
from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError
from sparing.core.method import Local, Phase, Trained
from sparing.core.optimiser import Optimiser
from sparing.core.round import client, first_client, first_server, outgoing
from sparing.core.tree import layout_of, tree_of
from sparing.models import build_network
from sparing.models.resnet import BasicBlock, resnet
from sparing.models.small import cnn
from sparing.recipes.heterofl import heterofl
from sparing.runs.cost import run_cost_trial
from sparing.runs.explanation import explain_method
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.start import start_run
from sparing.runs.study import method_list, study_from
from sparing.train.optim import velocities
from support import accelerated, declared, make_ctx

LAYOUT = layout_of(cnn(1, 10, 8))
QUICK = {"rounds": 2, "sample": 6, "seed": 5, "local": {"steps": 3, "batch": 16, "lr": 0.05, "momentum": 0.5}}
TASK = {"data": "digits", "clients": 12, "split": {"dirichlet": 0.3}, "model": "cnn"}


def play(method, **options):
    return sparing.run(options.pop("task", TASK), method, **{**QUICK, **options})


@pytest.fixture
def capacity(tmp_path):
    """Clients 0 to 11 declare how wide a network they can afford, in no order."""
    return declared(tmp_path / "devices.csv", "width")


@pytest.mark.parametrize(
    "method",
    [
        "heterofl",
        "heterofl+int8",
        "personal+heterofl+topk",
        [{"heterofl": {"ratios": [0.3, 1], "scaler": False}}, {"personal": {"layers": ["conv1", "head"]}}, "fedavgm"],
        ["heterofl", "fedsim", {"randk": {"ratio": 0.5}}, "fedadam"],
        "heterofl+median",
        "heterofl+local",
        "ditto+heterofl",
    ],
    ids=str,
)
def test_both_engines_agree_in_every_bit(method, capacity):
    fleet = {"capacity": capacity, "dropout": 0.2} if method != "heterofl" else {}
    plain = play(method, engine="debug", plan={"path": "loop"}, fleet=fleet)
    fast = play(method, plan={"path": "loop", "chunk": 2, "threads": 2}, fleet=fleet)
    assert fast.model_sha256 == plain.model_sha256
    assert (fast.up_bytes, fast.down_bytes) == (plain.up_bytes, plain.down_bytes)
    assert [r.personal_accuracy for r in fast.table] == [r.personal_accuracy for r in plain.table]


@pytest.mark.accel
@pytest.mark.parametrize("model", ["cnn", {"mlp": {"hidden": [40, 30]}}], ids=str)
def test_stacked_clients_agree_within_rounding(model):
    task = {**TASK, "model": model}
    plain, fast = (play("heterofl", task=task, plan={"path": path}) for path in ("loop", "stacked"))
    assert (fast.up_bytes, fast.down_bytes) == (plain.up_bytes, plain.down_bytes)
    for name, x in plain.model.items():
        assert torch.allclose(fast.model[name], x, rtol=1e-3, atol=1e-4), name


@pytest.mark.gpu
def test_gpu_agrees_with_the_cpu():
    with torch.backends.cudnn.flags(allow_tf32=False):
        cpu = play("heterofl", rounds=1, plan={"path": "loop"})
        gpu = play("heterofl", rounds=1, device="cuda", plan={"path": "stacked"})
    assert (gpu.up_bytes, gpu.down_bytes) == (cpu.up_bytes, cpu.down_bytes)
    assert max(float((gpu.model[name].cpu() - x).abs().max()) for name, x in cpu.model.items()) < 2e-3


@pytest.mark.parametrize("rest", ["", "+topk+int8", "+personal"])
def test_all_of_ratio_one_is_fedavg(rest):
    want = play("fedavg" + rest)
    got = play([{"heterofl": {"ratios": [1]}}, *(word for word in rest.split("+") if word)])
    assert got.model_sha256 == want.model_sha256
    assert (got.up_bytes, got.down_bytes) == (want.up_bytes, want.down_bytes)
    assert got.table[-1].personal_accuracy == want.table[-1].personal_accuracy


def test_what_nobody_holds_does_not_move():
    first = play([{"heterofl": {"ratios": [0.5]}}], rounds=1, sample=1, local={"epochs": 1, "lr": 1e-9})
    after = play([{"heterofl": {"ratios": [0.5]}}])
    assert torch.equal(after.model["conv2.weight"][16:], first.model["conv2.weight"][16:])
    assert torch.equal(after.model["conv2.weight"][:, 8:], first.model["conv2.weight"][:, 8:])
    assert torch.equal(after.model["dense.weight"][:, 64:], first.model["dense.weight"][:, 64:])
    assert torch.equal(after.model["head.weight"][:, 32:], first.model["head.weight"][:, 32:])
    assert not torch.isclose(after.model["conv2.weight"][:16, :8], first.model["conv2.weight"][:16, :8]).all()
    assert after.table[-1].coverage == 3658 / 13706


def test_capacity_decides_what_travels(capacity):
    by_id = play("heterofl", rounds=1, sample=12)
    declared = play("heterofl", rounds=1, sample=12, fleet={"capacity": capacity})
    assert declared.down_bytes != by_id.down_bytes
    everyone = play([{"heterofl": {"ratios": [0.0625]}}], rounds=1, sample=12)
    assert everyone.down_bytes < min(declared.down_bytes, by_id.down_bytes)


def test_check_foretells_the_bytes_of_clients_of_all_sizes(capacity):
    study = study_from({"task": TASK, "method": "heterofl", "fleet": {"capacity": capacity}, **QUICK, "sample": 1.0})
    cost, result = run_cost_trial(study), start_run(study)
    assert (cost.down_bytes * 2, cost.up_bytes * 2) == (result.down_bytes, result.up_bytes)


def test_explain_shows_every_width():
    shown = explain_method("personal+heterofl", "cnn", (1, 8, 8), 10).sizes
    assert [size.name for size in shown] == [f"width {r}" for r in ("1", "0.5", "0.25", "0.125", "0.0625")]
    assert [size.parameters for size in shown] == [13706, 3658, 1034, 322, 116]
    assert [size.down.parameters for size in shown] == [13056, 3328, 864, 232, 66]


@pytest.mark.parametrize("bank", ["memory", "file"])
def test_resuming_goes_on_in_every_bit(tmp_path, bank):
    method = ["personal", {"heterofl": {"ratios": [1, 0.25, 0.1]}}, "int8"]
    whole = play(method, rounds=4)

    class Stop(Exception):
        pass

    def stop(record):
        if record.round == 2:
            raise Stop

    with pytest.raises(Stop):
        play(method, rounds=4, out=tmp_path / "run", loggers=[stop], plan={"bank": bank})
    again = sparing.resume(tmp_path / "run")
    assert again.model_sha256 == whole.model_sha256
    assert again.table[-1].personal_accuracy == whole.table[-1].personal_accuracy


def test_a_client_keeps_its_own_tensors_in_full_shape_and_changes_its_part_only():
    method = compose(LAYOUT, *recipes_from_entries(["personal", {"heterofl": {"ratios": [1, 0.5]}}]))
    server = first_server(method, tree_of(cnn(1, 10, 8)), 4)
    state = first_client(method, server.model) | {"own/head.weight": torch.rand(1, 10, 64)}
    ctx = make_ctx([1])

    def train(lesson, ctx):
        assert torch.equal(lesson.start["head.weight"], state["own/head.weight"][:, :, :32])
        return Trained({name: x + 1 for name, x in lesson.start.items()}, lesson.memory, {"loss": torch.ones(1)})

    _, after = client(method, state, outgoing(method, server, ctx), train, ctx)
    assert torch.equal(after["own/head.weight"][:, :, :32], state["own/head.weight"][:, :, :32] + 1)
    assert torch.equal(after["own/head.weight"][:, :, 32:], state["own/head.weight"][:, :, 32:])
    assert torch.equal(after["own/head.bias"], state["own/head.bias"] + 1)


def test_personal_heads_are_remembered_from_round_to_round():
    result = play("personal+heterofl", rounds=3, sample=12, local={"epochs": 2, "batch": 16, "lr": 0.05})
    own = [record.personal_accuracy for record in result.table]
    assert own[-1] > own[0] > result.accuracy


@pytest.mark.parametrize("buffers", ["shared", "own", "static"])
@pytest.mark.parametrize("path", ["loop", *accelerated("stacked")])
def test_networks_with_batch_norm(buffers, path):
    def net():
        norms = [nn.BatchNorm2d(c) for c in (8, 6)]
        convs = [nn.Conv2d(1, 8, 3), nn.Conv2d(8, 6, 3)]
        return nn.Sequential(convs[0], norms[0], nn.ReLU(), convs[1], norms[1], nn.Flatten(), nn.Linear(96, 4))

    g = torch.Generator().manual_seed(0)
    data = [(torch.rand(8, 1, 8, 8, generator=g), torch.arange(8) % 4) for _ in range(3)]
    task = sparing.Task(net, train=data, test=data)
    local = {"steps": 1, "batch": 8, "lr": 0.01, "buffers": buffers}
    result = sparing.run(
        task, [{"heterofl": {"ratios": [1, 0.5, 0.3]}}], rounds=2, sample=1.0, local=local, plan={"path": path}
    )
    moved = result.model["1.running_mean"] if buffers == "shared" else result.model["0.bias"]
    assert bool((moved != 0).all())


def test_a_residual_network_with_group_norm_runs():
    g = torch.Generator().manual_seed(0)
    data = [(torch.rand(6, 3, 8, 8, generator=g), torch.arange(6) % 4) for _ in range(5)]
    task = sparing.Task(lambda: resnet(BasicBlock, (1, 1), channels=3, classes=4, width=16), train=data, test=data)
    result = sparing.run(task, "heterofl+int8", rounds=1, sample=1.0, local={"steps": 1, "batch": 6, "lr": 0.01})
    assert result.table[-1].coverage == 1


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("heterofl+topk+memory", r"copy or a memory of 'conv1.bias'.*another size.*memory"),
        ("psfed+heterofl", r"copy or a memory of 'conv1.bias'.*partial sharing"),
        ("fedscr+heterofl", "copy or a memory of 'conv1.bias'"),
        ("heterofl+fedhm", "another part resizes already"),
        ("fedhm+heterofl", "another part resizes already"),
        (["heterofl", {"pfedsim": {"mode": "published"}}], "a model of its own, which cannot be resized"),
        ([{"heterofl": {"ratios": [2]}}], "heterofl.ratios is 2"),
        ([{"heterofl": {"ratios": []}}], "heterofl.ratios is .*offer at least one"),
        ([{"heterofl": {"ratios": [0.5, 0.5]}}], "each once"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(spec, words):
    with pytest.raises((MethodError, ConfigError), match=words):
        compose(LAYOUT, *recipes_from_entries(method_list(spec)))


def test_kept_momentum_is_refused():
    with pytest.raises(MethodError, match=r"copy or a memory of 'conv1.bias'.*kept momentum"):
        compose(LAYOUT, heterofl(), local=Local((Phase(optimiser=Optimiser(momentum=0.9)),), init=velocities))


def test_networks_of_other_kinds_are_refused():
    for name in ("lstm", "transformer"):
        with pytest.raises(MethodError, match=r"cannot narrow 'embedding': .*neither of a conv.*chains and residual"):
            compose(layout_of(build_network(name, (20,), 30)), heterofl())


class Joined(nn.Module):
    """Two branches end to end: their first units are not the first of both together."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.head = nn.Linear(4, 8), nn.Linear(8, 16), nn.Linear(16, 24), nn.Linear(24, 3)

    def forward(self, x):
        x = self.a(x)
        return self.head(torch.cat([x, self.b(x)], dim=1) + 0 * self.c(self.b(x)))


class Shuffled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.a(x).flip(1))


class Later(nn.Module):
    """Defined in another order than that in which it runs."""

    def __init__(self):
        super().__init__()
        self.head, self.a, self.b = nn.Linear(8, 3), nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.b(self.a(x)))


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (Joined, "its first units do something else"),
        (Shuffled, "its first units do something else"),
        (Later, "cannot narrow 'a': no layer before it has the outputs that its 4 inputs"),
    ],
)
def test_units_out_of_order_are_refused_before_the_first_round(net, words):
    data = [(torch.rand(8, 4), torch.arange(8) % 3)] * 3
    with pytest.raises(MethodError, match=words):
        sparing.run(sparing.Task(net, train=data), "heterofl", rounds=1)
    assert sparing.run(sparing.Task(net, train=data), [{"heterofl": {"ratios": [1]}}], rounds=1).rounds == 1
