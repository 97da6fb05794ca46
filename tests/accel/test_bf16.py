"""Training in bfloat16 on a CPU: near what float32 gives, the same bits for a client whoever trains beside it."""

from threading import Thread

import pytest
import torch
from torch import nn

import sparing
from sparing.accel.train_cpu import held_steps as held
from sparing.accel.train_cpu import outer_sgd as outer
from sparing.accel.train_cpu.held_steps import Held
from sparing.core.context import context
from sparing.core.errors import ConfigError
from sparing.core.method import Local, Phase
from sparing.core.optimiser import Optimiser
from sparing.core.tree import tree_of
from sparing.data.clients import Clients
from sparing.models import build_network
from sparing.parts.size.fedhm.low_rank import resized_module
from sparing.train.local import train
from sparing.train.losses import cross_entropy

COARSE, CHOOSING = 0.08, 0.2
"""Of an update's length: factors are up to 1/256 away from what they were; more where ReLU and pooling choose anew."""


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(200, 32),
        nn.ReLU(),
        nn.Linear(32, 5),
    )


def thin(model: nn.Module) -> nn.Module:
    model = resized_module(model, {"0.weight": 3})
    for x in model[0].parameters():
        nn.init.normal_(x, std=0.3)
    return model


def normed(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(800, 5))


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(432, 40), nn.ReLU(), nn.Dropout(0.1), nn.Linear(40, 5, bias=False))


MODELS = {
    "a chain": chain,
    "dense layers": dense,
    "BatchNorm": lambda: normed(nn.BatchNorm2d(8)),
    "GroupNorm": lambda: normed(nn.GroupNorm(2, 8)),
    "layers of its own": lambda: build_network("lenet5", (3, 12, 12), 5),
    "a thin convolution": lambda: thin(chain()),
    "rows of rows": lambda: nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Flatten(), nn.Linear(864, 5)),
}


@pytest.fixture(autouse=True)
def all_large(monkeypatch):
    monkeypatch.setattr(outer, "LARGE", 1)


def data() -> Clients:
    g = torch.Generator().manual_seed(0)
    counts = (23, 8, 15)
    return Clients.of([(torch.randn(n, 3, 12, 12, generator=g), torch.randint(5, (n,), generator=g)) for n in counts])


def trained(
    model, precision="bf16", path="loop-fast", who=(0, 1, 2), phase=None, phases=(), start=None, loss=cross_entropy
):  # fmt: skip
    clients, ids = data(), torch.tensor(who)
    ctx = context(seed=5, round=2, rounds=9, ids=ids, n=clients.count[ids], clients=3, samples=46)
    local = Local(phases or (phase or Phase(epochs=2, batch=8, optimiser=Optimiser(lr=0.05)),))
    start = tree_of(model) if start is None else start
    return train(model, loss, clients, local, start, ctx, path, precision=precision)


def built(name):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return MODELS[name]()


def apart(a, b, start) -> float:
    """How far two updates are apart, as a part of the second one's length."""
    names = [name for name in b if b[name].is_floating_point()]
    far, long = (
        torch.cat([(x[name] - y[name]).double().flatten() for name in names]).norm() for x, y in ((a, b), (b, start))
    )
    return float(far / long)


@pytest.mark.parametrize("name", MODELS)
def test_near_float32_and_not_float32(name):
    model = built(name)
    (half, said), (whole, told) = trained(model), trained(model, "float32")
    assert 1e-5 < apart(half, whole, tree_of(model)) < (CHOOSING if name == "a thin convolution" else COARSE)
    assert torch.allclose(said["loss"], told["loss"], rtol=0.02)
    assert all(x.dtype == whole[key].dtype for key, x in half.items()), "weights stay in float32"


def test_what_is_halved_and_what_is_not(monkeypatch):
    """Convolutions and dense layers, large or not, multiply in bfloat16; the loss is taken in float32."""
    seen = []

    def loss(output, y):
        seen.append(output.dtype)
        return cross_entropy(output, y)

    class Look(nn.Module):
        def forward(self, x):
            seen.append(x.dtype)
            return x

    model = nn.Sequential(nn.Conv2d(3, 4, 3), Look(), nn.Flatten(), nn.Linear(400, 8), Look(), nn.Linear(8, 5))
    monkeypatch.setattr(outer, "LARGE", 1 << 40)
    half, whole, once = torch.bfloat16, torch.float32, Phase(steps=1, batch=8, optimiser=Optimiser(lr=0.05))
    for precision, expected in (("bf16", [half, half, whole]), ("float32", [whole] * 3)):
        seen.clear()
        trained(model, precision, loss=loss, who=(1,), phase=once)
        assert seen == expected


PLAIN, SLOWER = (
    Phase(epochs=1, batch=8, optimiser=Optimiser(lr=0.08)),
    Phase(epochs=1, batch=8, optimiser=Optimiser(lr=0.01)),
)


@pytest.mark.parametrize(
    "phases",
    [
        (PLAIN, SLOWER),
        (PLAIN, SLOWER._replace(optimiser=SLOWER.optimiser._replace(momentum=0.9))),
        (PLAIN._replace(trains=frozenset({"7.bias"})), PLAIN),
    ],
    ids=["two rates", "plain, then momentum", "some tensors, then all"],
)
def test_several_phases(phases):
    model = built("a chain")
    half, whole = (trained(model, precision, phases=phases)[0] for precision in ("bf16", "float32"))
    assert 1e-5 < apart(half, whole, tree_of(model)) < COARSE


class Twice(nn.Module):
    """Its first weight is used by a layer and by hand."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(432, 432), nn.Linear(432, 5)

    def forward(self, x):
        x = x.flatten(1)
        return self.head(torch.tanh(x @ self.layer.weight + self.layer(x)))


def test_a_weight_that_others_look_at_is_not_held():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Twice()
    half, whole = (trained(model, precision)[0] for precision in ("bf16", "float32"))
    assert 1e-5 < apart(half, whole, tree_of(model)) < COARSE


def test_a_flag_stays_as_it_was():
    model = built("a chain")
    model.register_buffer("flag", torch.tensor([True, False]))
    half, whole = (trained(model, precision)[0] for precision in ("bf16", "float32"))
    assert 1e-5 < apart(half, whole, tree_of(model)) < COARSE
    assert half["flag"].tolist() == [[True, False]] * 3


@pytest.mark.parametrize(
    "phase",
    [
        Phase(epochs=2, batch=8, optimiser=Optimiser(lr=0.05, momentum=0.9)),
        Phase(epochs=1, batch=8, optimiser=Optimiser(lr=0.01, name="adam")),
        Phase(epochs=2, batch=8, optimiser=Optimiser(lr=0.05, clip=0.5, weight_decay=0.01), prox=0.1),
        Phase(epochs=2, batch=8, optimiser=Optimiser(lr=0.05), trains=frozenset({"7.weight", "0.bias"})),
    ],
    ids=["momentum", "Adam", "clip, prox and decay", "some tensors"],
)
def test_any_optimiser(phase):
    model = built("a chain")
    half, whole = (trained(model, precision, phase=phase)[0] for precision in ("bf16", "float32"))
    assert 1e-6 < apart(half, whole, tree_of(model)) < (CHOOSING if phase.optimiser.name == "adam" else COARSE)
    if phase.trains:
        still = tree_of(model)["5.weight"].expand_as(half["5.weight"])
        assert torch.equal(half["5.weight"], still), "what does not train does not move"


@pytest.mark.parametrize("room", [1, 8, 17, 64])
def test_however_many_steps_are_held(room, monkeypatch):
    """Room for less than a batch, for one, for two, for all; and none held at all."""
    model, start = built("a chain"), tree_of(built("a chain"))
    monkeypatch.setattr(held, "ROOM", room)
    now = trained(model)[0]
    monkeypatch.setattr(outer, "LARGE", 1 << 40)
    assert apart(now, trained(model)[0], start) < COARSE


def test_held_steps_are_steps(monkeypatch):
    """Whole numbers, which bfloat16 holds: then both come to the same to the last bit."""
    monkeypatch.setattr(held, "ROOM", 4)
    g = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randint(-1, 2, shape, generator=g).float()

    weight, room = 4 * draw(3, 6), torch.empty(3, 6)
    one, now, bias = Held(room), weight.clone(), draw(3)
    one.lr = 1.0
    for client in range(2):
        one.begin(weight)
        now = weight.clone()
        for rows in (1, 2, 3, 5, 1, 4, 1):
            x, d = draw(rows, 6), draw(rows, 3)
            assert torch.equal(one.forward(x.bfloat16(), bias), x @ now.T + bias), client
            assert torch.equal(one.backward(d).float(), d @ now)
            one.hold(d, x.bfloat16())
            now -= d.T @ x
        added = torch.empty(3, 6)
        one.added(added)
        assert torch.equal(weight + added, now)
        assert bool(added.any())


@pytest.mark.parametrize("name", ["a chain", "BatchNorm", "layers of its own"])
def test_the_same_bits_whoever_trains_beside(name):
    model = built(name)
    together = trained(model)[0]
    for k in range(3):
        alone = trained(model, who=(k,))[0]
        assert all(torch.equal(together[key][k], x[0]) for key, x in alone.items())
    found = {}
    threads = [Thread(target=lambda k=k: found.update({k: trained(model, who=(k,))[0]})) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(together[key][k], x[0]) for k in range(3) for key, x in found[k].items())


def test_clients_with_weights_of_their_own():
    model, g = built("a chain"), torch.Generator().manual_seed(2)
    start = {name: x + 0.01 * torch.randn(3, *x.shape[1:], generator=g) for name, x in tree_of(model).items()}
    half, whole = (trained(model, precision, start=start)[0] for precision in ("bf16", "float32"))
    assert 1e-5 < apart(half, whole, start) < COARSE
    assert len({float(x.sum()) for x in half["5.weight"]}) == 3


def test_implicit_comes_to_the_same():
    model = built("dense layers")
    start, loop = tree_of(model), trained(model)[0]
    for precision, most in (("bf16", COARSE), ("float32", COARSE)):
        found = trained(model, precision, path="implicit")[0]
        assert 1e-5 < apart(found, loop, start) < most
    own = {name: x.expand(3, *x.shape[1:]).clone() for name, x in start.items()}
    assert apart(trained(model, path="implicit", start=own)[0], loop, start) < COARSE


def test_implicit_goes_back_in_bfloat16(monkeypatch):
    """Of two layers and one step: forward, forward, and back through the second."""
    seen, matmul = [], torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda x, y: seen.append(x.dtype) or matmul(x, y))
    trained(
        built("dense layers"), path="implicit", who=(1,), phase=Phase(steps=1, batch=8, optimiser=Optimiser(lr=0.05))
    )
    assert seen == [torch.bfloat16] * 3


def test_stacked_is_refused():
    with pytest.raises(ConfigError, match="trains in float32, but precision is bf16: use 'loop-fast' or 'implicit'"):
        trained(built("a chain"), path="stacked")


@pytest.mark.filterwarnings("ignore:plan.precision is bf16, for which this processor")
@pytest.mark.parametrize("path", ["loop-fast", "implicit"])
def test_a_run_learns_as_much(path, tmp_path):
    task, study = {"clients": 20, "model": "mlp"}, {"rounds": 8, "sample": 10, "seed": 1, "evaluate": {"every": 8}}
    whole, half = (
        sparing.run(task, "fedavg", out=tmp_path / name, plan={"path": path, "precision": name, "threads": 1}, **study)
        for name in ("float32", "bf16")
    )
    assert whole.model_sha256 != half.model_sha256
    assert abs(whole.accuracy - half.accuracy) < 0.03
    assert half.accuracy > 0.5


@pytest.mark.filterwarnings("ignore:plan.precision is bf16, for which this processor")
def test_a_run_that_was_broken_off_goes_on_in_bfloat16(tmp_path):
    def stop(record):
        if record.round == 2:
            raise KeyboardInterrupt

    study = {
        "rounds": 4,
        "sample": 5,
        "seed": 1,
        "checkpoint": 1,
        "plan": {"path": "loop-fast", "precision": "bf16", "threads": 1},
    }
    task = {"clients": 10, "model": "mlp"}
    whole = sparing.run(task, "topk+memory", **study)
    with pytest.raises(KeyboardInterrupt):
        sparing.run(task, "topk+memory", out=tmp_path / "run", loggers=[stop], **study)
    assert sparing.resume(tmp_path / "run").model_sha256 == whole.model_sha256


class Written(nn.Module):
    """Autocast does not see through this."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x):
        out = torch.zeros(len(x), 2)
        out[torch.arange(len(x))] = self.layer(x)
        return out


@pytest.mark.filterwarnings("ignore:plan.precision is bf16, for which this processor")
@pytest.mark.parametrize(
    ("build", "said"),
    [
        (Written, "plan.precision is bf16, but the model does not run in it"),
        (lambda: nn.Linear(6, 2).double(), "for models in float32, but 'weight' is torch.float64; drop it"),
    ],
    ids=["autocast breaks it", "float64"],
)
def test_what_does_not_train_so_is_refused_before_anything_is_written(build, said, tmp_path):
    dtype = next(build().parameters()).dtype
    pairs = [(torch.randn(4, 6, dtype=dtype), torch.tensor([0, 1, 1, 0])) for _ in range(3)]
    task = sparing.Task(build, pairs)
    sparing.run(task, "fedavg", rounds=1)
    with pytest.raises(ConfigError, match=said):
        sparing.run(task, "fedavg", rounds=1, out=tmp_path / "run", plan={"precision": "bf16"})
    assert not (tmp_path / "run").exists()
