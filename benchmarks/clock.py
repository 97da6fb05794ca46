"""Seconds to an accuracy on slow links: MNIST by writer, mixed links, the virtual clock of docs/fleet.md.

The same rates for every method, drawn anew for each seed. FedAvg with a deadline loses whoever is too slow; `budget`
with one lets every client send what its link has time for.

    python benchmarks/clock.py [METHOD ...] [--rounds 40] [--seeds 3] [--target 0.9]
"""

import argparse
import math
import platform
import statistics
import time
from typing import Any

import torch
from over_seeds import mean_spread

import sparing

TASK = {"data": "mnist-writers", "split": "writer", "clients": 100, "model": "lenet5"}
LOCAL = {"epochs": 2, "batch": 20, "momentum": 0.9, "lr": 0.08}
FLEET = {"links": {"kind": "mixed", "speed": 2000, "spread": 0.3}, "latency": 0.05}
DEADLINE = 1.5
METHODS: dict[str, tuple[Any, float | None]] = {
    "fedavg": ("fedavg", None),
    "fedavg, deadline 1.5 s": ("fedavg", DEADLINE),
    "top 3 % with memory": ([{"topk": {"ratio": 0.03, "memory": True}}], None),
    "lowrank": ("lowrank", None),
    "stc": ("stc", None),
    "budget, deadline 1.5 s": ("budget", DEADLINE),
}


def play(method: Any, deadline: float | None, seed: int, rounds: int) -> sparing.Result:
    return sparing.run(
        TASK,
        method,
        rounds=rounds,
        sample=20,
        local=LOCAL,
        seed=seed,
        plan={"threads": 1},
        evaluate={"every": 2, "who": ["global"]},
        fleet={**FLEET, "deadline": deadline},
    )


def cell(values: list[float], digits: int) -> str:
    """Mean and spread over the seeds; "never" if one of them did not get there."""
    if any(math.isnan(x) for x in values):
        return "never"
    return mean_spread(values, digits)


def row(label: str, results: list[sparing.Result], target: float) -> str:
    late = [record.metrics.get("late", 0.0) for r in results for record in r.table]
    cells = [
        label,
        cell([r.time_to(target) for r in results], 0),
        cell([r.rounds_to(target) for r in results], 0),
        cell([r.bytes_to(target) / 1e6 for r in results], 1),
        cell([r.metric("clock")[-1] / r.rounds for r in results], 2),
        f"{statistics.mean(late):.1f}",
        cell([100 * r.accuracy for r in results], 1),
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument(
        "methods", nargs="*", default=[*METHODS], metavar="METHOD", help="a row; all of them by default"
    )
    options.add_argument("--rounds", type=int, default=40)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--target", type=float, default=0.9)
    args = options.parse_args()
    if unknown := set(args.methods) - METHODS.keys():
        options.error(f"no such row: {'; '.join(sorted(unknown))}. There are: {'; '.join(METHODS)}")
    torch.set_num_threads(1)
    began, goal = time.perf_counter(), f"{100 * args.target:g} %"
    print(
        f"| method | seconds to {goal} | rounds | MB both ways | seconds a round | late a round | accuracy at the end |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for label in args.methods:
        method, deadline = METHODS[label]
        results = [play(method, deadline, seed, args.rounds) for seed in range(args.seeds)]
        print(row(label, results, args.target), flush=True)
    used = f"{platform.machine()}, torch {torch.__version__}, one thread, seeds 0 to {args.seeds - 1}"
    print(f"\n{used}, {args.rounds} rounds, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
