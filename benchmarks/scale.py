"""Many clients, few at a time: memory and time per round must not depend on how many sit idle.

PSFed over a 200k-parameter model, 100 clients a round, their state in the slot file.

    python benchmarks/scale.py [--clients 100000] [--rounds 10] [--cohort 100]
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile

import torch
from torch import nn

import sparing
from sparing.core.tree import layout_of
from sparing.data.clients import Clients


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 32))


def task(clients: int) -> sparing.Task:
    """Four samples each, of a random but learnable kind."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4 * clients, 64, generator=g)
    y = (x @ torch.randn(64, 32, generator=g)).argmax(dim=1)
    count = torch.full((clients,), 4)
    return sparing.Task(net, Clients(x, y, count.cumsum(0) - count, count), test=(x[:500], y[:500]))


def one(clients: int, rounds: int, cohort: int) -> dict:
    with tempfile.TemporaryDirectory() as out:
        local, plan = {"batch": 4, "lr": 0.1}, {"bank": "file"}
        result = sparing.run(
            task(clients), "psfed", rounds=rounds, sample=cohort, local=local, plan=plan, out=f"{out}/run"
        )
    seconds = [b.seconds - a.seconds for a, b in zip(result.table, result.table[1:], strict=False)]
    return {
        "clients": clients,
        "parameters": layout_of(net()).size,
        "median_seconds_per_round": sorted(seconds)[len(seconds) // 2],
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--clients", type=int, nargs="*", default=[1_000, 100_000])
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--cohort", type=int, default=100)
    options.add_argument("--child", action="store_true")
    args = options.parse_args()
    if args.child:
        return print(json.dumps(one(args.clients[0], args.rounds, args.cohort)))
    for clients in args.clients:
        arguments = ["--child", "--clients", str(clients), "--rounds", str(args.rounds), "--cohort", str(args.cohort)]
        done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=True)
        row = json.loads(done.stdout)
        print(
            f"{row['clients']:>9,} clients x {row['parameters']:,} parameters, cohort {args.cohort}: "
            f"{row['median_seconds_per_round']:.3f} s a round, peak RSS {row['peak_rss_mb']:.0f} MB"
        )
    return None


if __name__ == "__main__":
    main()
