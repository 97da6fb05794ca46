"""FedHM's three blends and FedAvg: the tasks and settings of `methods.py`, and a short run of ResNet-18 on CIFAR-100.

Each method trains with the learning rate and the temperature of its row in docs/early-results.md, all three blends
with those of the published one. Every finished run is a line of the results file; those that are there are not run
again.

    python benchmarks/fedhm.py [--tasks writers fashion cifar100 resnet18] [--seeds 0 1 2] [--device cuda]
                               [--precision float32] [--minutes 12] [--results FILE] [--rounds N] [--table]
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from kept import read
from methods import TASKS, VALIDATION

import sparing
from sparing.core.errors import TrainingError

BLENDS = ("products", "increments", "partitioned")
METHODS = ("fedavg", *BLENDS)
SETTINGS: dict[str, dict[str, Any]] = {  # FedAvg's and FedHM's rows of docs/early-results.md
    "writers": {"fedavg": 0.08, "weight_decay": 0.001, "fedhm": 0.08, "temperature": 1.0},
    "fashion": {"fedavg": 0.03, "fedhm": 0.03, "temperature": 1.0},
    "cifar100": {"fedavg": 0.002, "fedhm": 0.002, "temperature": 0.3},
    "resnet18": {"fedavg": 0.05, "fedhm": 0.05, "temperature": 1.0},
}
RESNET = {
    "task": {"data": "cifar100", "clients": 50, "split": "iid", "model": "resnet18"},
    "local": {"epochs": 1, "batch": 50},
    "sample": 8,
    "rounds": 40,
}
SEEDS_OF = {"resnet18": (0,)}
"""One seed of the long run."""


def train(task: str, method: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    about, settings = TASKS.get(task, RESNET), SETTINGS[task]
    rounds = args.rounds or about["rounds"]
    spec = [{"fedhm": {"blend": method, "temperature": settings["temperature"]}}] if method in BLENDS else ["fedavg"]
    lr = settings["fedhm" if method in BLENDS else "fedavg"]
    local = {**about["local"], "lr": lr}
    if method == "fedavg":
        local["weight_decay"] = settings.get("weight_decay", 0.0)
    began = time.perf_counter()
    row = {"task": task, "method": method, "seed": seed, "rounds": rounds, "lr": lr, "precision": args.precision}
    try:
        result = sparing.run(
            about["task"] | ({} if task == "resnet18" else {"validation": VALIDATION}),
            spec,
            rounds=rounds,
            sample=about["sample"],
            local=local,
            seed=seed,
            device=args.device,
            plan={"precision": args.precision},
            evaluate={"every": max(1, rounds // 6), "who": ["global", "before"]},
        )
    except TrainingError as error:  # a run that diverges is a result, too
        return row | {"failed": str(error), "seconds": time.perf_counter() - began}
    return row | {
        "global": result.accuracy,
        "personal": result.personal_accuracy,
        "curve": {record.round: record.accuracy for record in result.table if record.accuracy is not None},
        "up": result.up_bytes / 1e6,
        "down": result.down_bytes / 1e6,
        "seconds": time.perf_counter() - began,
    }


def mark(row: dict[str, Any]) -> tuple:
    return row["task"], row["method"], row["seed"]


def spread(values: list[float]) -> str:
    """Mean and standard deviation with n - 1; one seed has none."""
    each = [100 * x for x in values]
    return f"{statistics.mean(each):.1f}" + (f" ± {statistics.stdev(each):.1f}" if len(each) > 1 else " (one seed)")


def table(done: list[dict[str, Any]]) -> str:
    lines = ["| task | method | global | personal | global at half | diverged | MB up | s |", "|---" * 8 + "|"]
    for task in SETTINGS:
        for method in METHODS:
            runs = [r for r in done if (r["task"], r["method"]) == (task, method)]
            fine = [r for r in runs if "failed" not in r]
            if not runs:
                continue
            name = method if method == "fedavg" else f"fedhm {method}"
            lost, took = f"{len(runs) - len(fine)} of {len(runs)}", statistics.mean(r["seconds"] for r in runs)
            cells = ["-"] * 3 + [lost, "-", f"{took:.0f}"]
            if fine:
                half = [nearest_half(r) for r in fine]
                cells[:3] = [spread(x) for x in ([r["global"] for r in fine], [r["personal"] for r in fine], half)]
                cells[4] = f"{statistics.mean(r['up'] for r in fine):.1f}"
            lines.append("| " + " | ".join([task, name, *cells]) + " |")
    return "\n".join(lines)


def nearest_half(row: dict[str, Any]) -> float:
    """The accuracy that was measured nearest to the middle of the run."""
    return row["curve"][min(row["curve"], key=lambda t: abs(2 * int(t) - row["rounds"]))]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tasks", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    options.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options.add_argument("--device", default="auto")
    options.add_argument("--precision", default="float32")
    options.add_argument("--minutes", type=float, default=float("inf"), help="start no run after so many")
    options.add_argument("--rounds", type=int, help="fewer rounds, to try it out")
    options.add_argument("--results", type=Path, default=Path("benchmarks/results/fedhm.jsonl"))
    options.add_argument("--table", action="store_true", help="print what the file holds, and run nothing")
    args = options.parse_args()
    began = time.perf_counter()
    every = [(task, seed, method) for task in args.tasks for seed in args.seeds for method in args.methods]
    every = [one for one in every if one[0] not in SEEDS_OF or one[1] in SEEDS_OF[one[0]]]
    args.results.parent.mkdir(parents=True, exist_ok=True)
    for task, seed, method in () if args.table else every:
        if (task, method, seed) in {mark(row) for row in read(args.results)}:
            continue
        if time.perf_counter() - began > 60 * args.minutes:
            print(f"stopped after {args.minutes:g} minutes, before {task}, {method}, seed {seed}")
            break
        row = train(task, method, seed, args)
        with open(args.results, "a") as file:
            file.write(json.dumps(row) + "\n")
        came = row.get("global", row.get("failed"))
        print(f"{task}, {method}, seed {seed}: {came}, {row['seconds']:.0f} s", flush=True)
    print(table(read(args.results)))


if __name__ == "__main__":
    main()
