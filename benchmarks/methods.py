"""All methods on real data: settings chosen on the validation split with an equal budget for each, then three seeds.

Every method gets the same six trials (three learning rates, two values of one setting of its own), judged by personal
accuracy on the clients' validation samples: full runs on MNIST by writer, a third of the rounds on the larger tasks.
The winner trains in full with seeds 0, 1, 2 and is judged on the test samples. Results are kept in a file, so a run
that was stopped goes on.

    python benchmarks/methods.py TASK [--jobs 2] [--device cpu] [--results FILE]      sweep, train, print the table
    python benchmarks/methods.py TASK --table                                         print what the file holds
"""

import argparse
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from kept import read, run_all
from over_seeds import mean_spread

TASKS: dict[str, dict[str, Any]] = {
    "writers": {
        "task": {"data": "mnist-writers", "split": "writer", "clients": 100, "model": "lenet5"},
        "local": {"epochs": 2, "batch": 20, "momentum": 0.9},
        "lrs": (0.01, 0.03, 0.08),
        "sample": 20,
        "rounds": 60,
        "sweep": 60,
    },
    "fashion": {
        "task": {"data": "fashion-mnist", "split": {"dirichlet": 0.1}, "clients": 20, "model": "lenet5"},
        "local": {"epochs": 1, "batch": 32, "momentum": 0.9},
        "lrs": (0.01, 0.03, 0.08),
        "sample": 10,
        "rounds": 30,
        "sweep": 10,
    },
    "cifar100": {
        "task": {"data": "cifar100", "split": "superclass", "model": "fedavg-cnn"},
        "local": {"epochs": 1, "batch": 32, "momentum": 0.9},
        "lrs": (0.002, 0.005, 0.015),
        "sample": 10,
        "rounds": 36,
        "sweep": 12,
    },
}
VALIDATION = 0.2
SEEDS = (0, 1, 2)

METHODS: dict[str, tuple[str, tuple[Any, Any], Any]] = {  # label: its setting, two values of it, the method list
    "local": ("weight_decay", (0.0, 1e-3), lambda v: ["local"]),
    "fedavg": ("weight_decay", (0.0, 1e-3), lambda v: ["fedavg"]),
    "personal": ("weight_decay", (0.0, 1e-3), lambda v: ["personal"]),
    "psfed": ("fraction", (0.3, 0.7), lambda v: [{"psfed": {"fraction": v}}]),
    "fedsim": ("q", (0, 1), lambda v: [{"fedsim": {"q": v}}]),
    "pfedsim": ("q", (0, 1), lambda v: [{"pfedsim": {"q": v}}]),
    "pfedsim published": ("warmup", (0.3, 0.5), lambda v: [{"pfedsim": {"mode": "published", "warmup": v}}]),
    "fedscr": ("threshold", (0.1, 0.3), lambda v: [{"fedscr": {"threshold": v}}]),
    "fedscr adaptive": ("threshold", (0.1, 0.3), lambda v: [{"fedscr": {"threshold": v, "adaptive": True}}]),
    "fedhm": ("temperature", (1.0, 0.3), lambda v: [{"fedhm": {"temperature": v}}]),
    "sr-fedavg": ("beta", (0.5, 0.9), lambda v: [{"sr-fedavg": {"beta": v}}]),
    "sr-fedavg + top-k": ("beta", (0.5, 0.9), lambda v: [{"sr-fedavg": {"beta": v, "topk": 0.1}}]),
    "top-k with memory": ("ratio", (0.03, 0.1), lambda v: [{"topk": {"ratio": v, "memory": True}}]),
    "psfed+pfedsim+int8": ("fraction", (0.3, 0.7), lambda v: [{"psfed": {"fraction": v}}, "pfedsim", "int8"]),
    "int4": ("stochastic", (False, True), lambda v: [{"int4": {"stochastic": v}}]),
    "qsgd": ("levels", (7, 127), lambda v: [{"qsgd": {"levels": v}}]),
    "sign": ("memory", (False, True), lambda v: [{"sign": {"memory": v}}]),
    "ternary": ("weight_decay", (0.0, 1e-3), lambda v: ["ternary"]),
    "stc": ("ratio", (0.01, 0.03), lambda v: [{"stc": {"ratio": v}}]),
    "eden": ("bits", (1, 2), lambda v: [{"eden": {"bits": v}}]),
    "powersgd": ("rank", (2, 8), lambda v: [{"powersgd": {"rank": v}}]),
    "ef21": ("ratio", (0.03, 0.1), lambda v: [{"ef21": {"ratio": v}}]),
    "dgc": ("ratio", (0.03, 0.1), lambda v: [{"dgc": {"ratio": v}}]),
    "drop": ("ratio", (0.03, 0.1), lambda v: [{"drop": {"ratio": v}}]),
    "prune": ("keep", (0.3, 0.7), lambda v: [{"prune": {"keep": v}}]),
    "fedavgm": ("beta", (0.5, 0.9), lambda v: [{"fedavgm": {"beta": v}}]),
    "fedadam": ("server lr", (0.003, 0.01), lambda v: [{"fedadam": {"lr": v}}]),
    "fedyogi": ("server lr", (0.003, 0.01), lambda v: [{"fedyogi": {"lr": v}}]),
    "fedadagrad": ("server lr", (0.01, 0.03), lambda v: [{"fedadagrad": {"lr": v}}]),
    "fedprox": ("mu", (0.01, 0.1), lambda v: [{"fedprox": {"mu": v}}]),
    "scaffold": ("no momentum, lr times", (1, 5), lambda v: ["scaffold"]),
    "lg-fedavg": ("weight_decay", (0.0, 1e-3), lambda v: ["lg-fedavg"]),
    "fedrep": ("body epochs", (1, 2), lambda v: [{"fedrep": {"head": 1, "body": v}}]),
    "fedbabu": ("tuning epochs", (1, 3), lambda v: [{"fedbabu": {"epochs": v}}]),
    "ditto": ("lam", (0.1, 1.0), lambda v: [{"ditto": {"lam": v}}]),
    "finetune": ("epochs", (1, 3), lambda v: [{"finetune": {"epochs": v}}]),
    "heterofl": ("scaler", (False, True), lambda v: [{"heterofl": {"scaler": v}}]),
    "split-mix": ("ratio", (0.125, 0.25), lambda v: [{"split-mix": {"ratio": v}}]),
}
LOCAL = {  # settings of local training: what they change
    "weight_decay": lambda value, lr: {"weight_decay": value},
    "no momentum, lr times": lambda value, lr: {"lr": value * lr, "momentum": 0.0},  # variates assume plain SGD
}
TUNED = ("fedbabu", "finetune")  # a client uses its tuned copy, so these are judged after local training


def train(job: dict[str, Any]) -> dict[str, Any]:
    """One run, in a process of its own."""
    import torch

    import sparing

    torch.set_num_threads(1)
    about = TASKS[job["task"]]
    key, _, make = METHODS[job["method"]]
    changes = LOCAL[key](job["value"], job["lr"]) if key in LOCAL else {}
    local = {**about["local"], "lr": job["lr"], **changes}
    final = job["stage"] == "final"
    rounds = about["rounds" if final else "sweep"]
    who = ["global", "before", "after"] if final else ["after" if job["method"] in TUNED else "before"]
    began = time.perf_counter()
    try:
        result = sparing.run(
            {**about["task"], "validation": VALIDATION},
            make(job["value"]),
            rounds=rounds,
            sample=about["sample"],
            local=local,
            seed=job["seed"],
            device=job["device"],
            plan={"threads": 1},
            evaluate={"every": rounds, "who": who, "set": "test" if final else "validation"},
        )
    except sparing.SparingError as error:  # a learning rate too high for this method is a bad trial, not a bad sweep
        return {**job, "failed": str(error)}
    last = result.table[-1]
    return {
        **job,
        "global": result.accuracy,
        "personal": result.personal_accuracy,
        "after": last.after_accuracy,
        "worst": result.worst_decile,
        "up": result.up_bytes / 1e6,
        "down": result.down_bytes / 1e6,
        "seconds": time.perf_counter() - began,
    }


NAMES = ("task", "stage", "method", "value", "lr", "seed")


def mark(job: dict[str, Any]) -> tuple:
    return tuple(job[name] for name in NAMES)


def trials(task: str, device: str) -> list[dict[str, Any]]:
    rates = TASKS[task]["lrs"]
    grid = [(m, v, lr) for m, (_, values, _) in METHODS.items() for v in values for lr in rates]
    return [dict(zip((*NAMES, "device"), (task, "sweep", m, v, lr, 0, device), strict=True)) for m, v, lr in grid]


def finals(task: str, device: str, done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    jobs = []
    for method in METHODS:
        tried = [r for r in done if mark(r)[:3] == (task, "sweep", method) and "failed" not in r]
        if not tried:
            continue
        best = max(tried, key=lambda r: r["after" if method in TUNED else "personal"])
        for seed in SEEDS:
            row = (task, "final", method, best["value"], best["lr"], seed, device)
            jobs.append(dict(zip((*NAMES, "device"), row, strict=True)))
    return jobs


def shown(value: bool | float) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else f"{value:g}"


def table(task: str, done: list[dict[str, Any]]) -> str:
    lines = [
        "| method | setting | lr | global | personalized | fine-tuned | worst decile | MB up | MB down |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for method, (key, _, _) in METHODS.items():
        runs = [r for r in done if mark(r)[:3] == (task, "final", method) and "failed" not in r]
        if not runs:
            continue
        lost = len(SEEDS) - len(runs)
        cells = [
            f"{method} ({lost} of {len(SEEDS)} seeds diverged)" if lost else method,
            f"{key} {shown(runs[0]['value'])}",
            f"{runs[0]['lr']:g}",
        ]
        for name in ("global", "personal", "after", "worst"):
            values = [100 * r[name] for r in runs]
            cells.append(mean_spread(values) + ("" if len(values) > 1 else " (one seed)"))
        cells += [f"{statistics.mean(r[name] for r in runs):.2f}" for name in ("up", "down")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("task", choices=TASKS)
    options.add_argument("--jobs", type=int, default=os.cpu_count())
    options.add_argument("--device", default="cpu")
    options.add_argument("--results", type=Path, default=Path("runs/methods.jsonl"))
    options.add_argument("--table", action="store_true")
    args = options.parse_args()
    began = time.perf_counter()
    if not args.table:
        run_all(trials(args.task, args.device), train, mark, args.results, args.jobs)
        run_all(finals(args.task, args.device, read(args.results)), train, mark, args.results, args.jobs)
        import torch

        print(f"{platform.machine()}, torch {torch.__version__}, {args.device}, {args.jobs} at a time, seeds {SEEDS}, ")
        print(f"{time.perf_counter() - began:.0f} s\n")
    print(table(args.task, read(args.results)))


if __name__ == "__main__":
    main()
