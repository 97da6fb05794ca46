"""Optimisers as torch has them, on the paths that know them; learning rates over rounds; both spellings."""

import pytest
import torch
from torch import nn

import sparing
from sparing.core.context import context
from sparing.core.errors import ConfigError
from sparing.core.method import Local, Phase
from sparing.core.optimiser import Optimiser, Schedule
from sparing.core.tree import tree_of
from sparing.data.clients import Clients
from sparing.runs.study import study_from
from sparing.train.local import train
from sparing.train.losses import cross_entropy
from sparing.train.torch_optimisers import optimiser_classes

G = torch.Generator().manual_seed(0)
DATA = Clients.of([(torch.randn(6, 4, generator=G), torch.randint(3, (6,), generator=G)) for _ in range(3)])
IDS = torch.arange(3)


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def trained(optimiser, path="loop", round=1, rounds=1, **phase):
    net = model()
    ctx = context(0, round, rounds, IDS, DATA.count[IDS], 3, 18)
    local = Local((Phase(steps=4, batch=6, optimiser=optimiser, **phase),))  # every batch is all samples
    return train(net, cross_entropy, DATA, local, tree_of(net), ctx, path)[0]


def by_torch(make, clip=None):
    """The same steps by torch's own class, client by client."""
    rows = []
    for i in range(3):
        net, (x, y) = model(), DATA.client(i)
        optimiser = make(net.parameters())
        for _ in range(4):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimiser.step()
        rows.append(net.state_dict())
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def close(a, b, tolerance=1e-5):
    return all(torch.allclose(a[name], b[name], rtol=tolerance, atol=tolerance) for name in b)


EVERYWHERE = {
    "nesterov": (
        Optimiser(momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "adamw": (Optimiser("adamw", 0.05, weight_decay=0.3), lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.3)),
    "adam": (Optimiser("adam", 0.05, weight_decay=0.3), lambda p: torch.optim.Adam(p, 0.05, weight_decay=0.3)),
}


@pytest.mark.parametrize("path", ["loop", "loop-fast", "stacked"])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_what_every_path_knows(name, path):
    optimiser, make = EVERYWHERE[name]
    assert close(trained(optimiser, path), by_torch(make))
    assert not close(trained(Optimiser()), by_torch(make))


OF_TORCH = {
    "rmsprop": (
        Optimiser("rmsprop", 0.01, momentum=0.5, weight_decay=0.1),
        lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, weight_decay=0.1),
    ),
    "betas": (
        Optimiser("adamw", 0.05, options=(("betas", (0.5, 0.9)),)),
        lambda p: torch.optim.AdamW(p, 0.05, betas=(0.5, 0.9), weight_decay=0),
    ),
    "nadam": (Optimiser("nadam", 0.05), lambda p: torch.optim.NAdam(p, 0.05)),
    "dampening": (
        Optimiser(momentum=0.9, options=(("dampening", 0.5),)),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5),
    ),
}


@pytest.mark.parametrize("path", ["loop", "loop-fast"])
@pytest.mark.parametrize("name", OF_TORCH)
def test_classes_of_torch_train_one_client_at_a_time(name, path):
    optimiser, make = OF_TORCH[name]
    assert close(trained(optimiser, path), by_torch(make))
    clipped = trained(optimiser._replace(clip=0.1), path)
    assert close(clipped, by_torch(make, clip=0.1))
    with pytest.raises(ConfigError, match="trains one client at a time: use path 'loop'"):
        trained(optimiser, "stacked")
    with pytest.raises(ConfigError, match="implicit training is for networks"):
        trained(optimiser, "implicit")


@pytest.mark.parametrize("name", sorted(set(optimiser_classes()) - {"muon"}))
def test_every_class_takes_a_step(name):
    after, start = trained(Optimiser(name, 0.01)), tree_of(model())
    assert all(bool((after[name] != start[name]).any()) for name in start)


def test_a_plan_takes_a_path_that_knows_the_optimiser(tmp_path):
    task = sparing.Task(model, [DATA.client(i) for i in range(3)])
    sparing.run(task, rounds=1, sample=2, local={"optimizer": "RMSprop", "lr": 0.01}, out=tmp_path / "a")
    assert "path: loop-fast" in (tmp_path / "a/config.yaml").read_text()
    runs = [
        sparing.run(
            task,
            "psfed+int8",
            rounds=2,
            sample=2,
            engine=engine,
            plan={"path": "loop"},
            local={"optimiser": "nadam", "lr": 0.01, "schedule": "cosine"},
        )
        for engine in ("vector", "debug")
    ]
    assert runs[0].model_sha256 == runs[1].model_sha256


SHARES = {
    "constant": (Schedule(warmup=4), [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
    "step": (Schedule("step", every=3, factor=0.5), [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]),
    "exponential": (Schedule("exponential", warmup=2, factor=0.5), [0.5, 1, 1, 0.5, 0.25, 0.125, 0.0625, 0.03125]),
    "floor": (Schedule("cosine", floor=0.5), None),
}


@pytest.mark.parametrize("name", SHARES)
def test_learning_rates_over_rounds(name):
    schedule, wanted = SHARES[name]
    seen = [schedule.share(t, 8) for t in range(1, 9)]
    if wanted is not None:
        assert seen == wanted
    assert (schedule.share(0, 8), schedule.share(99, 8)) == (seen[0], seen[-1])
    assert all(0 < x <= 1 for x in seen)
    if name == "floor":
        rates = torch.optim.lr_scheduler.CosineAnnealingLR(
            torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0), 8, eta_min=0.5
        )
        theirs = []
        for _ in range(8):
            theirs.append(rates.get_last_lr()[0])
            rates.optimizer.step()
            rates.step()
        assert seen == pytest.approx(theirs)


@pytest.mark.parametrize("path", ["loop", "loop-fast", "stacked", "implicit"])
def test_every_path_trains_at_the_rate_of_the_round(path):
    halving = Optimiser(lr=0.4, schedule=Schedule("exponential", factor=0.5))
    now, plain = trained(halving, path, round=3, rounds=5), trained(Optimiser(lr=0.1), path, round=3, rounds=5)
    assert all(torch.equal(now[name], plain[name]) for name in plain)


def test_scaffold_counts_the_steps_of_the_round():
    """One client: after any round its control variate is the mean gradient, so both models go on alike."""
    task = sparing.Task(model, [DATA.client(0)])
    local = {"steps": 1, "batch": 6, "lr": 0.4, "schedule": {"exponential": {"factor": 0.5}}}
    runs = [sparing.run(task, method, rounds=3, sample=1, local=local) for method in ("fedavg", "scaffold")]
    for name, x in runs[0].model.items():
        torch.testing.assert_close(runs[1].model[name], x, rtol=1e-4, atol=1e-5)


def test_a_schedule_is_resumed(tmp_path):
    task = sparing.Task(model, [DATA.client(i) for i in range(3)])
    how = {"sample": 2, "local": {"schedule": "cosine", "warmup": 1}, "rounds": 4}
    whole = sparing.run(task, **how, out=tmp_path / "a")
    assert whole.model_sha256 == sparing.resume(tmp_path / "a", task).model_sha256
    assert whole.model_sha256 != sparing.run(task, sample=2, rounds=4).model_sha256


def test_studies():
    local = study_from({"local": {"optimizer": "AdamW", "weight_decay": 0.01, "options": {"betas": [0.9, 0.95]}}}).local
    assert local.optimiser == "adamw"
    assert local.local().phases[0].optimiser.options == (("betas", (0.9, 0.95)),)
    assert study_from({}).local.local().phases == (Phase(),)
    made = study_from({"local": {"schedule": {"step": {"every": 5}}, "warmup": 2}}).local.local().phases[0].optimiser
    assert made.schedule == Schedule("step", 2, 5)


BAD = {
    "local.optimiser: no optimiser is called 'adm': did you mean 'adam'": {"optimiser": "adm"},
    "no optimiser is called 'lbfgs'": {"optimizer": "LBFGS"},
    "local has optimiser and optimizer, which are one key": {"optimiser": "sgd", "optimizer": "adam"},
    "local.nesterov is true, but there is no momentum": {"nesterov": True},
    "local.momentum is 0.9, which adamw has no use for": {"optimiser": "adamw", "momentum": 0.9},
    "local.optimiser: adagrad knows no 'momentum'": {"optimiser": "adagrad", "momentum": 0.9},
    "rmsprop knows no 'alfa': did you mean 'alpha'": {"optimiser": "rmsprop", "options": {"alfa": 0.9}},
    "torch's RMSprop does not take these settings .Invalid alpha value": {
        "optimiser": "rmsprop",
        "options": {"alpha": -1},
    },
    "local.schedule: no schedule is called 'cosin': did you mean 'cosine'": {"schedule": "cosin"},
    "local.schedule 'step' has no option 'evry'; did you mean 'every'": {"schedule": {"step": {"evry": 3}}},
    "local.velocity is kept, which sgd without options can, seen rmsprop": {
        "optimiser": "rmsprop",
        "momentum": 0.9,
        "velocity": "kept",
    },
}


@pytest.mark.parametrize("sentence", BAD)
def test_refusals(sentence):
    with pytest.raises(ConfigError, match=sentence):
        study_from({"local": BAD[sentence]})
