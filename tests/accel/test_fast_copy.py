"""Frozen copies serve again, as long as their model is as it was."""

import torch
from torch import nn

from sparing.accel.train_cpu.fast_copy import FROZEN
from sparing.core.tree import tree_of
from sparing.train.evaluate import evaluate_all
from sparing.train.losses import cross_entropy
from sparing.train.paths import path_called

FAST = path_called("loop-fast").runner


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def test_a_copy_serves_again_until_the_model_is_another():
    model, g = net(), torch.Generator().manual_seed(0)
    x, y = torch.randn(70, 6, generator=g), torch.randint(3, (70,), generator=g)
    tree, other = tree_of(model), tree_of(net())
    first = evaluate_all(model, cross_entropy, tree, x, y, runner=FAST)
    ((_, copy),) = FROZEN[model]
    assert evaluate_all(model, cross_entropy, other, x, y, runner=FAST)["loss"] != first["loss"]
    assert evaluate_all(model, cross_entropy, tree, x, y, runner=FAST) == first
    assert FROZEN[model][0][1] is copy
    evaluate_all(model, cross_entropy, tree, x, y, True, FAST)
    model[3].p = 0.1
    assert evaluate_all(model, cross_entropy, tree, x, y, runner=FAST) == first
    assert FROZEN[model][0][1] is not copy
    assert len(FROZEN[model]) == 1
