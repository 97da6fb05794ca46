"""Which combinations of recipes are refused, and in which sentence, by the public interface alone.

A run refuses what it can before it writes anything, and a folder that holds a run already is refused last. So a method
is tried on such a folder: it is sound if that folder is all that is said to be wrong. Nothing is trained.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from golden_methods import RECIPES, title
from torch import nn

import sparing

VARIANTS: tuple[Any, ...] = (
    {"topk": {"over": "model", "memory": True}},
    {"randk": {"unbiased": True}},
    {"eden": {"unbiased": False}},
    {"stc": {"down": False}},
    {"dp": {"mode": "local"}},
    {"obfuscate": {"rotate": True}},
    {"pfedsim": {"mode": "published"}},
    {"pfedsim": {"at": "client"}},
    {"fedscr": {"aggregation": "unbiased"}},
    {"fedhm": {"weighting": "samples"}},
    {"scaffold": {"weights": "samples"}},
    {"broadcast": {"by": "lowrank"}},
    {"broadcast": {"by": [{"budget": "20kB"}]}},
)
"""Options that change what a recipe goes with."""
MIDDLE: tuple[Any, ...] = (
    "memory", "broadcast", "dp", "ef21", "tight", {"budget": "3kB"}, "fedhm", "split-mix", "scaffold", "ditto",
)  # fmt: skip
AROUND = ("topk", "int8", "psfed", "personal", "stein", "pfedsim")
"""Triples have at least one recipe of MIDDLE; the others are of both."""


def combinations() -> list[tuple[str, ...]]:
    """Titles: single recipes, all ordered pairs, pairs with VARIANTS, and the triples."""
    recipes, variants = [title(x) for x in RECIPES], [title(x) for x in VARIANTS]
    middle, around = [title(x) for x in MIDDLE], list(AROUND)
    pairs = [pair for pair in itertools.permutations(recipes + variants, 2) if not set(pair) <= set(variants)]
    triples = [t for t in itertools.permutations(middle + around, 3) if not set(t) <= set(around)]
    return [(name,) for name in recipes + variants] + pairs + triples


ENTRIES = {title(entry): entry for entry in (*RECIPES, *VARIANTS, *MIDDLE, *AROUND)}


def plain() -> nn.Module:
    dense = nn.Sequential(nn.Flatten(), nn.Linear(128, 24), nn.ReLU(), nn.Linear(24, 20))
    return nn.Sequential(nn.Conv2d(1, 16, 3), nn.Conv2d(16, 32, 1), dense, nn.Linear(20, 3))


def normed() -> nn.Module:
    dense = nn.Sequential(nn.Flatten(), nn.Linear(128, 24), nn.ReLU(), nn.Linear(24, 20))
    return nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 32, 1), dense, nn.Linear(20, 3))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"plain": plain, "norms": normed}
"""The second one has buffers; there, single recipes and pairs of RECIPES only."""


def refusals(wanted: Sequence[tuple[str, ...]], loop: str, said: Callable[[str], None]) -> Iterator[tuple[str, str]]:
    """(network: combination, the sentence in which it is refused, or nothing)."""
    known = {title(x) for x in RECIPES}
    with tempfile.TemporaryDirectory() as place:
        for network, build in NETWORKS.items():
            judge = judge_of(build, Path(place) / network, loop)
            tried = [names for names in wanted if network == "plain" or (len(names) < 3 and set(names) <= known)]
            for i, names in enumerate(tried, 1):
                if i % 50 == 0:
                    said(f"{network}: combination {i} of {len(tried)}")
                yield f"{network}: {'+'.join(names)}", judge([ENTRIES[name] for name in names])


def judge_of(build: Callable[[], nn.Module], taken: Path, loop: str) -> Callable[[list[Any]], str]:
    """A function of a method that says why it is refused, or nothing; `taken` becomes a folder that holds a run."""
    g = torch.Generator().manual_seed(1)
    data = [(torch.rand(6, 1, 4, 4, generator=g), torch.arange(6) % 3) for _ in range(3)]
    task = sparing.Task(build, train=data, test=data, probe=data[0])
    study = {"rounds": 1, "sample": 2, "local": {"steps": 1, "batch": 6}, "device": "cpu"}
    study["plan"] = {"path": loop, "chunk": 2, "threads": 1, "bank": "memory"}
    sparing.run(task, "fedavg", out=taken, **study)

    def judge(method: list[Any]) -> str:
        try:
            sparing.run(task, method, out=taken, **study)
        except Exception as error:
            return "" if str(taken) in str(error) else f"{type(error).__name__}: {error}"
        raise SystemExit(f"{taken} was written twice: a folder that holds a run is no longer refused")

    if judge(["fedavg"]) or not judge(["int8", "qsgd"]):
        raise SystemExit("a method is no longer judged before its folder; find another way to ask without training")
    return judge
