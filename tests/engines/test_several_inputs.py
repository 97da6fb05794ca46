"""Methods that change the size of models take samples of several tensors, or say that they do not."""

import pytest
import torch
from torch import nn

import sparing
from sparing.core.errors import MethodError


class TwoSided(nn.Module):
    """Dense layers on two inputs; the output may be a tuple."""

    def __init__(self, with_features: bool = False):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 3)
        self.with_features = with_features

    def forward(self, left, right):
        hidden = torch.relu(self.second(torch.relu(self.first(torch.cat([left, right], 1)))))
        return (self.last(hidden), hidden) if self.with_features else self.last(hidden)


def two_sided_task(kind, make=TwoSided):
    draw = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 6, 20, 4, generator=draw)
    y = (left[..., 0] > 0).long() + (right[..., 0] > 0).long()
    put = {"dict": lambda i: {"left": left[i], "right": right[i]}, "tuple": lambda i: (left[i], right[i])}[kind]
    clients = [(put(i), y[i]) for i in range(6)]
    return sparing.Task(make, clients, clients)


STUDY = {
    "rounds": 6,
    "sample": 1.0,
    "local": {"lr": 0.3, "epochs": 8, "batch": 20, "momentum": 0.5},
    "evaluate": {"every": 6},
}


@pytest.mark.parametrize(
    ("method", "kind"),
    [("fedhm", "dict"), ("fedhm", "tuple"), ("split-mix", "dict"), ("split-mix", "tuple"), ("fedhm+int8", "dict")],
)
def test_models_of_several_sizes_take_several_inputs(method, kind):
    found = [
        sparing.run(two_sided_task(kind), method, **STUDY, engine=engine, plan={"path": path})
        for engine, path in (("vector", "loop"), ("debug", "loop"), ("vector", "stacked"))
    ]
    assert found[0].model_sha256 == found[1].model_sha256
    assert found[0].up_bytes == found[1].up_bytes == found[2].up_bytes
    assert all(result.accuracy > 0.7 for result in found), "a guess is right half of the time"


def test_bases_may_give_several_tensors():
    result = sparing.run(two_sided_task("dict", lambda: TwoSided(with_features=True)), "split-mix", **STUDY)
    assert result.accuracy == sparing.run(two_sided_task("dict"), "split-mix", **STUDY).accuracy


def test_heterofl_says_that_it_does_not():
    with pytest.raises(MethodError, match="heterofl narrows networks whose samples are one tensor, seen several"):
        sparing.run(two_sided_task("dict"), "heterofl", **STUDY)
