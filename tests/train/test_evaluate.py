"""Evaluating: right numbers, and nothing changes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparing.core.tree import cat_trees, tree_of, tree_sha256, tree_to
from sparing.data.clients import Clients
from sparing.train.evaluate import evaluate_all, evaluate_rows
from sparing.train.losses import cross_entropy, squared_error
from sparing.train.paths import path_called

SIZES = [4, 0, 1, 700]
WIDTH = 2048


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def cohort() -> Clients:
    g = torch.Generator().manual_seed(0)
    return Clients.of([(torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)) for n in SIZES])


def plain(model, x, y):
    output = model.eval()(x).detach()
    return float((output.argmax(1) == y).double().mean()), float(F.cross_entropy(output.double(), y))


def test_each_client_its_own_model():
    models, data = [net() for _ in SIZES], cohort()
    tree = cat_trees([tree_of(model) for model in models])
    out = evaluate_rows(net(), cross_entropy, tree, data, torch.arange(4))
    assert out["count"].tolist() == SIZES
    for k in (0, 2, 3):
        right, lost = plain(models[k], *data.client(k))
        assert float(out["accuracy"][k]) == pytest.approx(right)
        assert float(out["loss"][k]) == pytest.approx(lost, rel=1e-5)
    assert bool(out["accuracy"][1].isnan())
    assert bool(out["loss"][1].isnan())
    for k in (3, 0):  # a row does not depend on the chunk
        mine = {n: x[k : k + 1] for n, x in tree.items()}
        one = evaluate_rows(net(), cross_entropy, mine, data, torch.tensor([k, k]))
        two = evaluate_rows(net(), cross_entropy, {n: x[[k, 0]] for n, x in tree.items()}, data, torch.tensor([k, 0]))
        assert torch.equal(two["loss"][0], out["loss"][k])
        assert torch.allclose(one["loss"][1], out["loss"][k])


def test_one_model_for_everybody_and_for_one_big_set():
    model, data = net(), cohort()
    out = evaluate_rows(model, cross_entropy, tree_of(model), data, torch.tensor([3, 1, 0]))
    for k, i in ((0, 3), (2, 0)):
        right, lost = plain(model, *data.client(i))
        assert float(out["accuracy"][k]) == pytest.approx(right)
        assert float(out["loss"][k]) == pytest.approx(lost, rel=1e-5)
    total = evaluate_all(model, cross_entropy, tree_of(model), data.x, data.y)
    right, lost = plain(model, data.x, data.y)
    assert (total["accuracy"], total["loss"], total["count"]) == (pytest.approx(right), pytest.approx(lost), 705)


def test_static_uses_batch_statistics():
    model, data = net(), cohort()
    tree = tree_of(model)
    tree["1.running_mean"] += 100.0
    out = evaluate_rows(model, cross_entropy, tree, data, torch.tensor([0, 2]), static=True)
    x, y = data.client(0)
    twin = nn.Sequential(model[0], nn.BatchNorm1d(8, track_running_stats=False), nn.ReLU(), model[4])
    assert float(out["loss"][0]) == pytest.approx(plain(twin, x, y)[1], rel=1e-5)
    alone = F.cross_entropy(
        model[4](torch.zeros(1, 8)), data.client(2)[1]
    )  # one sample comes out of BatchNorm as bias 0
    assert float(out["loss"][1]) == pytest.approx(alone.item(), rel=1e-5)
    assert evaluate_all(model, cross_entropy, tree, x, y, static=True)["loss"] == pytest.approx(float(out["loss"][0]))


def test_float_targets_have_no_accuracy():
    data = Clients.of([(torch.ones(2, 6), torch.ones(2))])
    out = evaluate_rows(nn.Linear(6, 1), squared_error, tree_of(nn.Linear(6, 1)), data, torch.tensor([0]))
    assert bool(out["accuracy"].isnan().all())
    assert bool(out["loss"].isfinite().all())
    two = {name: x.expand(2, *x.shape[1:]) for name, x in tree_of(nn.Linear(6, 1)).items()}
    out = evaluate_rows(
        nn.Linear(6, 1), squared_error, two, data, torch.tensor([0, 0]), runner=path_called("stacked").runner
    )
    assert bool(out["auc"].isnan().all())
    assert bool(out["loss"].isfinite().all())


def test_evaluating_changes_nothing():
    class Careless(nn.Module):
        """Drops out even when evaluated."""

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return self.head(F.dropout(x))

    for model in (net().train(), Careless()):
        data, tree = cohort(), tree_of(model)
        before = tree_sha256(tree_of(model)), tree_sha256(tree), torch.get_num_threads(), torch.is_grad_enabled()
        modes, rng = [layer.training for layer in model.modules()], torch.get_rng_state()
        evaluate_rows(model, cross_entropy, tree, data, torch.arange(4))
        four = {n: x.expand(4, *x.shape[1:]) for n, x in tree.items()}
        evaluate_rows(model, cross_entropy, four, data, torch.arange(4))
        evaluate_all(model, cross_entropy, tree, data.x, data.y)
        assert before == (
            tree_sha256(tree_of(model)),
            tree_sha256(tree),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
        )
        assert modes == [layer.training for layer in model.modules()]
        assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.gpu
@pytest.mark.parametrize("static", [False, True])
def test_gpu_agrees_with_the_cpu(static):
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(3 * WIDTH + 5, 6, generator=g), torch.randint(3, (3 * WIDTH + 5,), generator=g)
    model = net()
    tree = tree_of(model)
    here = evaluate_all(model, cross_entropy, tree, x, y, static)
    for place in ("cpu", "cuda"):
        there = evaluate_all(model, cross_entropy, tree_to(tree, "cuda"), x.to(place), y.to(place), static)
        assert there == pytest.approx(here, abs=1e-3)


@pytest.mark.parametrize("norm", [nn.Identity, lambda: nn.BatchNorm2d(4)])
def test_stacked_models_score_as_one_by_one(norm):
    g = torch.Generator().manual_seed(0)
    sizes = (3, 700, 1, 40)
    data = Clients.of(
        [
            (torch.randint(256, (n, 1, 8, 8), generator=g, dtype=torch.uint8), torch.randint(3, (n,), generator=g))
            for n in sizes
        ]
    )
    models = [nn.Sequential(nn.Conv2d(1, 4, 3), norm(), nn.Flatten(), nn.Dropout(), nn.Linear(144, 3)) for _ in sizes]
    tree, ids = cat_trees([tree_of(model) for model in models]), torch.arange(4)
    loss = nn.CrossEntropyLoss(reduction="none")
    runners = [path_called(name).runner for name in ("loop", "stacked")]
    plain, fast = (evaluate_rows(models[0], loss, tree, data, ids, runner=runner) for runner in runners)
    for name in ("accuracy", "loss", "auc"):
        assert torch.allclose(plain[name], fast[name], atol=1e-5), name
    trees = enumerate(map(tree_of, models))
    one_by_one = [evaluate_rows(models[0], loss, one, data, ids[i : i + 1])["loss"] for i, one in trees]
    assert torch.allclose(torch.cat(one_by_one), fast["loss"], atol=1e-5)
