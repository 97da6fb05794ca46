"""FedSCR on a network made of convolutions: accuracy and the share not sent, against the threshold.

ResNet-18 (GroupNorm) on CIFAR-100, IID over 50 clients, 5 a round, beside FedAvg and gradient dropping (what lies below
the layer's quantile is kept back and added to the next update). Results are kept in a file, so a run that was stopped
goes on.

    python benchmarks/fedscr.py [--rounds 60] [--seeds 0 1 2] [--jobs 3] [--device cuda] [--results FILE] [--table]
"""

import argparse
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

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
        {"data": "cifar100", "split": "iid", "clients": 50, "model": "resnet18"},
        METHODS[job["method"]],
        rounds=job["rounds"],
        sample=5,
        local={"lr": 0.05, "epochs": 1, "batch": 50},
        seed=job["seed"],
        device=job["device"],
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
    return job["method"], job["rounds"], job["seed"]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(done: list[dict[str, Any]], rounds: int) -> str:
    lines = ["| method | accuracy | convolutions not sent | bytes not sent | MB up |", "|---|---|---|---|---|"]
    whole = statistics.mean(r["up"] for r in done if mark(r)[:2] == ("fedavg", rounds))
    for method in METHODS:
        runs = [r for r in done if mark(r)[:2] == (method, rounds)]
        if not runs:
            continue
        accuracy = [100 * r["accuracy"] for r in runs]
        up = statistics.mean(r["up"] for r in runs)
        pruned = [statistics.mean(r["pruned"]) for r in runs if method.startswith("fedscr")]
        share = f"{100 * statistics.mean(pruned):.1f} %" if pruned else "-"
        cells = [method, f"{statistics.mean(accuracy):.1f} ± {statistics.pstdev(accuracy):.1f}", share]
        lines.append("| " + " | ".join([*cells, f"{100 * (1 - up / whole):.1f} %", f"{up / 1e6:,.0f}"]) + " |")
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--device", default="auto")
    options.add_argument("--results", type=Path, default=Path("runs/fedscr.jsonl"))
    options.add_argument("--table", action="store_true")
    args = options.parse_args()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    known = {mark(r) for r in read(args.results)}
    jobs = [
        {"method": method, "rounds": args.rounds, "seed": seed, "device": args.device}
        for seed in args.seeds
        for method in METHODS
    ]
    todo = [] if args.table else [job for job in jobs if mark(job) not in known]
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool, open(args.results, "a") as file:
        for result in pool.imap_unordered(train, todo):
            file.write(json.dumps(result) + "\n")
            file.flush()
    print(table(read(args.results), args.rounds))


if __name__ == "__main__":
    main()
