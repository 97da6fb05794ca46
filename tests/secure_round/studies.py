"""One study as it is, and with secure aggregation on both engines."""

import csv
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import sparing

TASK = {"data": "digits", "clients": 8, "split": {"dirichlet": 0.5}, "model": {"mlp": {"hidden": [12, 10]}}}
CNN = TASK | {"model": "cnn"}
STUDY: dict[str, Any] = {
    "rounds": 2,
    "sample": 6,
    "seed": 1,
    "local": {"steps": 2, "lr": 0.05},
    "evaluate": {"every": 2, "clients": 3},
    "checkpoint": 50,
}
COMMON = {"int8": {"common": True}}
SHARED = {"randk": {"ratio": 0.3, "shared": True}}


def normed_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))


def normed_task() -> sparing.Task:
    """With running means, variances and counts of batches."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(96, 1, 4, 4, generator=g), torch.randint(0, 3, (96,), generator=g)
    ends = [0, 9, 20, 28, 41, 50, 66, 80, 96]
    parts = [(x[a:b], y[a:b]) for a, b in itertools.pairwise(ends)]
    return sparing.Task(normed_net, train=parts, test=(x, y))


class ThreeRuns(NamedTuple):
    open: sparing.Result  # without masks, on the fast engine
    debug: sparing.Result  # with masks
    vector: sparing.Result
    folder: Path

    def ledger(self, name: str) -> list[dict[str, str]]:
        return ledger_of(self.folder / name)


def ledger_of(folder: Path) -> list[dict[str, str]]:
    with open(folder / "ledger.csv") as file:
        return list(csv.DictReader(file))


def play(method: Any, folder: Path, task: Any = TASK, secure: Any = True, **other: Any) -> ThreeRuns:
    study = STUDY | {"plan": {"path": "loop", "chunk": 4}} | other
    ways = {"debug": ("debug", secure), "vector": ("vector", secure), "open": ("vector", False)}
    found = {
        name: sparing.run(task, method, engine=engine, secure=how, out=folder / name, **study)
        for name, (engine, how) in ways.items()
    }
    return ThreeRuns(**found, folder=folder)


def method_name(method: Any) -> str:
    parts = [method] if isinstance(method, str) else method
    return "+".join(
        part if isinstance(part, str) else f"{next(iter(part))} {next(iter(part.values()))}" for part in parts
    )
