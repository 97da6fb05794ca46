"""The cases of golden.py: every recipe alone, the combinations that the tests try, the paths, and a fleet's troubles.

A case is a name and what `sparing.run` is given; LOOP stands for the name of the CPU loop path, and a path of a file
for what a case says its clients declare. Only the public interface is used, so that a case means the same in any tree.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from golden_methods import (
    COMBINATIONS,
    OPTIONS,
    PARTITIONED,
    PLAIN,
    PRODUCTS,
    PUBLISHED,
    QUARTERS,
    RECIPES,
    ROBUST,
    title,
)
from torch import nn

import sparing

LOOP = "LOOP"
SECRET = bytes(range(32))
DIGITS = {"data": "digits", "clients": 12, "split": {"dirichlet": 0.3}, "model": "cnn"}
DENSE = {**DIGITS, "model": {"mlp": {"hidden": [20, 12]}}}
STUDY = {
    "rounds": 3,
    "sample": 5,
    "seed": 5,
    "local": {"steps": 2, "batch": 16, "lr": 0.1},
    "evaluate": {"every": 3},
    "device": "cpu",
}
SHARES = (1, 0.13, 0.3, 0.5, 0.01, 1, 0.25, 0.6, 0.125, 0.9, 0.5, 0.2)
"""What clients 0 to 11 declare that they can afford."""


class Case(NamedTuple):
    name: str
    task: Any
    method: Any
    study: dict[str, Any]
    stop: int | None = None  # the round after which the run breaks off, to be resumed


def cases() -> Iterator[Case]:
    yield from alone()
    yield from combined()
    yield from by_path()
    yield from in_a_fleet()
    yield from trained_otherwise()
    yield from evaluated()
    yield from broken_off()


def case(
    name: str, method: Any, task: Any = DIGITS, stop: int | None = None, engine: str = "vector", **more: Any
) -> Case:
    """The usual study with some keys changed; `local` and `plan` are changed key by key."""
    plan = {"path": LOOP, "chunk": 3, "threads": 1, "bank": "memory"}
    plan |= {"parcels": "kept"} if engine == "debug" else {}
    study = {**STUDY, "plan": plan | more.pop("plan", {}), "engine": engine}
    study["local"] = STUDY["local"] | more.pop("local", {})
    return Case(f"{name} [{engine}]", task, method, study | more, stop)


def in_both(name: str, method: Any, **more: Any) -> Iterator[Case]:
    yield case(name, method, engine="vector", **more)
    yield case(name, method, engine="debug", **more)


def alone() -> Iterator[Case]:
    for entry in RECIPES:
        yield from in_both(f"alone: {title(entry)}", [entry])
    for method in OPTIONS:
        yield from in_both(f"options: {title(method)}", method)


def combined() -> Iterator[Case]:
    """With drop-outs; on two threads where clients are not trained one by one anyway."""
    fleet = {"dropout": 0.2}
    for method in COMBINATIONS:
        name = f"combined: {title(method)}"
        yield case(name, method, fleet=fleet, rounds=4, plan={"chunk": 2, "threads": 2})
        yield case(name, method, fleet=fleet, rounds=4, engine="debug")
    for method in ROBUST:
        for kind in ("sign-flip", "nan"):
            fleet = {"dropout": 0.2, "attack": {"kind": kind, "share": 0.25}}
            yield from in_both(f"{kind}: {title(method)}", method, task=DENSE, sample=8, fleet=fleet)
    for kind in ("label-flip", "scaled"):
        for method in ("fedavg", "median", "topk+memory"):
            fleet = {"attack": {"kind": kind, "share": 0.25}}
            yield from in_both(f"{kind}: {method}", method, task=DENSE, sample=8, fleet=fleet)


def by_path() -> Iterator[Case]:
    for method in PLAIN:
        for model, task in (("cnn", DIGITS), ("mlp", DENSE)):
            yield case(f"stacked, {model}: {title(method)}", method, task=task, plan={"path": "stacked"})
        yield case(f"implicit: {title(method)}", method, task=DENSE, plan={"path": "implicit"})
        yield case(f"loop, mlp: {title(method)}", method, task=DENSE, plan={"threads": 2})
    for method in ("fedavg", "psfed+topk+int8+memory"):
        yield case(f"one at a time: {method}", method, plan={"chunk": 1})
        yield case(f"all at once: {method}", method, plan={"chunk": 64})
        yield case(f"plan left open: {method}", method, plan={"path": "auto", "chunk": "auto", "threads": "auto"})
        yield case(f"stacked, two threads: {method}", method, plan={"path": "stacked", "chunk": 4, "threads": 2})


def in_a_fleet() -> Iterator[Case]:
    slow = {"links": {"up": 0.05, "down": 2, "speed": 200, "spread": 0.7}, "latency": 0.05, "deadline": 3.0}
    for method in (
        "fedavg",
        "budget",
        "topk+memory",
        [{"budget": "1kB"}, "fedavgm"],
        "psfed+budget",
        "ef21",
        "broadcast",
    ):
        yield from in_both(f"deadline: {title(method)}", method, fleet={**slow, "dropout": 0.1})
    for method in ("fedavg", "psfed+topk+memory", "stein", "scaffold", "broadcast", "pfedsim"):
        yield from in_both(f"hardly anybody: {method}", method, fleet={"available": 0.4, "dropout": 0.5}, rounds=6)
    yield from in_both("links: fedavg", "fedavg", fleet={"links": {"kind": "mixed", "speed": 2000}, "latency": 0.05})
    trace = {"trace": declared("client,from,to", [f"{i},{i % 3 + 1},4" for i in range(12)])}
    yield from in_both("trace: psfed", "psfed", fleet=trace, rounds=5)
    for what, methods in (
        ("rank", ("fedhm", [PRODUCTS], [PARTITIONED], "fedhm+int8", "personal+fedhm+topk")),
        ("width", ("heterofl", "split-mix", "heterofl+topk+int8", ["personal", QUARTERS], "heterofl+median")),
    ):
        fleet = {"capacity": declared(f"client,{what}", [f"{i},{x}" for i, x in enumerate(SHARES)]), "dropout": 0.2}
        for method in methods:
            yield from in_both(f"capacity: {title(method)}", method, fleet=fleet, sample=8)
            yield case(f"capacity, stacked: {title(method)}", method, fleet=fleet, sample=8, plan={"path": "stacked"})


def declared(header: str, lines: list[str]) -> str:
    """A file for a fleet, in a folder that lasts as long as this process."""
    path = Path(FILES.name) / f"{header.replace(',', '-')}.csv"
    path.write_text("\n".join([header, *lines, ""]))
    return str(path)


FILES = tempfile.TemporaryDirectory()


def normed() -> nn.Module:
    """Buffers of both kinds, dropout, and a batch norm on each side of the dense layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        body = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.3), nn.Flatten())
        return nn.Sequential(body, nn.Linear(24, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))


def own_task() -> sparing.Task:
    g = torch.Generator().manual_seed(1)
    data = [(torch.randn(7 + k, 2, 4, 4, generator=g), torch.arange(7 + k) % 3) for k in range(8)]
    return sparing.Task(normed, train=data, test=data, probe=data[0])


def trained_otherwise() -> Iterator[Case]:
    kept = {"momentum": 0.9, "velocity": "kept"}
    for method in ("fedavg", "psfed+topk+memory", "personal", [{"psfed": {"reset_momentum": True}}], "fedrep"):
        yield from in_both(f"kept momentum: {title(method)}", method, local=kept, plan={"bank": "file"}, rounds=4)
        yield case(f"kept momentum, stacked: {title(method)}", method, local=kept, plan={"path": "stacked"}, rounds=4)
    for name, local in (
        ("momentum", {"momentum": 0.9, "weight_decay": 0.01}),
        ("adam", {"optimiser": "adam", "lr": 0.003, "weight_decay": 0.01}),
        ("clip", {"clip": 0.5, "prox": 0.1}),
        ("epochs", {"epochs": 2, "steps": None, "batch": 7}),
    ):
        for method in ("fedavg", "psfed+int8", "ditto"):
            yield from in_both(f"{name}: {method}", method, local=local)
            yield case(f"{name}, stacked: {method}", method, local=local, plan={"path": "stacked"})
        yield case(f"{name}, implicit: fedavg", "fedavg", task=DENSE, local=local, plan={"path": "implicit"})
    for buffers in ("shared", "own", "static"):
        for method in (
            "fedavg",
            "psfed+topk+memory",
            "scaffold",
            "ditto",
            "heterofl",
            "fedhm",
            "broadcast",
            "dp",
            "median",
        ):
            name, local = f"norms and dropout, {buffers}: {method}", {"buffers": buffers, "batch": 4}
            yield from in_both(name, method, task=own_task(), local=local)
            yield case(f"stacked, {name}", method, task=own_task(), local=local, plan={"path": "stacked"})
    varied = {**DIGITS, "augment": ["flip", {"crop": {"padding": 2}}]}
    for path in (LOOP, "stacked"):
        yield case(f"augmented, {path}: psfed", "psfed", task=varied, plan={"path": path})
    yield case("augmented: fedavg", "fedavg", task=varied, engine="debug")
    gradient = [{"psfed": {"selector": "gradient", "source": "probe"}}]
    yield from in_both("probe: digits", gradient, task={**DIGITS, "probe": 60})
    yield from in_both("probe: own task", gradient, task=own_task(), local={"batch": 4})
    layers = {"personalized_layers": ["dense", "head"]}
    yield from in_both("layers named: personal+int8", "personal+int8", personalization=layers)
    adapted = {**DIGITS, "model": {"cnn": {"adapter": 8}}}
    yield from in_both("adapter: personal", "personal", task=adapted)
    for model in ("fedavg-cnn", {"mlp": {"hidden": [20, 20]}}):
        yield case(f"model {title(model)}: topk+int8", "topk+int8", task={**DIGITS, "model": model})
    yield case("bf16 training: fedavg", "fedavg", plan={"precision": "bf16"})


def evaluated() -> Iterator[Case]:
    """Also of clients that are held out, and by the validation samples."""
    held = {**DIGITS, "held_out": 2}
    everyone = {"every": 2, "who": ["global", "before", "after", "new"], "steps": 3}
    for method in (
        "fedavg",
        "personal",
        "psfed+topk+memory",
        "pfedsim",
        "ditto",
        "finetune",
        "fedbabu",
        "scaffold",
        [PUBLISHED],
    ):
        yield from in_both(f"held out: {title(method)}", method, task=held, evaluate=everyone)
    looked = {"every": 1, "set": "validation"}
    yield case("validation: personal", "personal", task={**DIGITS, "validation": 0.2}, evaluate=looked)
    yield case("recorded: psfed", "psfed", record=["updates", "similarity"])


def broken_off() -> Iterator[Case]:
    """Stopped in the middle and resumed, with a checkpoint every other round."""
    for method in (
        "psfed+topk+int8+memory", [PUBLISHED], [{"fedscr": {"adaptive": True}}], "fedhm", "stein+topk+memory",
        "ditto+topk+memory", "scaffold", "fedyogi", ["personal", {"broadcast": {"by": "lowrank"}}], "heterofl",
        [{"dp": {"adaptive": True}}], ["psfed", {"dp": {"mode": "local"}}, "topk"], "ef21", "split-mix", "dgc",
    ):  # fmt: skip
        for bank in ("memory", "file"):
            name = f"resumed, bank {bank}: {title(method)}"
            yield case(name, method, rounds=6, stop=3, checkpoint=2, plan={"bank": bank}, fleet={"dropout": 0.2})
    yield case("resumed: personal+ef21", "personal+ef21", engine="debug", rounds=6, stop=3, checkpoint=2)
