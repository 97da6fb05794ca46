"""Where the time of a round goes: what the device does, by kind of work, and what the host does beside it.

Rounds as `sparing.run` does them, on the shapes of `speed.py`. The device's part is its own clock (torch's profiler);
on a GPU the host starts the next round meanwhile, so a round takes about as long as the longer of the two.

    python benchmarks/spent.py [--shape cnn] [--method fedavg] [--device cuda] [--plan precision=bf16] [--rounds 20]
"""

import argparse
import time
from collections import Counter
from contextlib import closing
from typing import Any

import yaml
from peers import limit
from peers.ours import play, study_of
from peers.shapes import MODELS, shape_of
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from sparing.runs.loop import RunState
from sparing.runs.start import new_run, settle_study_and_plan

KINDS = {
    "convolutions": ("slide_kernel", "row_kernel", "gather_kernel", "correlate_kernel", "conv", "thnn"),
    "pooling": ("pool",),
    "dropout": ("drop_kernel",),
    "dense layers": (
        "gemm",
        "nvjet",
        "cutlass",
        "cublas",
        "gram_kernel",
        "spread_kernel",
        "put_kernel",
        "mm",
        "linear",
    ),
    "loss": ("entropy", "softmax", "nll"),
    "sums over clients": ("fold_kernel", "thirds_kernel", "product_kernel"),
    "choosing": ("digits_kernel", "mark_kernel", "look_kernel", "gaps_kernel", "join_kernel", "topk", "sort"),
    "copies and casts": ("copy", "cat", "gather", "index", "memcpy", "memset", "fill", "zero"),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shape", choices=MODELS, default="cnn")
    options.add_argument("--method", default="fedavg")
    options.add_argument("--device", default="cpu")
    options.add_argument("--plan", nargs="*", default=[], metavar="KEY=VALUE")
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    shape = shape_of(args.shape, args.device)
    plan = {key: yaml.safe_load(value) for key, value in (item.split("=", 1) for item in args.plan)}
    study, task = study_of(shape, args.method.split("+"), plan, args.device, args.seed)
    job, study, _ = settle_study_and_plan(study, task)
    with closing(new_run(study, job, None)) as run:
        play(run, 5)
        seconds = min(timed(run, args.rounds) for _ in range(3))
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if args.device != "cpu" else [])
        with profile(activities=kinds) as seen:
            play(run, args.rounds)
    show(args, shape, seconds, spent(seen, args.device, args.rounds))


def timed(run: RunState, rounds: int) -> float:
    began = time.perf_counter()
    play(run, rounds)
    return (time.perf_counter() - began) / rounds


def spent(seen: Any, device: str, rounds: int) -> Counter[str]:
    """Milliseconds a round of the device's own time, by kind of work."""
    there, found = DeviceType.CPU if device == "cpu" else DeviceType.CUDA, Counter[str]()
    for event in seen.key_averages():
        if event.device_type == there:
            own = event.self_cpu_time_total if device == "cpu" else event.self_device_time_total
            kind = next(
                (k for k, words in KINDS.items() if any(word in event.key.lower() for word in words)), "the rest"
            )
            found[kind] += own / 1000 / rounds
    return found


def show(args: argparse.Namespace, shape: Any, seconds: float, found: Counter[str]) -> None:
    able = limit.machine(args.device)
    print(f"{args.shape}, {args.method}, {args.device}: {1000 * seconds:.2f} ms a round (the best of three)")
    print(f"limit: {1000 * limit.floor(shape, args.device, able):.2f} ms\n\n| work | ms a round |\n|---|---|")
    for kind, ms in found.most_common():
        print(f"| {kind} | {ms:.2f} |")
    print(f"| together | {sum(found.values()):.2f} |")


if __name__ == "__main__":
    main()
