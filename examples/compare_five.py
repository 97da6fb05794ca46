"""Five methods on the same clients, several seeds each: what they reach, and what they send for it.

Run folders go to runs/five, the table to the screen:

    python examples/compare_five.py
    python examples/compare_five.py --rounds 60 --seeds 5
    sparing report runs/five                            # the same with figures
"""

import argparse
from pathlib import Path

from rich.console import Console

import sparing
from sparing.run.compare import compare
from sparing.run.gather import find, grouped, read
from sparing.ui.compare import show

METHODS = {
    "fedavg": "fedavg",
    "psfed": [{"psfed": {"fraction": 0.5}}, "int8"],
    "fedscr": ["fedscr", "int8"],
    "topk": [{"topk": {"ratio": 0.1}}, "int8", "memory"],
    "ecsq": ["ecsq", "memory"],
}
STUDY = {"sample": 0.5, "local": {"epochs": 3, "batch": 16, "lr": 0.1, "momentum": 0.9}}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare five methods on the embedded digits.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/five"))
    args = parser.parse_args()
    for name, method in METHODS.items():
        for seed in range(args.seeds):
            folder = args.out / f"{name}-{seed}"
            result = sparing.run("digits", method, rounds=args.rounds, seed=seed, out=folder, **STUDY)
            print(f"{name:8} seed {seed}   {result.accuracy:6.1%}   {result.up_bytes / 1e6:6.2f} MB up")
    groups, _ = grouped([read(folder) for folder in find([args.out / f"{name}-*" for name in METHODS])])
    show(compare(groups), Console())


if __name__ == "__main__":
    main()
