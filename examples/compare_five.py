"""Five methods on the same clients, several seeds each: what they reach, and what they send for it.

Run folders go to runs/five, the table to the screen. Called again, it goes on where it was stopped:

    python examples/compare_five.py
    python examples/compare_five.py --seeds 5                           # two seeds more
    python examples/compare_five.py --rounds 60 --out runs/five-long    # another study, another folder
    sparing report runs/five                                            # the same with figures
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

import sparing
from sparing.reports.comparison import compare_groups
from sparing.reports.comparison_tables import print_comparison
from sparing.reports.run_folders import group_runs, holds_study, read_run_folder
from sparing.runs.start import start_run
from sparing.runs.study import study_from

METHODS = {
    "fedavg": "fedavg",
    "psfed": [{"psfed": {"fraction": 0.5}}, "int8"],
    "fedscr": ["fedscr", "int8"],
    "topk": [{"topk": {"ratio": 0.1}}, "int8", "memory"],
    "ecsq": ["ecsq", "memory"],
}
STUDY = {"task": {"data": "digits"}, "sample": 0.5, "local": {"epochs": 3, "batch": 16, "lr": 0.1, "momentum": 0.9}}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare five methods on the embedded digits.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/five"))
    args = parser.parse_args()
    folders = []
    for name, method in METHODS.items():
        for seed in range(args.seeds):
            folder = args.out / f"{name}-{seed}"
            study = study_from({**STUDY, "method": method, "rounds": args.rounds, "seed": seed})
            there = holds_study(study, folder, "choose another place with --out")
            result = sparing.resume(folder) if there else start_run(study, out=folder)
            folders.append(folder)
            print(f"{name:8} seed {seed}   {result.accuracy:6.1%}   {result.up_bytes / 1e6:6.2f} MB up")
    groups, _ = group_runs([read_run_folder(folder) for folder in folders])
    print_comparison(compare_groups(groups), Console())


if __name__ == "__main__":
    try:
        main()
    except sparing.SparingError as error:
        sys.exit(f"compare_five: {error}")
