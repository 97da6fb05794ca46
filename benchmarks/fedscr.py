"""FedSCR on a network made of convolutions: accuracy and the share not sent, against the threshold.

ResNet-18 (GroupNorm), IID, 5 clients a round, beside FedAvg and gradient dropping (what lies below the layer's quantile
is kept back and added to the next update). Results are kept in a file, so a run that was stopped goes on.

    python benchmarks/fedscr.py [--data digits] [--clients 20] [--rounds 30] [--batch 10] [--seeds 0]
                                [--jobs 2] [--device cpu] [--results FILE] [--table]
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from kept import read, run_all
from over_seeds import mean_spread

THRESHOLDS = (0.3, 0.7, 0.9)
METHODS: dict[str, list[Any]] = {"fedavg": ["fedavg"]}
METHODS |= {f"fedscr {t}": [{"fedscr": {"threshold": t}}] for t in THRESHOLDS}
METHODS |= {f"fedscr {t} adaptive": [{"fedscr": {"threshold": t, "adaptive": True}}] for t in THRESHOLDS}
METHODS |= {
    f"dropping {share:.0%}": [{"topk": {"ratio": round(1 - share, 2), "mode": "quantile", "memory": True}}]
    for share in (0.5, 0.9)
}


def train(job: dict[str, Any]) -> dict[str, Any]:
    import sparing

    began = time.perf_counter()
    result = sparing.run(
        {"data": job["data"], "split": "iid", "clients": job["clients"], "model": "resnet18"},
        METHODS[job["method"]],
        rounds=job["rounds"],
        sample=5,
        local={"lr": 0.05, "epochs": 1, "batch": job["batch"]},
        seed=job["seed"],
        device=job["device"],
        plan={"path": "loop-fast", "threads": 1},
        evaluate={"every": job["rounds"], "who": ["global"]},
    )
    return {
        **job,
        "accuracy": result.accuracy,
        "up": result.up_bytes,
        "down": result.down_bytes,
        "pruned": result.metric("pruned_share"),
        "seconds": time.perf_counter() - began,
    }


def mark(job: dict[str, Any]) -> tuple:
    return tuple(job[name] for name in ("data", "clients", "rounds", "batch", "method", "seed"))


def table(done: list[dict[str, Any]]) -> str:
    lines = ["| method | accuracy | convolutions not sent | bytes not sent | MB up |", "|---|---|---|---|---|"]
    whole = statistics.mean(r["up"] for r in done if r["method"] == "fedavg")
    for method in METHODS:
        runs = [r for r in done if r["method"] == method]
        if not runs:
            continue
        accuracy = [100 * r["accuracy"] for r in runs]
        up = statistics.mean(r["up"] for r in runs)
        pruned = [statistics.mean(r["pruned"]) for r in runs if method.startswith("fedscr")]
        share = f"{100 * statistics.mean(pruned):.1f} %" if pruned else "-"
        cells = [method, mean_spread(accuracy), share]
        lines.append("| " + " | ".join([*cells, f"{100 * (1 - up / whole):.1f} %", f"{up / 1e6:,.0f}"]) + " |")
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--data", default="digits")
    options.add_argument("--clients", type=int, default=20)
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--batch", type=int, default=10)
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--device", default="cpu")
    options.add_argument("--results", type=Path, default=Path("runs/fedscr.jsonl"))
    options.add_argument("--table", action="store_true")
    args = options.parse_args()
    jobs = [
        {
            **{name: getattr(args, name) for name in ("data", "clients", "rounds", "batch", "device")},
            "method": method,
            "seed": seed,
        }
        for seed in args.seeds
        for method in METHODS
    ]
    if not args.table:
        run_all(jobs, train, mark, args.results, args.jobs)
    wanted = {mark(job) for job in jobs}
    print(table([r for r in read(args.results) if mark(r) in wanted]))


if __name__ == "__main__":
    main()
