"""What small updates cost in time: FedAvg and the codecs that save most bytes, alternated in one process.

superclass  20 clients x 2,500 images 3x32x32, all in a round, the CNN of the FedAvg paper (2.2M), batch 32
cnn         pfl's CIFAR-10 network, 1,000 clients x 50 images; 10 a round on a CPU, 50 on a GPU, batch 10
digits      scikit-learn's digits, 20 clients, 8 a round, a small CNN

Whole runs, as `sparing.run` plays them: every round is evaluated and one upload is really written and compared.
A row is the median over repetitions of the mean time of a run's rounds after the first few, and its ratio to FedAvg's;
then the same of processor time, which says more where other programs run beside it.

    python benchmarks/codec_costs.py [--shapes superclass cnn] [--device cuda] [--plan precision=bf16] [--repeats 5]
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from peers.shapes import cnn

import sparing
from sparing.models import build_network

METHODS: dict[str, Any] = {
    "fedavg": "fedavg",
    "topk+int8+memory": "topk+int8+memory",
    "topk+int8+memory+tight, broadcast": "topk+int8+memory+tight+broadcast",
    "ecsq+memory, broadcast": "ecsq+memory+broadcast",
    "lowrank, broadcast": "lowrank+broadcast",
    "budget 20 kB, broadcast": [{"budget": "20kB"}, "broadcast"],
}
SKIPPED = 3
"""Rounds before the clock starts."""


def superclass() -> torch.nn.Module:
    return build_network("fedavg-cnn", (3, 32, 32), 20)


def task_of(shape: str, device: str) -> tuple[Any, dict[str, Any]]:
    """Clients and their network, and the rest of the study."""
    if shape == "digits":
        task = {"data": "digits", "clients": 20, "split": {"dirichlet": 0.3}, "model": "cnn"}
        return task, {"sample": 8, "local": {"epochs": 3, "batch": 16, "lr": 0.1, "momentum": 0.9}}
    large = shape == "superclass"
    clients, n = (20, 2500) if large else (1000, 50)
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(clients * n, 3, 32, 32, generator=g), torch.randint(10, (clients * n,), generator=g)
    parts = [(x[i : i + n], y[i : i + n]) for i in range(0, len(x), n)]
    task = sparing.Task(superclass if large else cnn, train=parts, test=(x[:1000], y[:1000]))
    sample = 20 if large else 10 if device == "cpu" else 50
    return task, {"sample": sample, "local": {"epochs": 1, "batch": 32 if large else 10, "lr": 0.05}}


def seconds_a_round(task: Any, method: Any, rounds: int, study: dict[str, Any]) -> tuple[float, float]:
    """On the clock, and of the processor, its cores added up."""
    marks: list[tuple[float, float]] = []
    total = rounds + SKIPPED

    def mark(record: Any) -> None:
        marks.append((time.perf_counter(), time.process_time()))

    sparing.run(task, method, rounds=total, loggers=[mark], **study)
    (began, spent), (ended, used) = marks[SKIPPED - 1], marks[-1]
    return (ended - began) / rounds, (used - spent) / rounds


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shapes", nargs="*", default=["superclass", "cnn", "digits"])
    options.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--device", default="cpu")
    options.add_argument("--plan", nargs="*", default=[], metavar="KEY=VALUE")
    options.add_argument("--json", type=Path, default=Path("runs/codec_costs.json"))
    args = options.parse_args()
    plan = {key: yaml.safe_load(value) for key, value in (item.split("=", 1) for item in args.plan)}
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {args.device}, {args.repeats} x {args.rounds} rounds")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for shape in args.shapes:
        task, study = task_of(shape, args.device)
        study |= {"device": args.device, "plan": plan}
        times = found[shape] = {name: [] for name in args.methods}
        for _ in range(args.repeats):
            for name in args.methods:
                times[name].append(seconds_a_round(task, METHODS[name], args.rounds, study))
                args.json.write_text(json.dumps(found, indent=1))
        base = [statistics.median(kind) for kind in zip(*times[args.methods[0]], strict=True)]
        for name, seconds in times.items():
            clock, cpu = (statistics.median(kind) for kind in zip(*seconds, strict=True))
            beside = f"{clock / base[0]:6.2f}x  processor {1000 * cpu:9.1f} ms  {cpu / base[1]:6.2f}x"
            print(f"{shape:11} {name:34} {1000 * clock:9.1f} ms  {beside}", flush=True)


if __name__ == "__main__":
    main()
