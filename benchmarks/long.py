"""A run of many short rounds, end to end, in each precision: seconds and accuracy.

CIFAR-100's 50,000 training images shared out evenly to 1,000 clients, 50 of them a round, one epoch in batches of 10,
SGD; the network of pfl's CIFAR-10 benchmark with 100 classes. The seconds are those of `sparing.run` with all its
preparations; the global model is judged on the official test images every ten rounds.

    python benchmarks/long.py [--device cpu] [--rounds 1500] [--precisions bf16] [--seeds 0 1 2] [--plan path=loop-fast]
"""

import argparse
import platform
import time

import torch
import yaml
from over_seeds import mean_spread
from peers.shapes import cnn
from torch import nn

import sparing
from sparing.tasks.build import build_task

CLIENTS, COHORT = 1000, 50


def network() -> nn.Module:
    model = cnn()
    model[-1] = nn.Linear(128, 100)
    return model


def task() -> sparing.Task:
    whole = build_task("cifar100", clients=CLIENTS, split="iid", test=0.0)
    return sparing.Task(network, whole.train, whole.test_all, name="cifar100")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=1500)
    options.add_argument("--precisions", nargs="*", default=["bf16", "float32"])
    options.add_argument("--seeds", type=int, nargs="*", default=[0])
    options.add_argument("--plan", nargs="*", default=[], metavar="KEY=VALUE")
    options.add_argument("--lr", type=float, default=0.1)
    options.add_argument("--device", default="cuda")
    args = options.parse_args()
    print("| precision | rounds | seconds of each run, all in | accuracy, % |\n|---|---|---|---|", flush=True)
    images, plan = task(), {key: yaml.safe_load(value) for key, value in (item.split("=", 1) for item in args.plan)}
    for precision in args.precisions:
        seconds, scores = [], []
        for seed in args.seeds:
            began = time.perf_counter()
            result = sparing.run(
                images,
                "fedavg",
                rounds=args.rounds,
                sample=COHORT,
                local={"epochs": 1, "batch": 10, "lr": args.lr},
                seed=seed,
                device=args.device,
                plan=plan | {"precision": precision},
                evaluate={"every": 10, "who": ["global"]},
            )
            seconds.append(time.perf_counter() - began)
            scores.append(100 * result.accuracy)
        each = ", ".join(f"{x:.1f}" for x in seconds)
        print(f"| {precision} | {args.rounds} | {each} | {mean_spread(scores)} |", flush=True)
    where = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    print(f"\n{where}, torch {torch.__version__}, seeds {args.seeds}, {' '.join(args.plan)}")


if __name__ == "__main__":
    main()
