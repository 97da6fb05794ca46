"""Losses and metrics are told apart by what they do, and known again in another process."""

import functools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from sparing.tasks.function_identity import function_identity
from sparing.train.losses import cross_entropy, squared_error
from sparing.train.named_metrics import read_metrics

POWER = 2


def powered(output, y, by=2):
    return (output - y).abs() ** by


def weighed(weight):
    return lambda output, y: weight * powered(output, y)


class Scaled:
    def __init__(self, scale):
        self.scale, self._calls = scale, 0

    def __call__(self, output, y):
        self._calls += 1
        return self.scale * (output - y).abs()


class Counted:
    """As metrics of torchmetrics are used."""

    def __init__(self, threshold):
        self.threshold, self._seen = threshold, 0

    def update(self, outputs, y):
        self._seen += len(y)

    def compute(self):
        return self._seen

    def reset(self):
        self._seen = 0


PAIRS = {
    "functions of sparing": lambda other: squared_error if other else cross_entropy,
    "what a partial holds": lambda other: functools.partial(powered, by=3 if other else 2),
    "what a closure holds": lambda other: weighed(0.5 if other else 1.0),
    "a tensor in a closure": lambda other: weighed(torch.tensor([1.0, 2.0 if other else 1.0])),
    "an array in a closure": lambda other: weighed(np.array([1.0, 2.0 if other else 1.0])),
    "an object's settings": lambda other: Scaled(2 if other else 1),
    "a method's object": lambda other: Scaled(2 if other else 1).__call__,
    "a module's settings": lambda other: nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1 if other else 0.0),
    "a module's tensors": lambda other: nn.CrossEntropyLoss(torch.tensor([1.0, 2.0 if other else 1.0])),
    "a metric's settings": lambda other: read_metrics(Counted(0.5 if other else 0.1))[0].of,
}


@pytest.mark.parametrize("what", PAIRS)
def test_what_tells_functions_apart(what):
    one, again, other = (function_identity(PAIRS[what](x)) for x in (False, False, True))
    assert one == again != other


def test_values_of_the_file_count(monkeypatch):
    def squared(output, y):
        return (output - y).abs() ** POWER

    before = function_identity(squared)
    monkeypatch.setitem(globals(), "POWER", 3)
    assert function_identity(squared) != before


def test_a_function_may_call_itself_and_miss_what_it_names():
    def made():
        def loss(output, y, again=True):
            return loss(output, y, again=False) if again else gone * (output - y)

        if POWER > 9:
            gone = 1
        return loss

    assert function_identity(made()) == function_identity(made())


def test_use_changes_nothing():
    loss, (metric,) = Scaled(2), read_metrics(Counted(0.5))
    before = function_identity(loss), function_identity(metric.of)
    loss(torch.ones(2), torch.zeros(2))
    metric.of(torch.ones(2), torch.zeros(2))
    assert (function_identity(loss), function_identity(metric.of)) == before


SCRIPT = """
import torch
from sparing.tasks.function_identity import function_identity
class Kept: pass
def made(kept):
    return lambda output, y: kept in {"a", "b", "c", "d"} or (output - y) ** 2
print(function_identity(made(Kept())))
"""


def test_another_process_finds_the_same():
    said = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
