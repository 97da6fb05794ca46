"""Models as people bring them: scalars, empty and tied tensors, frozen parts, buffers of every kind."""

import pytest
import torch
from torch import nn

import sparing
from sparing.core.errors import ConfigError, DataError

QUICK = {"rounds": 2, "sample": 1.0, "local": {"epochs": 1}, "plan": {"path": "loop"}}
METHODS = ["fedavg", "psfed+topk+int8+memory", [{"psfed": {"per_client": True}}, "randk", "memory"], "topk+fp16"]
METHODS += [
    "ecsq",
    "topk+ecsq",
    "psfed+ecsq+memory",
    [{"ecsq": {"over": "layer"}}],
    "topk+int8+tight",
    "topk+sign+tight",
]


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.third = nn.Linear(4, 4, bias=False)
        self.third.weight = self.second.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 2)
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("small", torch.tensor([250], dtype=torch.uint8))
        self.register_buffer("calls", torch.tensor(2**60))

    def forward(self, x):
        if self.training:
            self.calls = self.calls + 1
        x = self.third(torch.relu(self.second(self.first(x)))) * self.scale
        return self.head(self.frozen(x) * self.mask)


def odd_task(model=Odd, **changes):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=g)
    y = (x.sum(dim=1) > 0).long()
    parts = [(x[:7], y[:7]), (x[7:30], y[7:30]), (x[30:], y[30:])]
    return sparing.Task(model, **{"train": parts, "test": (x, y), **changes})


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_odd_tensors_train_alike_in_both_engines(method):
    fast, plain = (sparing.run(odd_task(), method, engine=e, **QUICK) for e in ("vector", "debug"))
    assert fast.model_sha256 == plain.model_sha256
    assert (fast.up_bytes, fast.down_bytes) == (plain.up_bytes, plain.down_bytes)
    start, end = odd_task().build(0).state_dict(), fast.model
    assert torch.equal(end["second.weight"], end["third.weight"]), "tied stays tied"
    assert torch.equal(end["frozen.weight"], start["frozen.weight"]), "frozen stays frozen"
    assert end["mask"].tolist() == [True, False, True, True]
    assert end["small"].tolist() == [250]
    assert int(end["calls"]) > 2**60
    assert method != "fedavg" or not torch.equal(end["scale"], start["scale"])
    Odd().load_state_dict(end)


def test_what_never_changes_is_never_sent():
    class Half(nn.Module):
        def __init__(self, frozen):
            super().__init__()
            self.body = nn.Linear(3, 50).requires_grad_(not frozen)
            self.head = nn.Linear(50, 2)

        def forward(self, x):
            return self.head(self.body(x))

    whole, part = (sparing.run(odd_task(lambda f=f: Half(f)), **QUICK) for f in (False, True))
    assert part.up_bytes < whole.up_bytes - 3 * 2 * 200 * 4


@pytest.mark.parametrize("method", ["fedavg", "psfed"])
def test_double_precision(method):
    x, y = torch.randn(20, 3, dtype=torch.float64), torch.arange(20) % 2
    task = sparing.Task(lambda: nn.Linear(3, 2).double(), [(x[:5], y[:5]), (x[5:], y[5:])], test=(x, y))
    fast, plain = (sparing.run(task, method, engine=e, **QUICK) for e in ("vector", "debug"))
    assert fast.model_sha256 == plain.model_sha256
    assert fast.model["weight"].dtype == torch.float64


class Coupled(nn.Module):
    """Samples of a batch see each other, so padding a batch would change what it learns."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(x - x.mean(dim=0, keepdim=True))


class Loose(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(nn.functional.dropout(x, 0.5, self.training))


@pytest.mark.parametrize("model", [Coupled, Loose])
def test_models_that_cannot_be_stacked_are_left_to_the_loop(model, tmp_path):
    sparing.run(odd_task(model), **{**QUICK, "plan": {}}, out=tmp_path / "a")
    assert "path: loop-fast" in (tmp_path / "a/config.yaml").read_text()
    with pytest.raises(ConfigError, match="use loop"):
        sparing.run(odd_task(model), **{**QUICK, "plan": {"path": "stacked"}}, out=tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: odd_task(3), ConfigError, "model is 3; give an nn.Module"),
        (lambda: odd_task(lambda: None), ConfigError, "returned None; it must return an nn.Module"),
        (lambda: odd_task(nn.Flatten), ConfigError, "has no parameters to train"),
        (lambda: odd_task(lambda: nn.LazyLinear(2)), ConfigError, "'weight' has no shape yet"),
        (
            lambda: odd_task(lambda: nn.Linear(7, 2)),
            DataError,
            r"the train data \(samples of shape \(3,\)",
        ),
        (lambda: odd_task(lambda: nn.Linear(3, 2).double()), DataError, "does not take the train data"),
        (lambda: odd_task(lambda: nn.Linear(3, 1)), DataError, "client 0 has label 1, but the model tells 1 classes"),
        (
            lambda: odd_task(lambda: nn.Linear(3, 2), test=(torch.ones(1, 3), torch.tensor([5]))),
            DataError,
            "test: sample 0 has label 5, but the model tells 2 classes apart",
        ),
        (
            lambda: odd_task(lambda: nn.Linear(3, 2), test=(torch.ones(1, 3).double(), torch.tensor([1]))),
            DataError,
            "does not take the test data",
        ),
    ],
)
def test_models_and_data_that_do_not_fit_are_refused_in_words(make, error, words, tmp_path):
    with pytest.raises(error, match=words) as caught:
        sparing.run(make(), **QUICK, out=tmp_path / "a")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a").exists()
