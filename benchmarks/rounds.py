"""Many rounds of every scheme on real data: accuracy against megabytes, both directions, three seeds.

writers     MNIST by writer, 100 clients, 20 a round, the CNN of the FedAvg paper (1.66M parameters)
cifar100    CIFAR-100's 20 superclasses as 20 clients, all of them in every round, the same CNN (2.2M)

The learning rate is the best of three for plain FedAvg, judged on validation samples; all schemes then train with it,
since the question is what FedAvg's accuracy costs in bytes. Results are kept in a file, so a run that was stopped goes
on.

    python benchmarks/rounds.py TASK [--jobs 2] [--device cpu] [--results FILE]      train, print the table
    python benchmarks/rounds.py TASK --table [--plot FILE.png]                       print what the file holds
"""

import argparse
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from kept import read, run_all
from over_seeds import deviation, mean_spread

TASKS: dict[str, dict[str, Any]] = {
    "writers": {
        "task": {"data": "mnist-writers", "split": "writer", "clients": 100, "model": "fedavg-cnn"},
        "local": {"epochs": 2, "batch": 20},
        "lrs": (0.03, 0.1, 0.2),
        "sample": 20,
        "rounds": 60,
    },
    "cifar100": {
        "task": {"data": "cifar100", "split": "superclass", "model": "fedavg-cnn"},
        "local": {"epochs": 1, "batch": 32},
        "lrs": (0.02, 0.05, 0.1),
        "sample": 20,
        "rounds": 40,
    },
}
SEEDS = (0, 1, 2)


def low(up: float, down: float) -> list[Any]:
    """Low rank both ways: shares of the energy sent up and down."""
    return [{"lowrank": {"energy": up}}, down_by([{"lowrank": {"energy": down}}])]


def down_by(by: list[Any]) -> dict[str, Any]:
    """A broadcast; clients build the first model from the seed."""
    return {"broadcast": {"by": by, "seeded": True}}


STC = {"stc": {"ratio": 0.01, "down": False}}


SCHEMES: dict[str, list[Any]] = {
    "FedAvg": ["fedavg"],
    "fp16, both ways": ["fp16", down_by(["fp16"])],
    "QSGD 8 bits": [{"qsgd": {"levels": 127, "bucket": 512}}],
    "QSGD 4 bits": [{"qsgd": {"levels": 7, "bucket": 512}}],
    "EDEN 2 bits": [{"eden": {"bits": 2}}],
    "top-k 1 %": [{"topk": {"ratio": 0.01, "memory": True}}],
    "top-k 3 %, 8 bits": [{"topk": {"ratio": 0.03, "memory": True}}, "int8"],
    "STC 1 %, both ways": [STC, down_by([STC])],
    "PowerSGD 4": [{"powersgd": {"rank": 4}}],
    "low rank 0.9, down 0.98": low(0.9, 0.98),
    "low rank 0.75, down 0.95": low(0.75, 0.95),
    "low rank 0.5, down 0.9": low(0.5, 0.9),
    "budget 20 kB, down 0.95": [{"budget": "20kB"}, down_by([{"lowrank": {"energy": 0.95}}])],
}


def train(job: dict[str, Any]) -> dict[str, Any]:
    """One run, in a process of its own."""
    import torch

    import sparing

    torch.set_num_threads(1)
    about, final = TASKS[job["task"]], job["stage"] == "final"
    began = time.perf_counter()
    try:
        result = sparing.run(
            {**about["task"], "validation": 0.2},
            SCHEMES[job["scheme"]],
            rounds=about["rounds"],
            sample=about["sample"],
            local={**about["local"], "lr": job["lr"]},
            seed=job["seed"],
            device=job["device"],
            plan={"threads": 1},
            evaluate={"every": 5, "who": ["global"], "set": "test" if final else "validation"},
        )
    except sparing.SparingError as error:
        return {**job, "failed": str(error)}
    table = result.table
    return {
        **job,
        "rounds": [r.round for r in table if r.accuracy == r.accuracy],
        "accuracy": [r.accuracy for r in table if r.accuracy == r.accuracy],
        "up": result.up_bytes,
        "down": result.down_bytes,
        "seconds": time.perf_counter() - began,
    }


NAMES = ("task", "stage", "scheme", "lr", "seed")


def mark(job: dict[str, Any]) -> tuple:
    return tuple(job[name] for name in NAMES)


def sweep(task: str, device: str) -> list[dict[str, Any]]:
    rows = [(task, "sweep", "FedAvg", lr, 0, device) for lr in TASKS[task]["lrs"]]
    return [dict(zip((*NAMES, "device"), row, strict=True)) for row in rows]


def finals(task: str, device: str, done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    tried = [r for r in done if mark(r)[:2] == (task, "sweep") and "failed" not in r]
    lr = max(tried, key=lambda r: r["accuracy"][-1])["lr"]
    rows = [(task, "final", scheme, lr, seed, device) for seed in SEEDS for scheme in SCHEMES]
    return [dict(zip((*NAMES, "device"), row, strict=True)) for row in rows]


def runs_of(task: str, scheme: str, done: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in done if mark(r)[:3] == (task, "final", scheme) and "failed" not in r]


def table(task: str, done: list[dict[str, Any]]) -> str:
    plain = runs_of(task, "FedAvg", done)
    lines = [
        "| method | accuracy | difference vs FedAvg (pp) | MB up | upload compression "
        "| MB down | download compression |",
        "|---" * 7 + "|",
    ]
    for scheme in SCHEMES:
        runs = runs_of(task, scheme, done)
        if not runs:
            continue
        score = [100 * r["accuracy"][-1] for r in runs]
        ends = {r["seed"]: 100 * r["accuracy"][-1] for r in plain}
        apart = [100 * r["accuracy"][-1] - ends[r["seed"]] for r in runs if r["seed"] in ends]
        name = scheme if len(runs) == len(SEEDS) else f"{scheme} ({len(runs)} of {len(SEEDS)} seeds)"
        cells = [name, mean_spread(score), mean_spread(apart, sign="+") if apart and scheme != "FedAvg" else ""]
        for way in ("up", "down"):
            mean = statistics.mean(r[way] for r in runs)
            cells += [f"{mean / 1e6:,.1f}", f"{statistics.mean(r[way] for r in plain) / mean:,.1f}x" if plain else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(tasks: list[str], done: list[dict[str, Any]], path: Path) -> None:
    """Accuracy at the end against the bytes of a run; the line joins schemes that no other beats in both."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(tasks), figsize=(5.2 * len(tasks) + 2.4, 8.4), squeeze=False, sharey="col")
    for row, (ways, said) in enumerate(((("up",), "megabytes up"), (("up", "down"), "megabytes, both directions"))):
        for ax, task in zip(axes[row], tasks, strict=True):
            draw(ax, task, ways, done)
            ax.set(xscale="log", xlabel=f"{said}, all clients", ylabel="accuracy, %", title=task if row == 0 else "")
            ax.grid(alpha=0.3)
    names = [f"{i}  {scheme}" for i, scheme in enumerate(SCHEMES, 1)]
    figure.tight_layout(rect=(0, 0, 1 - 2.2 / (5.2 * len(tasks) + 2.4), 1))
    figure.text(1 - 2.15 / (5.2 * len(tasks) + 2.4), 0.5, "\n".join(names), va="center", fontsize=9, linespacing=1.6)
    figure.savefig(path, dpi=110)


PLACES = ((6, 5), (6, -12), (-13, 5), (-13, -12))


def draw(ax: Any, task: str, ways: tuple[str, ...], done: list[dict[str, Any]]) -> None:
    points = []
    for number, scheme in enumerate(SCHEMES, 1):
        if runs := runs_of(task, scheme, done):
            score = [100 * r["accuracy"][-1] for r in runs]
            points.append((statistics.mean(sum(r[way] for way in ways) for r in runs) / 1e6, score, number))
    best, front = -1.0, []
    for i, (x, score, number) in enumerate(sorted(points)):
        y = statistics.mean(score)
        ahead = y > best
        ax.errorbar(x, y, yerr=deviation(score), fmt="o", ms=4, color="C0" if ahead else "0.6", capsize=2)
        ax.annotate(str(number), (x, y), textcoords="offset points", fontsize=8, xytext=PLACES[i % len(PLACES)])
        if ahead:
            best = y
            front.append((x, y))
    ax.plot(*zip(*front, strict=True), color="C0", lw=1, zorder=0)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("task", choices=TASKS)
    options.add_argument("--jobs", type=int, default=os.cpu_count())
    options.add_argument("--device", default="cpu")
    options.add_argument("--results", type=Path, default=Path("runs/rounds.jsonl"))
    options.add_argument("--table", action="store_true")
    options.add_argument("--plot", type=Path)
    args = options.parse_args()
    if not args.table:
        import torch

        began = time.perf_counter()
        run_all(sweep(args.task, args.device), train, mark, args.results, args.jobs)
        run_all(finals(args.task, args.device, read(args.results)), train, mark, args.results, args.jobs)
        print(f"{platform.machine()}, torch {torch.__version__}, {args.device}, {args.jobs} at a time, seeds {SEEDS}, ")
        print(f"{time.perf_counter() - began:.0f} s\n")
    done = read(args.results)
    print(table(args.task, done))
    if args.plot:
        plot([task for task in TASKS if runs_of(task, "FedAvg", done)], done, args.plot)


if __name__ == "__main__":
    main()
