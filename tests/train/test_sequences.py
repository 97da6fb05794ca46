"""Sequences with padding: the loss is the mean over tokens, on every path, in training and evaluation."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparing
from sparing.core.errors import ConfigError, DataError
from sparing.core.method import Local, Phase
from sparing.core.optimiser import Optimiser
from sparing.core.tree import tree_of
from sparing.data.clients import Clients
from sparing.fleet.attack import with_flipped_labels
from sparing.models.text import Transformer
from sparing.train.evaluate import evaluate_all, evaluate_rows
from sparing.train.gradient import gradient_at
from sparing.train.local import train
from sparing.train.losses import batch_mean, cross_entropy, sample_weights
from sparing.train.named_metrics import METRICS, read_metrics
from sparing.train.paths import path_called
from support import accelerated, make_ctx, plain_bodies

WORDS, LENGTH, SIZES = 11, 6, [5, 3, 7]


def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Transformer(WORDS, LENGTH, width=8, layers=1, heads=2, last=False)


def padded(n, seed, filler=0):
    """Sequences of 1 to LENGTH tokens, each with the token that comes next."""
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (n, LENGTH + 1), generator=g)
    beyond = torch.arange(LENGTH) >= torch.randint(1, LENGTH + 1, (n, 1), generator=g)
    return words[:, :-1].masked_fill(beyond, filler), words[:, 1:].masked_fill(beyond, -100)


def clients(filler=0):
    return Clients.of([padded(n, i, filler) for i, n in enumerate(SIZES)])


def task(filler=0, **more):
    held = [padded(4, 10 + i, filler) for i in range(3)]
    return sparing.Task(net, [padded(n, i, filler) for i, n in enumerate(SIZES)], held, **more)


def token_mean(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)


def test_a_batch_comes_to_the_mean_over_its_tokens():
    (x, y), model = padded(9, 0), net()
    losses = cross_entropy(model(x), y)
    torch.testing.assert_close(losses[3], token_mean(model, x[3:4], y[3:4]))
    torch.testing.assert_close(batch_mean(losses, sample_weights(cross_entropy, y)), token_mean(model, x, y))
    nothing = torch.full((1, LENGTH), -100)
    assert float(cross_entropy(model(x[:1]), nothing).detach()) == 0.0
    assert float(batch_mean(torch.zeros(1), sample_weights(cross_entropy, nothing))) == 0.0


def trained(path, ids, batch=2):
    local, ctx = Local((Phase(epochs=2, batch=batch, optimiser=Optimiser(lr=0.5)),)), make_ctx(ids)
    data, model = clients(), net()
    n = data.count[torch.tensor(ids)]
    ctx = ctx._replace(members=ctx.members._replace(n=n))
    after, notes = train(model, cross_entropy, data, local, tree_of(model), ctx, path)
    return dict(after), notes["loss"]


def test_training_is_sgd_on_the_mean_over_tokens():
    model, (x, y) = net(), padded(SIZES[0], 0)
    for _ in range(2):
        loss = token_mean(model, x, y)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, grad in zip(model.parameters(), grads, strict=True):
                p -= 0.5 * grad
    after, losses = trained("loop", [0], batch=99)
    for name, p in model.named_parameters():
        torch.testing.assert_close(after[name][0], p.detach(), rtol=1e-5, atol=1e-6)
    assert float(losses[0]) == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.accel
@pytest.mark.parametrize("path", ["loop-fast", "stacked"])
def test_paths_agree_where_lengths_and_batches_differ(path):
    wanted, losses = trained("loop", [0, 1, 2])
    found, others = trained(path, [0, 1, 2])
    torch.testing.assert_close(others, losses, rtol=1e-4, atol=1e-5)
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], x, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("path", ["loop", *accelerated("stacked")])
def test_evaluation_weighs_by_tokens(path):
    data, model, runner = clients(), net(), path_called(path).runner
    metrics = read_metrics(["perplexity", "accuracy", "macro_f1"])
    rows = {name: x.expand(3, *x.shape[1:]) for name, x in tree_of(model).items()}
    for tree in (tree_of(model), rows):
        found = evaluate_rows(model, cross_entropy, tree, data, torch.arange(3), False, runner, metrics)
        for i in range(3):
            x, y = data.client(i)
            real = y != -100
            right = float((model(x).argmax(-1) == y)[real].double().mean())
            loss = float(token_mean(model, x, y).detach())
            assert found["loss"][i].item() == pytest.approx(loss, rel=1e-5)
            assert found["accuracy"][i].item() == pytest.approx(right)
            assert found["perplexity"][i].item() == pytest.approx(math.exp(loss), rel=1e-5)
    whole = evaluate_all(model, cross_entropy, tree_of(model), data.x, data.y, False, runner, metrics)
    loss = float(token_mean(model, data.x, data.y).detach())
    assert (whole["loss"], whole["perplexity"]) == (pytest.approx(loss), pytest.approx(math.exp(loss)))
    assert whole["count"] == sum(SIZES)


def test_metrics_leave_out_what_is_ignored():
    (_, y), g = padded(9, 0), torch.Generator().manual_seed(0)
    outputs, real = torch.randn(9, LENGTH, WORDS, generator=g), y != -100
    for name in ("top5", "macro_f1"):
        assert METRICS[name].of(outputs, y) == pytest.approx(METRICS[name].of(outputs[real], y[real]))


def test_the_gradient_on_a_probe_set_is_that_of_the_mean_over_tokens():
    model, (x, y) = net(), padded(9, 0)
    wanted = torch.autograd.grad(token_mean(model, x, y), list(model.parameters()))
    found = gradient_at(model, cross_entropy, tree_of(model), x, y)
    for (name, _), grad in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(found[name][0], grad, rtol=1e-4, atol=1e-6)


STUDY = {"rounds": 2, "sample": 3, "seed": 1, "local": {"epochs": 1, "batch": 4, "lr": 0.5}}


def test_engines_agree_and_what_stands_in_the_padding_changes_nothing():
    method, plan = "psfed+topk+int8+memory", {"path": "loop"}
    runs = [sparing.run(task(), method, engine=engine, plan=plan, **STUDY) for engine in ("vector", "debug")]
    runs.append(sparing.run(task(filler=WORDS - 1), method, plan=plan, **STUDY))
    assert len({one.model_sha256 for one in runs}) == 1
    assert len({one.up_bytes for one in runs}) == 1


def test_perplexity_is_a_metric_of_a_run():
    with plain_bodies():
        result = sparing.run(task(metric=["perplexity", "accuracy"]), plan={"path": "loop"}, **STUDY)
    last = result.table[-1]
    assert result.ranked_by == "perplexity"
    assert last.metrics["perplexity"] == pytest.approx(math.exp(last.loss))


def test_flipped_labels_leave_what_is_ignored():
    flipped = with_flipped_labels(task(), torch.tensor([True, False, False])).train
    (_, before), (_, after) = task().train.client(0), flipped.client(0)
    assert torch.equal(before == -100, after == -100)
    assert not torch.equal(before, after)


def test_bad_targets_are_refused():
    x, y = padded(3, 0)
    with pytest.raises(
        DataError, match=r"the label is negative \(-1\) at client 0, sample 2: .* or -100 where nothing"
    ):
        sparing.Task(net, [(x, y.index_fill(0, torch.tensor([2]), -1))])
    with pytest.raises(DataError, match=r"the label is negative \(-100\)"):
        sparing.Task(net, [(x, torch.tensor([0, -100, 1]))])
    with pytest.raises(DataError, match="train: all targets of client 1 are -100, so nothing counts there"):
        sparing.Task(net, [(x, y), (x, torch.full_like(y, -100))])
    with pytest.raises(ConfigError, match="'perplexity' is of classes, but the targets are values"):
        sparing.Task(nn.Linear(2, 1), [(torch.ones(2, 2), torch.ones(2))], metric="perplexity")
