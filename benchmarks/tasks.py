"""Seven tasks, each with FedAvg, local training and personal layers: a first table, and the picture of each split.

The datasets must be where `sparing data` finds them. Writes docs/pictures/NAME.png and prints a Markdown table.

    python benchmarks/tasks.py [NAME ...] [--seed 0] [--pictures docs/pictures]
"""

import argparse
import platform
import time
from pathlib import Path

import torch

import sparing
from sparing.reports.split_picture import draw_split
from sparing.split import split_report
from sparing.tasks.build import load_and_partition

SGD = {"lr": 0.05, "momentum": 0.9}
TASKS = {
    "cifar100-superclass": {
        "task": {"data": "cifar100", "split": "superclass", "model": "fedavg-cnn"},
        "local": {"lr": 0.05, "epochs": 1, "batch": 32},
        "sample": 20,
        "rounds": 60,
    },
    "mnist-writers": {
        "task": {"data": "mnist-writers", "split": "writer", "model": "lenet5"},
        "local": {**SGD, "epochs": 2, "batch": 10},
        "sample": 30,
        "rounds": 25,
    },
    "fashion-dirichlet": {
        "task": {"data": "fashion-mnist", "split": {"dirichlet": 0.1}, "clients": 20, "model": "lenet5"},
        "local": {**SGD, "lr": 0.02, "epochs": 1, "batch": 32},
        "sample": 5,
        "rounds": 20,
    },
    "mnist-styles": {
        "task": {"data": "mnist", "split": "styles", "clients": 20, "model": "lenet5"},
        "local": {**SGD, "lr": 0.02, "epochs": 1, "batch": 32},
        "sample": 5,
        "rounds": 20,
    },
    "mnist-quantity": {
        "task": {"data": "mnist", "split": {"quantity": 1.0}, "clients": 50, "model": "lenet5"},
        "local": {**SGD, "lr": 0.02, "epochs": 1, "batch": 32},
        "sample": 10,
        "rounds": 20,
    },
    "office-domains": {
        "task": {"data": "office-caltech10", "split": "domain", "model": "lenet5"},
        "local": {**SGD, "lr": 0.02, "epochs": 2, "batch": 32},
        "sample": 4,
        "rounds": 25,
    },
    "shakespeare-roles": {
        "task": {
            "data": "shakespeare",
            "split": {"role": {"least": 40}},
            "clients": 60,
            "model": {"lstm": {"hidden": 64, "layers": 1}},
        },
        "local": {"lr": 1.0, "clip": 5.0, "epochs": 1, "batch": 10},
        "sample": 10,
        "rounds": 20,
    },
}
METHODS = ("fedavg", "local", "personal")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("names", nargs="*", default=list(TASKS))
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--pictures", type=Path, default=Path("docs/pictures"))
    args = options.parse_args()
    args.pictures.mkdir(parents=True, exist_ok=True)
    print(f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads, seed {args.seed}\n")
    print("| task | method | global | personal | worst decile | MB up | MB down | seconds |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in args.names:
        study = dict(TASKS[name])
        task = study["task"]
        pool, parts = load_and_partition(task["data"], task.get("clients"), task["split"], args.seed)
        draw_split(split_report(parts, pool), args.pictures / f"{name}.png")
        for method in METHODS:
            began = time.perf_counter()
            result = sparing.run(method=method, seed=args.seed, evaluate={"every": study["rounds"]}, **study)
            numbers = (result.accuracy, result.personal_accuracy, result.worst_decile)
            cells = [f"{100 * x:.1f} %" for x in numbers]
            cells += [f"{result.up_bytes / 1e6:.2f}", f"{result.down_bytes / 1e6:.2f}"]
            print(f"| {name} | {method} | {' | '.join(cells)} | {time.perf_counter() - began:.0f} |", flush=True)


if __name__ == "__main__":
    main()
