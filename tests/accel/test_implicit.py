"""Implicit training is the loop's SGD, in another order of operations."""

import copy
from dataclasses import replace
from types import MethodType

import pytest
import torch
from torch import Tensor, nn

import sparing
from sparing.accel import fold_bodies
from sparing.accel.lazy_product import Product
from sparing.accel.train_choice import fastest_path
from sparing.accel.train_cpu.implicit import can_imply, history_bytes, most_visits
from sparing.core.context import Ctx, context
from sparing.core.errors import ConfigError, TrainingError
from sparing.core.method import Local, Phase, Wrap
from sparing.core.optimiser import Optimiser
from sparing.core.tree import Tree, take_rows, tree_of, tree_sha256
from sparing.data.augment import read_augmentations
from sparing.data.clients import Clients
from sparing.train.keyed_layers import KeyedStep
from sparing.train.local import train
from sparing.train.losses import cross_entropy

SIZES = [20, 1, 60, 10, 33, 2, 11]
IDS = [3, 0, 6, 2, 1, 5, 4]


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Linear(16, 3))


def dropping() -> nn.Module:
    drop = nn.Dropout(0.4)  # used twice: two different masks
    inner = nn.Sequential(nn.Linear(16, 8, bias=False), drop, nn.Tanh())
    return nn.Sequential(nn.Dropout(0.1), nn.Linear(6, 16), drop, nn.GELU(), inner, nn.Linear(8, 3))


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))


def image() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.SiLU(), nn.Linear(8, 3))


def built(make, dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make().to(dtype)


def cohort(sizes=SIZES, dtype=torch.float32) -> Clients:
    g = torch.Generator().manual_seed(0)
    xs = [torch.randn(n, 6, generator=g, dtype=torch.float64).to(dtype) for n in sizes]
    return Clients.of([(x, torch.randint(3, (len(x),), generator=g)) for x in xs])


def round_of(data: Clients, ids=IDS) -> Ctx:
    ids = torch.tensor(ids)
    return context(seed=5, round=2, rounds=9, ids=ids, n=data.count[ids], clients=len(data), samples=len(data.y))


def gap(a: Tree, b: Tree) -> float:
    assert list(a) == list(b)
    assert all(a[n].shape == b[n].shape and a[n].dtype == b[n].dtype for n in b)
    return max(float(((a[n] - b[n]).abs() / (1 + b[n].abs())).max()) for n in b)


def both(model: nn.Module, data: Clients, local: Local, start: Tree, ctx: Ctx) -> tuple[Tree, Tree]:
    """After implicit training and after the loop's; their losses agree."""
    mine, notes = train(model, cross_entropy, data, local, start, ctx, path="implicit")
    loop, wanted = train(model, cross_entropy, data, local, start, ctx)
    assert torch.allclose(notes["loss"], wanted["loss"], rtol=1e-6)
    return mine, loop


PHASES = {
    "one": (Phase(epochs=1, optimiser=Optimiser(lr=0.2), batch=10),),
    "epochs": (Phase(epochs=3, optimiser=Optimiser(lr=0.2), batch=8),),
    "steps": (Phase(steps=7, optimiser=Optimiser(lr=0.2), batch=16),),
    "two": (
        Phase(epochs=2, optimiser=Optimiser(lr=0.2), batch=10),
        Phase(steps=5, optimiser=Optimiser(lr=0.05), batch=7),
    ),
}


@pytest.mark.parametrize("make", [plain, dropping])
@pytest.mark.parametrize("name", PHASES)
def test_a_ragged_cohort_trains_as_in_the_loop(make, name):
    for dtype, close in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        model, data = built(make, dtype), cohort(dtype=dtype)
        start = tree_of(model)
        before = tree_sha256(start)
        mine, loop = both(model, data, Local(PHASES[name]), start, round_of(data))
        assert gap(mine, loop) < close
        assert gap(mine, {n: x.expand_as(mine[n]) for n, x in start.items()}) > 1e-2
        assert tree_sha256(start) == before


@pytest.mark.parametrize("augment", [(), [{"crop": {"padding": 2}}, "flip"]])
def test_pixels_are_prepared_and_augmented(augment):
    g = torch.Generator().manual_seed(0)
    pairs = [(torch.randint(256, (n, 3, 4, 4), generator=g, dtype=torch.uint8), torch.arange(n) % 3) for n in (9, 14)]
    data = replace(Clients.of(pairs), augment=read_augmentations(augment, (3, 4, 4)))
    model = built(image)
    mine, loop = both(model, data, Local((Phase(epochs=2, batch=5),)), tree_of(model), round_of(data, [1, 0]))
    assert gap(mine, loop) < 1e-6


TRAINS = {
    "head, then body": [{"2.weight", "2.bias"}, {"0.weight", "0.bias"}],
    "body, then all": [{"0.weight"}, {"0.weight", "0.bias", "2.weight", "2.bias"}],
    "biases": [{"0.bias", "2.bias"}],
    "nothing": [set()],
}


@pytest.mark.parametrize("name", TRAINS)
def test_phases_train_only_what_they_name(name):
    model, data = built(plain, torch.float64), cohort(dtype=torch.float64)
    local = Local(
        tuple(Phase(epochs=2, optimiser=Optimiser(lr=0.2), trains=frozenset(names)) for names in TRAINS[name])
    )
    start = tree_of(model)
    mine, loop = both(model, data, local, start, round_of(data))
    assert gap(mine, loop) < 1e-12
    assert {n for n, x in mine.items() if bool((x != start[n]).any())} == set().union(*TRAINS[name])


def test_parameters_frozen_by_the_author_stay():
    model, data = built(plain, torch.float64), cohort(dtype=torch.float64)
    model[0].weight.requires_grad_(False)
    mine, loop = both(model, data, Local(), tree_of(model), round_of(data))
    assert gap(mine, loop) < 1e-12
    assert torch.equal(mine["0.weight"], tree_of(model)["0.weight"].expand_as(mine["0.weight"]))


@pytest.mark.parametrize("own", [{"2.weight", "2.bias"}, {"0.weight", "0.bias", "2.weight", "2.bias"}])
def test_clients_may_start_from_layers_of_their_own(own):
    model, data = built(plain, torch.float64), cohort(dtype=torch.float64)
    start = tree_of(model)
    for name in own:
        start[name] = torch.cat([start[name] * (1 + k / 5) for k in range(len(IDS))])
    before = tree_sha256(start)
    mine, loop = both(model, data, Local(PHASES["two"]), start, round_of(data))
    assert gap(mine, loop) < 1e-12
    assert tree_sha256(start) == before


def test_a_client_does_not_notice_the_others():
    model, data, local = built(dropping, torch.float64), cohort(dtype=torch.float64), Local(PHASES["epochs"])
    mine, _ = train(model, cross_entropy, data, local, tree_of(model), round_of(data), path="implicit")
    for k, i in enumerate(IDS):
        alone, _ = train(model, cross_entropy, data, local, tree_of(model), round_of(data, [i]), path="implicit")
        assert gap(take_rows(mine, slice(k, k + 1)), alone) < 1e-13


def test_draws_of_several_clients_are_those_of_each():
    keys, step, one = torch.tensor([3, -8, 11]), KeyedStep(), KeyedStep()
    step.begin(keys)
    drawn = [step.uniform(12), step.uniform(6)]
    for k, key in enumerate(keys):
        one.begin(key)
        assert torch.equal(drawn[0].view(3, 4)[k], one.uniform(4))
        assert torch.equal(drawn[1].view(3, 2)[k], one.uniform(2))


def test_a_loss_that_diverges_names_the_client():
    model, data = built(plain), cohort()
    data.x[data.start[2] + 5] = 1e30
    with pytest.raises(TrainingError, match="client 2, round 2: the training loss became"):
        train(model, cross_entropy, data, Local(), tree_of(model), round_of(data), path="implicit")


class Lying(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def tied() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.ReLU(), layer)


def hooked() -> nn.Module:
    model = plain()
    model[0].register_forward_pre_hook(lambda layer, args: (args[0] * 2,))
    return model


OTHERS = {
    "norm": lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)),
    "conv": lambda: nn.Sequential(nn.Conv1d(1, 1, 1), nn.Linear(6, 3)),
    "subclass": lambda: nn.Sequential(Lying(6, 3)),
    "softmax": lambda: nn.Sequential(nn.Linear(6, 3), nn.Softmax(0)),
    "flat": lambda: nn.Sequential(nn.Flatten(0), nn.Linear(6, 3)),
    "no dense layer": lambda: nn.Sequential(nn.Flatten()),
    "tied": tied,
    "hooked": hooked,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_are_not_offered(name):
    model, data = built(OTHERS[name]), cohort()
    assert not can_imply(model, Local())
    with pytest.raises(ConfigError, match="use path 'loop'"):
        train(model, cross_entropy, data, Local(), tree_of(model), round_of(data), path="implicit")


OPTIMISERS = (
    Optimiser(momentum=0.9),
    Optimiser(weight_decay=0.1),
    Optimiser(clip=1.0),
    Optimiser("adam"),
    Optimiser("rmsprop"),
    Optimiser(options=(("maximize", True),)),
)
EXTRAS = ({"prox": 0.1}, {"correct": True}, {"frobenius": 0.1}, {"holds": frozenset({"0.weight"})})


@pytest.mark.parametrize("extra", [*EXTRAS, *({"optimiser": one} for one in OPTIMISERS)])
def test_other_training_is_not_offered(extra):
    odd = Phase()._replace(**extra)
    assert can_imply(plain(), Local())
    assert not can_imply(plain(), Local((Phase(), odd)))
    assert not can_imply(plain(), Local(wraps=(Wrap(lambda train, phases: train, (odd,)),)))
    assert not can_imply(plain(), Local(tune=lambda phases: (odd,)))


def test_samples_that_are_not_rows_are_refused():
    data = Clients.of([(torch.ones(4, 2, 6), torch.zeros(4, 2, dtype=torch.int64))])
    model = built(plain)
    with pytest.raises(ConfigError, match=r"before '0.weight', seen samples of shape \[2, 6\]"):
        train(model, cross_entropy, data, Local(), tree_of(model), round_of(data, [0]), path="implicit")


def test_it_is_chosen_where_clients_visit_few_samples():
    few, many = Local((Phase(epochs=5),)), Local((Phase(epochs=5), Phase(epochs=6)))
    assert fastest_path(plain(), "cpu", few, 30) == "implicit"
    assert fastest_path(plain(), "cpu", few, 31) == "stacked"
    assert fastest_path(plain(), "cpu", many, 30) == "stacked"
    assert fastest_path(plain(), "cpu", Local((Phase(steps=15),)), 1000) == "implicit"
    assert fastest_path(plain(), "cuda", few, 30) == "stacked"
    assert fastest_path(OTHERS["norm"](), "cpu", few, 30) == "stacked"
    assert most_visits(Local((Phase(steps=15),)), 3) == 45
    assert history_bytes(plain(), few, 30) == 150 * (6 + 16 + 16 + 3) * 4


def task_of(model: nn.Module) -> sparing.Task:
    data = cohort()
    return sparing.Task(copy.deepcopy(model), [data.client(i) for i in range(len(data))])


STUDY = {"rounds": 3, "sample": 5, "seed": 1, "local": {"epochs": 2, "lr": 0.1}, "device": "cpu"}


@pytest.mark.parametrize("method", ["fedavg", "personal+topk+int8+memory"])
def test_a_run_comes_to_the_loop_s_model_and_bytes(method, tmp_path):
    task = task_of(built(plain))
    mine = sparing.run(task, method, **STUDY, out=tmp_path / "auto")
    loop = sparing.run(task, method, **STUDY, plan={"path": "loop"})
    assert "path: implicit" in (tmp_path / "auto" / "config.yaml").read_text()
    assert mine.up_bytes == loop.up_bytes
    for name, x in loop.model.items():
        assert torch.allclose(mine.model[name], x, rtol=0, atol=1e-6 if method == "fedavg" else 1e-3)


@pytest.mark.parametrize("engine", ["vector", "debug"])
@pytest.mark.parametrize("method", ["fedavg", "personal", "psfed", "topk+int8+memory", "fedadam", "fedsim", "median"])
def test_whatever_follows_training_sees_the_loop_s_updates(method, engine):
    task, study = task_of(built(plain)), {**STUDY, "rounds": 2, "engine": engine}
    mine = sparing.run(task, method, **study, plan={"path": "implicit"})
    loop = sparing.run(task, method, **study, plan={"path": "loop"})
    assert mine.up_bytes == loop.up_bytes
    for name, x in loop.model.items():
        assert torch.allclose(mine.model[name], x, rtol=0, atol=1e-3 if "int8" in method else 1e-5)


def test_threads_share_large_products_and_the_plan_alone_says_how_many():
    task, before, found = task_of(built(plain)), torch.get_num_threads(), []
    for around, threads in ((1, 2), (2, 2), (2, 1)):
        torch.set_num_threads(around)
        found.append(sparing.run(task, **STUDY, plan={"path": "implicit", "chunk": 5, "threads": threads}))
    torch.set_num_threads(before)
    assert found[0].model_sha256 == found[1].model_sha256
    for name, x in found[2].model.items():
        assert torch.allclose(found[1].model[name], x, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("method", "as_they_are"), [("fedavg", True), ("fedadam", True), ("topk", False)])
def test_a_plain_mean_never_forms_a_client_s_weights(method, as_they_are, monkeypatch):
    """The factors go into the fold as they are; a codec has them formed."""
    seen, terms = [], fold_bodies._terms

    def watched(update, share_K):
        seen.append(isinstance(update, Product) and update.whole is None)
        return terms(update, share_K)

    monkeypatch.setattr(fold_bodies, "_terms", watched)
    sparing.run(task_of(built(plain)), method, **{**STUDY, "rounds": 1}, plan={"path": "implicit", "threads": 1})
    assert seen
    assert set(seen[0::2]) == {as_they_are}  # weights
    assert set(seen[1::2]) == {False}  # biases


def test_weights_that_overflow_in_the_last_step_name_the_client():
    model, data = built(plain), cohort()
    data.x[data.start[2]] = 1e37  # the loss is still finite, the step is not
    local = Local((Phase(steps=1, batch=100, optimiser=Optimiser(lr=1e10)),))
    with pytest.raises(TrainingError, match=r"client 2, round 2: '0.weight' is not finite after the last step"):
        train(model, lambda z, y: z.sum(1), data, local, tree_of(model), round_of(data), path="implicit")


def test_a_plan_is_held_to_the_loop(tmp_path):
    task = task_of(built(OTHERS["norm"]))
    with pytest.raises(ConfigError, match=r"plan\.path is implicit, but this model trains differently"):
        sparing.run(task, **STUDY, plan={"path": "implicit"})
    smaller = [{"fedhm": {"decay": 0.0}}]  # the whole model is such a chain, its factored sizes are not
    with pytest.raises(ConfigError, match=r"plan\.path is implicit"):
        sparing.run(task_of(built(deep)), smaller, **STUDY, plan={"path": "implicit"})
    sparing.run(task_of(built(deep)), smaller, **STUDY, out=tmp_path / "auto")
    assert "path: stacked" in (tmp_path / "auto" / "config.yaml").read_text()
    odd = built(plain)
    odd[0].forward = MethodType(lambda layer, h: nn.Linear.forward(layer, h) * 1.01, odd[0])
    assert can_imply(odd, Local()), "nothing to be seen from outside"
    with pytest.raises(ConfigError, match=r"plan\.path is implicit"):
        sparing.run(task_of(odd), **STUDY, plan={"path": "implicit"})


def test_a_hook_set_between_two_calls_is_seen():
    model, data = built(plain), cohort()
    how = (
        model,
        cross_entropy,
        data,
        Local((Phase(steps=1, batch=3, optimiser=Optimiser(lr=0.1)),)),
        tree_of(model),
        round_of(data),
    )
    train(*how, path="implicit")
    model[0].register_forward_hook(lambda layer, args, out: 2 * out)
    with pytest.raises(ConfigError, match="implicit training is for networks"):
        train(*how, path="implicit")


def test_a_model_changed_between_two_calls_is_seen():
    model, data = nn.Sequential(nn.Linear(6, 6), nn.LeakyReLU(0.1), nn.Linear(6, 6)), cohort()
    how = (model, cross_entropy, data, Local((Phase(steps=1, batch=3, optimiser=Optimiser(lr=0.1)),)))
    train(*how, tree_of(model), round_of(data), path="implicit")
    model[1] = nn.LeakyReLU(0.9)
    mine, loop = (train(*how, tree_of(model), round_of(data), path=path)[0] for path in ("implicit", "loop"))
    assert all(torch.allclose(mine[name], x, atol=1e-5) for name, x in loop.items())
    model[2].weight = model[0].weight
    with pytest.raises(ConfigError, match="implicit training is for networks"):
        train(*how, tree_of(model), round_of(data), path="implicit")


@pytest.mark.parametrize("engine", ["vector", "debug"])
def test_one_update_that_is_too_large_is_refused_among_many(engine):
    g = torch.Generator().manual_seed(0)
    shards = [(torch.randn(4, 5, generator=g), torch.randn(4, 1, generator=g)) for _ in range(64)]
    shards[3] = shards[3][0] * 1500, shards[3][1]
    torch.manual_seed(0)
    task = sparing.Task(lambda: nn.Linear(5, 1), train=shards, test=shards[0])
    how = {"local": {"epochs": 1, "batch": 4, "lr": 0.5}, "plan": {"path": "implicit", "chunk": 16}}
    with pytest.raises(TrainingError, match="client 3 sent an update of size"):
        sparing.run(task, "fedavg", rounds=1, sample=64, engine=engine, **how)
