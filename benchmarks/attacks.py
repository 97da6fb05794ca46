"""Attackers among the MNIST writers: what a fifth of them does to plain averaging and to robust blends.

everyone    40 writers, all of them in every round, of which 8 attack; trimmed mean and Krum expect 0.25 of a round
sampled     100 writers, 20 a round, of which 4 attack on average and up to 8 or so by chance; so they expect 0.4

Norms are bounded at about the median of a late honest round. Results are kept in a file, so a run that was stopped
goes on.

    python benchmarks/attacks.py SETUP [--jobs 2] [--seeds 1] [--device cpu] [--results FILE]   train, print the table
    python benchmarks/attacks.py SETUP --table                                                  print the file's
"""

import argparse
import platform
import time
from pathlib import Path
from typing import Any

from kept import read, run_all
from over_seeds import mean_spread

SETUPS = {"everyone": (40, 40, 0.25), "sampled": (100, 20, 0.4)}  # writers, of them in a round, expected to lie
METHODS: dict[str, Any] = {
    "fedavg": lambda share: "fedavg",
    "median": lambda share: "median",
    "trimmed mean": lambda share: {"trimmed-mean": {"share": share}},
    "multi-Krum": lambda share: {"krum": {"share": share, "m": "most"}},
    "geometric median": lambda share: "geomed",
    "norm bound 1": lambda share: {"norm-bound": {"bound": 1.0}},
}
ATTACKS = ("none", "label-flip", "sign-flip", "scaled", "nan")
ROUNDS = 40


def train(job: dict[str, Any]) -> dict[str, Any]:
    """One run, in a process of its own."""
    import torch

    import sparing

    torch.set_num_threads(1)
    began = time.perf_counter()
    clients, sample, share = SETUPS[job["setup"]]
    try:
        result = sparing.run(
            {"data": "mnist-writers", "split": "writer", "clients": clients, "model": "lenet5"},
            [METHODS[job["method"]](share)],
            rounds=ROUNDS,
            sample=sample,
            local={"epochs": 2, "batch": 10, "momentum": 0.9, "lr": 0.03},
            seed=job["seed"],
            device=job["device"],
            plan={"threads": 1},
            fleet={"attack": {"kind": job["attack"], "share": 0.2, "scale": 10.0}},
            evaluate={"every": ROUNDS, "who": ["global"]},
        )
    except sparing.SparingError as error:  # plain averaging stops at the first number that is none
        return {**job, "failed": str(error)}
    return {**job, "accuracy": result.accuracy, "seconds": time.perf_counter() - began}


def mark(job: dict[str, Any]) -> tuple:
    return job["setup"], job["method"], job["attack"], job["seed"]


def jobs_of(setup: str, seeds: int, device: str) -> list[dict[str, Any]]:
    fixed = {"setup": setup, "device": device}
    return [{**fixed, "method": m, "attack": a, "seed": s} for s in range(seeds) for m in METHODS for a in ATTACKS]


def table(setup: str, done: list[dict[str, Any]]) -> str:
    lines = [f"| method | {' | '.join(ATTACKS)} |", "|---" * (len(ATTACKS) + 1) + "|"]
    for method in METHODS:
        lines.append(f"| {method} | {' | '.join(cell(setup, done, method, attack) for attack in ATTACKS)} |")
    return "\n".join(lines)


def cell(setup: str, done: list[dict[str, Any]], method: str, attack: str) -> str:
    runs = [r for r in done if mark(r)[:3] == (setup, method, attack)]
    scores = [100 * r["accuracy"] for r in runs if "failed" not in r]
    words = [mean_spread(scores)] if scores else []
    if len(scores) < len(runs):
        words.append(f"{len(runs) - len(scores)} of {len(runs)} stopped")
    return ", ".join(words)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("setup", choices=SETUPS)
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--seeds", type=int, default=1)
    options.add_argument("--device", default="cpu")
    options.add_argument("--results", type=Path, default=Path("runs/attacks.jsonl"))
    options.add_argument("--table", action="store_true")
    args = options.parse_args()
    if not args.table:
        import torch

        began = time.perf_counter()
        run_all(jobs_of(args.setup, args.seeds, args.device), train, mark, args.results, args.jobs)
        print(f"{platform.machine()}, torch {torch.__version__}, {args.device}, {args.jobs} at a time,")
        print(f"{args.seeds} seeds, {ROUNDS} rounds, {time.perf_counter() - began:.0f} s\n")
    print(table(args.setup, read(args.results)))


if __name__ == "__main__":
    main()
