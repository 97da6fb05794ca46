"""Seconds a round: this library, its methods, pfl, Flower's simulation and a plain loop, on the same work.

cnn         1,000 clients x 50 images 3x32x32, 10 a round on a CPU, 50 on a GPU; pfl's CIFAR-10 network
mlp         784-200-200-10, 1,000 clients x 20 samples, 100 a round
resnet18    with group norm, 100 clients; 2 a round x 20 images on a CPU, 10 x 50 on a GPU
resnet18-50 the same in batches of 50 on a GPU, 20 clients a round x 250 images; so are the next two
vit         6 layers of width 192 over 64 patches
vit-lora    its layers frozen but for what two thin ones add

One epoch in batches of 10, unless it says so. Every contestant waits in a process of its own and is told in turn to do
some rounds, so that one works at a time and all meet the same neighbours. Before, each must reach the same model from
the same start. On a GPU, one model alone, compiled and captured, that takes the steps of all clients of a round shows
what the hardware gives.
Those that are not installed, or cannot do a shape, are left out with a line that says so.

    python benchmarks/speed.py [--shapes mlp cnn] [--methods psfed fedhm] [--peers pfl plain] [--device cuda]
    python benchmarks/speed.py --shapes --cohorts 10 100 1000 10000 [--plan memory=500MB]
    python benchmarks/speed.py --table FILE.json [--plot FILE.png]
"""

import argparse
import json
import os
import platform
import re
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml
from peers import limit, table
from peers.child import Spec
from peers.contest import WARM, apart, contest
from peers.shapes import MODELS, Shape, shape_of

from sparing.runs.environment import package_commit

METHODS = ("psfed", "pfedsim", "fedscr", "fedhm", "sr-fedavg+topk")
PEERS = {"pfl": "by_pfl", "flower": "by_flower", "plain": "plain", "anchor": "compiled_one"}
TOLERANCE = {"float32": 1e-4, "tf32": 1e-3, "bf16": 1e-2}
"""How far the mean of four clients after two steps may be from the plain loop's, by how we multiply."""


def main(words: list[str] | None = None) -> None:
    args = options().parse_args(words)
    if args.table:
        results = json.loads(args.table.read_text())
        print(table.lines(results))
    else:
        with tempfile.TemporaryDirectory() as empty:
            os.environ["XDG_CACHE_HOME"] = empty  # no plan is remembered from before
            results = measured(args)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1))
    if args.plot and results["shapes"]:
        table.plot(results, args.plot)
    wrong = [
        f"{name}: {who} is {far:.0e} away from the plain loop"
        for name, shape in results["shapes"].items()
        for who, far in shape["apart"].items()
        if not far <= TOLERANCE[shape["rows"].get(who, {}).get("plan", {}).get("precision", "float32")]
    ]
    if wrong:
        raise SystemExit("not the same work: " + "; ".join(wrong))


def options() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--shapes", nargs="*", choices=MODELS, default=list(MODELS))
    found.add_argument("--methods", nargs="*", default=list(METHODS), help="ours, besides FedAvg")
    found.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    found.add_argument("--rounds", type=int, help="at a time, at least; 3, on a GPU 10")
    found.add_argument("--repeats", type=int, default=5, help="of these")
    found.add_argument("--warm", type=int, default=WARM, help="rounds before any is timed, and three more")
    found.add_argument("--cohorts", nargs="*", type=int, default=[], help="also FedAvg on the MLP with so many clients")
    found.add_argument("--plan", nargs="*", default=[], metavar="KEY=VALUE", help="of our studies, else auto")
    found.add_argument("--device", default="cpu")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--json", type=Path, default=Path("runs/speed.json"))
    found.add_argument("--table", type=Path, help="print what such a file holds instead of measuring")
    found.add_argument("--plot", type=Path)
    return found


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Everything, printed as it comes, as it is kept in the file."""
    rounds = args.rounds or (3 if args.device == "cpu" else 10)
    results: dict[str, Any] = {
        "machine": machine(args.device),
        "versions": versions(),
        "seed": args.seed,
        "load": os.getloadavg()[0],
        "shapes": {},
        "cohorts": [],
    }
    print(table.about(results), flush=True)
    for name in args.shapes:
        results["shapes"][name] = on_shape(shape_of(name, args.device), rounds, args)
        print("\n" + table.shape_table(name, results["shapes"][name]), flush=True)
    if args.cohorts:
        results["cohorts"] = cohorts(args, rounds)
        print("\n" + table.cohort_table(results["cohorts"]), flush=True)
    return results


def on_shape(shape: Shape, rounds: int, args: argparse.Namespace) -> dict[str, Any]:
    before, every = limit.machine(args.device), specs(shape, args)
    other = {*args.methods, table.ANCHOR}  # they come to a model of their own
    far = apart({who: spec for who, spec in every.items() if who not in other})
    rows = contest({who: every[who] for who in every if who in far or who in other}, rounds, args.repeats, args.warm)
    if table.OURS not in rows:
        raise SystemExit(f"{shape.name}: there is nothing to compare with")
    able = limit.best(before, limit.machine(args.device))
    return {
        "shape": shape._asdict(),
        "rounds": rounds,
        "able": able,
        "flops": limit.flops(shape),
        "floor": limit.floor(shape, args.device, able),
        "apart": far,
        "rows": rows,
    }


def specs(shape: Shape, args: argparse.Namespace) -> dict[str, Spec]:
    """Our FedAvg, which the others are compared with, on a CPU also in bfloat16; then the peers, then our methods."""
    plan = {key: yaml.safe_load(value) for key, value in (item.split("=", 1) for item in args.plan)}

    def spec(by: str, **more: Any) -> Spec:
        return Spec(by, shape, args.device, args.seed, torch.get_num_threads(), **more)

    here = [name for name in args.peers if name != "flower" or args.device == "cpu"]
    peers = {table.ANCHOR if name == "anchor" else name: spec(PEERS[name], plan=plan) for name in here}
    methods = {name: spec("ours", method=method(name, shape), plan=plan) for name in args.methods}
    ours = {table.OURS: spec("ours", method="fedavg", plan=plan)}
    if args.device == "cpu" and "precision" not in plan:
        ours[table.HALF] = spec("ours", method="fedavg", plan={**plan, "precision": "bf16"})
    return ours | peers | methods


def method(name: str, shape: Shape) -> Any:
    """FedSCR is for convolutions and must be told to take dense layers."""
    return [{"fedscr": {"dense": True}}] if name == "fedscr" and shape.name == "mlp" else name


def cohorts(args: argparse.Namespace, rounds: int) -> list[dict[str, Any]]:
    """FedAvg on the MLP, all clients there from the start, more and more of them in a round."""
    shape = shape_of("mlp", args.device)._replace(clients=max(args.cohorts))
    every = {str(k): specs(shape._replace(cohort=k), args)[table.OURS] for k in args.cohorts}
    return [{"cohort": int(name), **row} for name, row in contest(every, rounds, args.repeats).items()]


def versions() -> dict[str, str]:
    found = {}
    for name in ("sparing", "torch", "numpy", "pfl", "flwr", "ray"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine(device: str) -> dict[str, Any]:
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "device": device if device == "cpu" else torch.cuda.get_device_name(device),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "commit": package_commit(),
    }


def processor() -> str:
    try:
        names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
