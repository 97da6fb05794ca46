"""Split-Mix as people run it: engines, limit cases, bytes, combinations, resuming, and what it refuses."""

import pytest
import torch
from torch import nn

import sparing
from sparing.core.compose import compose, remake_model
from sparing.core.errors import ConfigError, DataError, MethodError
from sparing.core.method import Local, Phase, Trained
from sparing.core.optimiser import Optimiser
from sparing.core.round import begin, client, first_client, first_server, incoming, outgoing, settle
from sparing.core.tree import layout_of, tree_of
from sparing.models import build_network
from sparing.models.small import cnn
from sparing.parts.size.mixture import Mix
from sparing.parts.size.split_mix import held_bases, split_by_width
from sparing.recipes.split_mix import split_mix
from sparing.runs.cost import run_cost_trial
from sparing.runs.explanation import explain_method
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.start import start_run
from sparing.runs.study import method_list, study_from
from sparing.train.optim import velocities
from sparing.wire import nbytes
from support import accelerated, make_ctx

QUICK = {"rounds": 2, "sample": 5, "seed": 5, "local": {"steps": 3, "batch": 16, "lr": 0.05, "momentum": 0.5}}
TASK = {"data": "digits", "clients": 12, "split": {"dirichlet": 0.3}, "model": "cnn"}
QUARTERS = {"split-mix": {"ratio": 0.25}}


def play(method, **options):
    return sparing.run(options.pop("task", TASK), method, **{**QUICK, **options})


def declared(folder, widths):
    path = folder / "devices.csv"
    path.write_text("client,width\n" + "".join(f"{i},{r}\n" for i, r in enumerate(widths)))
    return {"capacity": str(path)}


@pytest.fixture
def fleet(tmp_path):
    return declared(tmp_path, [1, 0.13, 0.3, 0.5, 0.01, 1, 0.25, 0.6, 0.125, 0.9, 0.5, 0.2])


def composed(spec, net=None):
    made = recipes_from_entries(method_list(spec))
    net = remake_model(net or cnn(1, 10, 8), made)
    return compose(layout_of(net), *made), tree_of(net)


@pytest.mark.parametrize(
    "method",
    [
        "split-mix",
        "split-mix+topk+int8",
        ["personal", QUARTERS, "randk"],
        [QUARTERS, {"personal": {"layers": ["conv1", "head"]}}, "fedavgm"],
        [QUARTERS, "fedsim", "fedadam"],
        [QUARTERS, "median"],
        ["ditto", QUARTERS],
        ["fedrep", QUARTERS, "int8"],
    ],
    ids=str,
)
def test_both_engines_agree_in_every_bit(method, fleet):
    fleet = {**fleet, "dropout": 0.2} if method != "split-mix" else {}
    plain = play(method, engine="debug", plan={"path": "loop"}, fleet=fleet)
    fast = play(method, plan={"path": "loop", "chunk": 2, "threads": 2}, fleet=fleet)
    assert fast.model_sha256 == plain.model_sha256
    assert (fast.up_bytes, fast.down_bytes) == (plain.up_bytes, plain.down_bytes)
    assert [r.personal_accuracy for r in fast.table] == [r.personal_accuracy for r in plain.table]
    assert [r.train_loss for r in fast.table] == [r.train_loss for r in plain.table]


@pytest.mark.accel
@pytest.mark.parametrize("model", ["cnn", {"mlp": {"hidden": [40, 30]}}], ids=str)
def test_stacked_clients_agree_within_rounding(model):
    task, local = {**TASK, "model": model}, {**QUICK["local"], "clip": 0.5}
    plain, fast = (play("split-mix", task=task, local=local, plan={"path": path}) for path in ("loop", "stacked"))
    assert (fast.up_bytes, fast.down_bytes) == (plain.up_bytes, plain.down_bytes)
    for name, x in plain.model.items():
        assert torch.allclose(fast.model[name], x, rtol=1e-3, atol=1e-4), name
    assert fast.personal_accuracy == pytest.approx(plain.personal_accuracy, abs=0.02)


@pytest.mark.gpu
def test_gpu_agrees_with_the_cpu():
    with torch.backends.cudnn.flags(allow_tf32=False):
        cpu = play("split-mix", rounds=1, plan={"path": "loop"})
        gpu = play("split-mix", rounds=1, device="cuda", plan={"path": "stacked"})
    assert (gpu.up_bytes, gpu.down_bytes) == (cpu.up_bytes, cpu.down_bytes)
    assert max(float((gpu.model[name].cpu() - x).abs().max()) for name, x in cpu.model.items()) < 2e-3


@pytest.mark.parametrize("rest", ["", "+topk+int8+memory", "+personal", "+heterofl"])
def test_ratio_one_is_fedavg(rest):
    want = play("fedavg" + rest)
    got = play([{"split-mix": {"ratio": 1}}, *(word for word in rest.split("+") if word)])
    assert got.model_sha256 == want.model_sha256
    assert (got.up_bytes, got.down_bytes) == (want.up_bytes, want.down_bytes)
    assert got.table[-1].personal_accuracy == want.table[-1].personal_accuracy


def normed(dropout=0.2):
    layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6), nn.Flatten()]
    return nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(96, 4))


def drawn(clients=4, side=8):
    g = torch.Generator().manual_seed(0)
    return [(torch.rand(7 + 3 * k, 1, side, side, generator=g), torch.arange(7 + 3 * k) % 4) for k in range(clients)]


@pytest.mark.parametrize("clip", [None, 0.05])
def test_if_everybody_affords_all_every_base_is_fedavg_of_that_base_alone(clip, tmp_path):
    data, local = drawn(), {"epochs": 1, "batch": 5, "lr": 0.1, "momentum": 0.9, "clip": clip}
    study = {"rounds": 3, "sample": 1.0, "seed": 4, "local": local, "plan": {"path": "loop"}}
    all_of_it = declared(tmp_path, [1, 1, 1, 1])
    task = sparing.Task(lambda: normed(0.0), train=data, test=data)
    mixed = sparing.run(task, [QUARTERS], fleet=all_of_it, **study)
    mix = split_by_width(normed(0.0), 4, seed=4)
    assert isinstance(mix, Mix)
    for i in range(4):
        alone = sparing.run(sparing.Task(mix.base(i), train=data, test=data), "fedavg", **study)
        for name, x in alone.model.items():
            assert torch.equal(mixed.model[f"net.{name}"][i], x), (i, name)
    assert mixed.table[-1].coverage == 1


def test_the_result_is_a_network_that_runs():
    g = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    x = torch.rand(60, 4, generator=g) + y[:, None]

    def dense():
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))

    task = sparing.Task(dense, train=[(x[i::5], y[i::5]) for i in range(5)], test=(x, y))
    result = sparing.run(task, [QUARTERS], rounds=6, sample=1.0, local={"epochs": 5, "lr": 0.1})
    mix = split_by_width(dense(), 4, seed=99)
    mix.load_state_dict(result.model)
    assert 0.6 < result.accuracy == pytest.approx(float((mix(x).argmax(1) == y).float().mean()))


def trained(lesson, ctx):
    after = {name: x + 1 if x.is_floating_point() else x for name, x in lesson.start.items()}
    return Trained(after, lesson.memory, {"loss": torch.ones(len(ctx.ids))})


def test_a_client_gets_and_sends_its_bases_only_and_what_nobody_trained_stays():
    method, initial = composed("split-mix")
    server, ctx = first_server(method, initial, 20), make_ctx([6, 14])  # 2 of 8 bases each
    mine = held_bases(ctx, 8, 2)
    down = outgoing(method, server, ctx)
    up, _ = client(method, first_client(method, initial), down, trained, ctx)
    for name, x in initial.items():
        assert torch.equal(down.leaves[name].value, torch.stack([x[0, mine[0]], x[0, mine[1]]]))
        assert up.leaves[name].value.shape[:2] == (2, 2)
    values = 4 * sum(x.numel() for x in initial.values()) // 4  # of two bases out of eight, four bytes each
    assert all(values < size < values + 100 for size in (*nbytes(down).tolist(), *nbytes(up).tolist()))
    fold = begin(method, server, ctx)
    incoming(method, server, fold, down, up, ctx)
    after, report = settle(method, server, fold, ctx)
    moved = mine.any(0)
    assert report["coverage"] == int(moved.sum()) / 8
    for name, x in initial.items():
        assert torch.equal(after.model[name][0][~moved], x[0][~moved])
        assert torch.allclose(after.model[name][0][moved], x[0][moved] + 1)


def test_a_base_is_the_mean_by_samples_over_those_that_trained_it():
    method, initial = composed([{"split-mix": {"ratio": 0.5}}])
    server = first_server(method, initial, 20)
    ids, samples = [1, 3, 5, 7], [10, 20, 40, 80]  # one of two bases each
    ctx = make_ctx(ids, samples)
    mine = held_bases(ctx, 2, 1)
    assert bool(mine.any(0).all())

    def by_id(lesson, ctx):
        add = ctx.ids.float()
        after = {name: x + add.reshape(-1, *[1] * (x.dim() - 1)) for name, x in lesson.start.items()}
        return Trained(after, lesson.memory, {"loss": torch.ones(len(ids))})

    fold, down = begin(method, server, ctx), outgoing(method, server, ctx)
    up, _ = client(method, {}, down, by_id, ctx)
    incoming(method, server, fold, down, up, ctx)
    after, _ = settle(method, server, fold, ctx)
    for base in range(2):
        n = torch.tensor(samples) * mine[:, base]
        want = float((n * torch.tensor(ids)).sum() / n.sum())
        gap = after.model["net.conv1.bias"][0, base] - initial["net.conv1.bias"][0, base]
        assert torch.allclose(gap, torch.tensor(want), atol=1e-5)


def test_check_foretells_the_bytes(fleet):
    study = study_from({"task": TASK, "method": "split-mix", "fleet": fleet, **QUICK, "sample": 1.0})
    cost, result = run_cost_trial(study), start_run(study)
    assert (cost.down_bytes * 2, cost.up_bytes * 2) == (result.down_bytes, result.up_bytes)


def test_explain_shows_every_number_of_bases():
    shown = explain_method([QUARTERS, "personal"], "lenet5", (1, 28, 28), 10)
    one = layout_of(split_by_width(build_network("lenet5", (1, 28, 28), 10), 4)).size // 4
    assert shown.parameters == 4 * one
    assert [size.name for size in shown.sizes] == [f"{m} of 4 bases" for m in (4, 3, 2, 1)]
    assert [size.parameters for size in shown.sizes] == [m * one for m in (4, 3, 2, 1)]
    assert [size.multiply_adds for size in shown.sizes] == [m * shown.sizes[3].multiply_adds for m in (4, 3, 2, 1)]
    head = 10 * 21 + 10
    assert [size.down.parameters for size in shown.sizes] == [m * (one - head) for m in (4, 3, 2, 1)]
    assert len(shown.private) == 1


@pytest.mark.parametrize("bank", ["memory", "file"])
def test_resuming_goes_on_in_every_bit(tmp_path, bank):
    method = ["personal", QUARTERS, "int8"]
    whole = play(method, rounds=3)

    class Stop(Exception):
        pass

    def stop(record):
        if record.round == 1:
            raise Stop

    with pytest.raises(Stop):
        play(method, rounds=3, out=tmp_path / "run", loggers=[stop], plan={"bank": bank})
    again = sparing.resume(tmp_path / "run")
    assert again.model_sha256 == whole.model_sha256
    assert again.table[-1].personal_accuracy == whole.table[-1].personal_accuracy


def test_a_client_keeps_a_head_for_every_base_and_changes_those_it_trained():
    method, initial = composed(["personal", QUARTERS])
    server, ctx = first_server(method, initial, 9), make_ctx([2])  # 2 of 4 bases
    state = first_client(method, initial) | {"own/net.head.weight": torch.rand(1, 4, 10, 16)}
    mine = held_bases(ctx._replace(round=0), 4, 2)[0]

    def train(lesson, ctx):
        assert torch.equal(lesson.start["net.head.weight"][0], state["own/net.head.weight"][0, mine])
        return trained(lesson, ctx)

    _, after = client(method, state, outgoing(method, server, ctx), train, ctx)
    was, now = state["own/net.head.weight"][0], after["own/net.head.weight"][0]
    assert torch.equal(now[mine], was[mine] + 1)
    assert torch.equal(now[~mine], was[~mine])


@pytest.mark.parametrize("method", [["personal", QUARTERS], [QUARTERS, "personal"], [QUARTERS, "ditto"]], ids=str)
def test_who_keeps_a_head_has_the_same_bases_in_every_round_and_others_do_not(method):
    for spec, often in ((method, 1), ([QUARTERS], 4)):
        made, initial = composed(spec)
        server, seen = first_server(made, initial, 50), set()
        for t in range(1, 21):
            value = outgoing(made, server, make_ctx([7], t=t)).leaves["net.conv1.weight"].value  # one of four
            seen |= {i for i in range(4) if torch.equal(value[0, 0], initial["net.conv1.weight"][0, i])}
        assert len(seen) == often


@pytest.mark.parametrize("buffers", ["shared", "own", "static"])
@pytest.mark.parametrize("path", ["loop", *accelerated("stacked")])
def test_networks_with_batch_norm(buffers, path):
    data, local = drawn(), {"steps": 1, "batch": 8, "lr": 0.01, "buffers": buffers}
    task = sparing.Task(normed, train=data, test=data)
    result = sparing.run(task, [QUARTERS], rounds=2, sample=1.0, local=local, plan={"path": path})
    moved = result.model["net.1.running_mean"] if buffers == "shared" else result.model["net.0.bias"]
    assert bool((moved != 0).all())
    assert ("net.1.running_mean" in result.model) is (buffers != "static")


def test_a_client_uses_the_bases_drawn_for_its_next_round(tmp_path):
    data = drawn(6)
    task = sparing.Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 4)), train=data, test=data)
    study = {"rounds": 1, "sample": 1.0, "seed": 2, "local": {"steps": 2, "lr": 0.1}, "out": tmp_path / "run"}
    result = sparing.run(task, [QUARTERS], fleet=declared(tmp_path, [0.25] * 6), evaluate={"every": 1}, **study)
    mix = split_by_width(task.build(2), 4, seed=2)
    assert isinstance(mix, Mix)
    mix.load_state_dict(result.model)
    rows = [line.split(",") for line in (tmp_path / "run" / "clients.csv").read_text().splitlines()[1:]]
    said = {int(row[1]): float(row[5]) for row in rows if row[2] == "before"}
    for k, (x, y) in enumerate(data):
        (base,) = held_bases(make_ctx([k], seed=2, t=2), 4, 1)[0].nonzero()[:, 0].tolist()
        loss = float(nn.functional.cross_entropy(mix.base(base)(x), y).detach())
        assert said[k] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("split-mix+topk+memory", r"copy or a memory of 'net.conv1.bias'.*memory"),
        ("psfed+split-mix", r"copy or a memory of 'net.conv1.bias'.*partial sharing"),
        ("scaffold+split-mix", r"copy or a memory of.*other bases.*kept momentum\)$"),
        ("split-mix+heterofl", "heterofl cannot resize a model that another part resizes already"),
        ("heterofl+split-mix", "heterofl cannot resize a model that another part resizes already"),
        ("split-mix+fedhm", "fedhm cannot resize a model that another part resizes already"),
        ("fedhm+split-mix", "fedhm cannot resize a model that another part resizes already"),
        ("split-mix+krum", "krum compares whole updates.*take median"),
        ("krum+split-mix", "krum compares whole updates.*drop split-mix"),
        ("split-mix+lowrank", "lowrank looks for matrices.*a model split into bases"),
        ("split-mix+powersgd", "powersgd looks for matrices.*a model split into bases"),
        ("split-mix+prune", "prune cannot go with models of several sizes"),
        (
            "split-mix+fedscr",
            "fedscr looks for filters.*a model split into bases",
        ),
        (["split-mix", {"pfedsim": {"mode": "published"}}], "a model of its own, which cannot be resized"),
        ([{"split-mix": {"ratio": 0.3}}], "split-mix.ratio is 0.3.*whole number of bases.*use 1/k, such as 0.3333"),
        ([{"split-mix": {"ratio": 0}}], "split-mix.ratio is 0"),
        ([{"split-mix": {"ratios": [1]}}], "no option 'ratios'"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(spec, words):
    with pytest.raises((MethodError, ConfigError), match=words):
        composed(spec)


def test_kept_momentum_is_refused():
    layout = layout_of(split_by_width(cnn(1, 10, 8), 8))
    with pytest.raises(MethodError, match=r"copy or a memory of 'net.conv1.bias'.*kept momentum"):
        compose(layout, split_mix(), local=Local((Phase(optimiser=Optimiser(momentum=0.9)),), init=velocities))


def test_a_layout_that_was_not_split_is_refused():
    with pytest.raises(MethodError, match="a model split into 8 bases, seen one of 0"):
        compose(layout_of(cnn(1, 10, 8)), split_mix())


class Rigid(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.head = nn.Conv2d(1, 8, 3), nn.Linear(8 * 36, 4)

    def forward(self, x):
        return self.head(self.a(x).reshape(len(x), 288))


def test_networks_that_cannot_be_split_are_refused_before_the_first_round():
    with pytest.raises(DataError, match=r"the model split into bases.*does not take the train data"):
        sparing.run(sparing.Task(Rigid, train=drawn()), "split-mix", rounds=1)
    with pytest.raises(MethodError, match="no hidden layer to narrow"):
        sparing.run(sparing.Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), train=drawn()), "split-mix")
