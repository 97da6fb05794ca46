"""Rounds on 1, 2, 4, 8 ranks of one machine: seconds, share of the ideal, processor time and memory.

    python benchmarks/ranks.py [--ranks 1 2 4 8] [--shapes mlp cnn resnet18] [--rounds 3] [--clients 32] [--device cpu]

One rank is the run of one process. The bytes that pass in a round stand beside the formula of docs/cluster.md; whatever
else the machine sends to itself counts too. A row is the median of the rounds after the first. The ideal is the time of
one rank, divided by the ranks. *apart* is the share of it that as many processes reach which know nothing of each
other, each with its part of the clients: what the machine itself allows.

    python benchmarks/ranks.py kill [--times 20]

Kills one of two ranks at a random moment, resumes with three, and compares with the run of one process.
"""

import argparse
import itertools
import json
import os
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

SHAPES: dict[str, dict[str, Any]] = {
    "mlp": {"model": {"mlp": {"hidden": [256, 256]}}, "side": 28, "samples": 600, "batch": 10, "method": "fedavg"},
    "cnn": {"model": "fedavg-cnn", "side": 28, "samples": 100, "batch": 10, "method": "fedavg"},
    "cnn+psfed+topk": {
        "model": "fedavg-cnn", "side": 28, "samples": 100, "batch": 10, "method": "psfed+topk+int8+memory"
    },
    "resnet18": {"model": "resnet18", "side": 32, "samples": 20, "batch": 10, "method": "fedavg"},
}  # fmt: skip


def rank_processes(
    world: int, command: list[str], threads: int, together: bool = True, **other: Any
) -> list[subprocess.Popen]:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = door.getsockname()[1]
    found = []
    for rank in range(world):
        place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        named = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        own = named if together and world > 1 else {"PLACE": str(rank)}
        env = os.environ | own | {"OMP_NUM_THREADS": str(threads)}
        found.append(subprocess.Popen([sys.executable, *command], env=env, **other))
    return found


# ---------------------------------------------------------------------------------------------------------------- speed


def play(path: Path) -> None:
    """As one rank: time rounds of made-up images."""
    import torch

    import sparing
    from sparing.models import build_network

    args = json.loads(path.read_text())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    shape, side, n = SHAPES[args["shape"]], SHAPES[args["shape"]]["side"], SHAPES[args["shape"]]["samples"]
    channels = 3 if args["shape"] == "resnet18" else 1
    g = torch.Generator().manual_seed(0)
    x = torch.randn(args["clients"] * n, channels, side, side, generator=g)
    y = torch.randint(0, 10, (len(x),), generator=g)
    parts = [(x[i : i + n], y[i : i + n]) for i in range(0, len(x), n)]
    name, options = (shape["model"], {}) if isinstance(shape["model"], str) else next(iter(shape["model"].items()))
    task = sparing.Task(
        lambda: build_network(name, (channels, side, side), 10, **options), train=parts, test=(x[:10], y[:10])
    )
    marks: list[float] = []
    result = sparing.run(
        task, shape["method"], rounds=args["rounds"], sample=args["clients"], device=args["device"],
        local={"epochs": 1, "batch": shape["batch"], "lr": 0.05}, evaluate={"every": 10**6, "clients": 1},
        plan={"threads": int(os.environ["OMP_NUM_THREADS"]), **args["plan"]},
        loggers=[lambda record: marks.append(time.perf_counter())],
    )  # fmt: skip
    rank = int(os.environ.get("RANK", os.environ.get("PLACE", 0)))
    if rank == 0:
        torch.save(result.model, path.with_name("model.pt"))
    said = {
        "sha256": result.model_sha256,
        "size": sum(x.numel() for x in result.model.values()),
        "seconds": [b - a for a, b in itertools.pairwise(marks)],
        "cpu": time.process_time(),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    path.with_name(f"rank{rank}.json").write_text(json.dumps(said))


def measure(shape: str, world: int, args: argparse.Namespace) -> dict[str, Any]:
    """Processor time is that of all ranks, by the difference of a long and a short run."""
    (short, long), rounds = (_measure_run(shape, world, args, rounds) for rounds in (1, args.rounds + 1)), args.rounds
    return {
        "sha256": long[0]["sha256"],
        "size": long[0]["size"],
        "model": long[0]["model"],
        "seconds": statistics.median(long[0]["seconds"]),
        "cpu": sum(b["cpu"] - a["cpu"] for a, b in zip(short, long, strict=True)) / rounds,
        "memory": max(one["memory"] for one in long),
        "passed": (long[0]["passed"] - short[0]["passed"]) / rounds,
    }


def _measure_run(
    shape: str, world: int, args: argparse.Namespace, rounds: int, together: bool = True
) -> list[dict[str, Any]]:
    import torch

    clients = args.clients if together else args.clients // world
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "study.json")
        asked = {"shape": shape, "rounds": rounds, "clients": clients, "device": args.device}
        path.write_text(json.dumps(asked | {"plan": {"path": args.path, "chunk": args.chunk}}))
        before = loopback_bytes()
        for process in rank_processes(world, [__file__, "as-rank", str(path)], args.threads, together):
            process.wait()
        found = [json.loads(path.with_name(f"rank{rank}.json").read_text()) for rank in range(world)]
        model = torch.load(path.with_name("model.pt"))
    return [one | {"passed": loopback_bytes() - before, "model": model} for one in found]


def seconds_apart(shape: str, world: int, args: argparse.Namespace) -> float:
    """A round of the slowest of so many processes that share nothing but the machine."""
    found = _measure_run(shape, world, args, args.rounds + 1, together=False)
    return max(statistics.median(one["seconds"]) for one in found)


def distance(a: dict[str, Any], b: dict[str, Any]) -> str:
    """How far two models are apart, beside the largest weight."""
    far = max(float((a[name].double() - b[name].double()).abs().max()) for name in a)
    return "same" if far == 0 else f"{far / max(float(x.abs().max()) for x in a.values()):.0e} away"


def loopback_bytes() -> int:
    """That this machine has sent to itself."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def show_speeds(args: argparse.Namespace) -> None:
    print(
        f"{args.clients} clients a round, {args.rounds} rounds after the first, {os.cpu_count()} cores, {args.device}"
    )
    heads = ("s a round", "of ideal", "apart", "CPU s a round", "MB a rank", "MB passed", "16 P (r - 1)")
    print(f"{'':18}{'ranks':>6}" + "".join(f"{head:>15}" for head in heads) + "  model")
    for shape in args.shapes:
        base: dict[str, Any] = {}
        for world in args.ranks:
            found = measure(shape, world, args)
            base = base or found
            ideal = base["seconds"] / world * args.ranks[0]
            same = distance(base["model"], found["model"])
            apart = f"{ideal / seconds_apart(shape, world, args):.0%}" if args.apart and world > 1 else ""
            formula = 16e-6 * found["size"] * (world - 1)
            cells = [f"{found['seconds']:.3f}", f"{ideal / found['seconds']:.0%}", apart, f"{found['cpu']:.2f}"]
            cells += [f"{found['memory']:.0f}", f"{found['passed'] / 1e6:.1f}", f"{formula:.1f}"]
            print(f"{shape:18}{world:6}" + "".join(f"{cell:>15}" for cell in cells) + f"  {same}", flush=True)


# ----------------------------------------------------------------------------------------------------------------- kill


def show_kills(args: argparse.Namespace) -> None:
    study = {
        "task": {"data": "digits", "clients": 20, "split": {"dirichlet": 0.3}, "model": "cnn"},
        "method": ["psfed", "topk", "int8", "memory"], "rounds": 12, "sample": 8, "evaluate": {"every": 4},
        "plan": {"path": "loop", "bank": args.bank},
    }  # fmt: skip
    dice, same = random.Random(0), 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "study.yaml")
        path.write_text(yaml.safe_dump(study))
        began, command = time.monotonic(), ["run", str(path), "--json", "--out"]
        torchrun(1, [*command, f"{folder}/whole"]).wait()
        took, wanted = time.monotonic() - began, _files(Path(folder, "whole"))
        for i in range(args.times):
            run = Path(folder, f"run{i}")
            ranks = torchrun(2, [*command, str(run)])
            time.sleep(dice.uniform(0.3, 1.2) * took)
            children = Path(f"/proc/{ranks.pid}/task/{ranks.pid}/children").read_text().split()
            if children:
                os.kill(int(dice.choice(children)), signal.SIGKILL)
            ranks.wait()
            done = len((run / "rounds.csv").read_text().splitlines()) - 1 if (run / "config.yaml").exists() else None
            torchrun(3, [*command, str(run)] if done is None else ["resume", str(run)]).wait()
            same += _files(run) == wanted
            print(f"killed after {'no' if done is None else done} rounds: {same} of {i + 1} the same", flush=True)


def torchrun(world: int, command: list[str]) -> subprocess.Popen:
    words = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", "--standalone"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*words, "-m", "sparing", *command], env=os.environ | {"OMP_NUM_THREADS": "1"}, **quiet)


def _files(run: Path) -> tuple[str, str, str]:
    """What must be the same: the model, the ledger, and the clients' marks."""
    summary = run / "summary.json"
    sha = json.loads(summary.read_text())["model_sha256"] if summary.exists() else "none"
    return sha, (run / "ledger.csv").read_text(), (run / "clients.csv").read_text()


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("what", nargs="?", default="speed", choices=["speed", "kill", "as-rank"])
    options.add_argument("path_", nargs="?", type=Path)
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    options.add_argument("--shapes", nargs="+", default=list(SHAPES))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--clients", type=int, default=32)
    options.add_argument("--threads", type=int, default=1, help="of each rank")
    options.add_argument("--path", default="loop-fast", help="of local training")
    options.add_argument("--chunk", type=int, default=4)
    options.add_argument("--device", default="cpu")
    options.add_argument("--apart", action="store_true", help="also what the machine itself allows")
    options.add_argument("--times", type=int, default=20)
    options.add_argument("--bank", default="file")
    args = options.parse_args()
    if args.what == "as-rank":
        play(args.path_)
    elif args.what == "kill":
        show_kills(args)
    else:
        show_speeds(args)


if __name__ == "__main__":
    main()
