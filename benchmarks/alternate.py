"""Two trees of this library against each other: every row of speed.py, alternated in one run, medians and their ratio.

    python benchmarks/alternate.py OLD NEW [--device cuda] [--shapes cnn mlp] [--methods psfed fedhm] [--repeats 7]

OLD and NEW are checkouts, each with its src/ and benchmarks/. Of every row, both trees wait in processes of their own
and are told in turn to do some rounds, so that both meet the same neighbours.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from peers.child import Spec
from peers.contest import WARM, Contestant, Silent, answer, ask, at_least, dismiss, launch
from peers.shapes import MODELS, shape_of

METHODS = ("fedavg", "psfed", "pfedsim", "fedscr", "fedhm", "sr-fedavg+topk")


def main(words: list[str] | None = None) -> None:
    args = options().parse_args(words)
    plan = {key: yaml.safe_load(value) for key, value in (item.split("=", 1) for item in args.plan)}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as empty:
        os.environ["XDG_CACHE_HOME"] = empty  # no plan is remembered from before
        for shape in args.shapes:
            for name in args.methods:
                method = [{"fedscr": {"dense": True}}] if (name, shape) == ("fedscr", "mlp") else name
                spec = Spec("ours", shape_of(shape, args.device), args.device, 0, torch.get_num_threads(), method, plan)
                rows.append({"shape": shape, "method": name} | alternated(spec, args))
                print(line(rows[-1]), flush=True)
                if args.json:
                    args.json.write_text(json.dumps(rows, indent=1))


def alternated(spec: Spec, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds a round of both trees, each repetition."""
    there: list[Contestant] = []
    for tree in (args.old, args.new):
        contestant = launch(tree.name, spec, tree.resolve())
        try:
            told = answer(contestant)
            ask(contestant, rounds=WARM)
        except Silent as why:
            raise SystemExit(f"{tree} cannot do {spec.method!r}: {why}") from None
        there.append(contestant._replace(told=told))
    many = [at_least(args.rounds, ask(one, rounds=WARM)["seconds"] / WARM) for one in there]
    times: list[list[float]] = [[], []]
    for turn in range(args.repeats):
        for i in (0, 1) if turn % 2 == 0 else (1, 0):
            times[i].append(1000 * ask(there[i], rounds=many[i])["seconds"] / many[i])
    for contestant in there:
        dismiss(contestant)
    path = [one.told["plan"]["path"] for one in there]
    return {"old": times[0], "new": times[1], "path": path}


def line(row: dict[str, Any]) -> str:
    old, new = (statistics.median(row[tree]) for tree in ("old", "new"))
    pairs = statistics.median(b / a for a, b in zip(row["old"], row["new"], strict=True))
    about = f"{row['shape']:9} {row['method']:15} {'/'.join(row['path']):20}"
    return f"{about} old {old:9.3f} ms  new {new:9.3f} ms  {new / old:.3f}x  (of pairs {pairs:.3f}x)"


def options() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("old", type=Path)
    found.add_argument("new", type=Path)
    found.add_argument("--shapes", nargs="*", choices=MODELS, default=["cnn", "mlp"])
    found.add_argument("--methods", nargs="*", default=list(METHODS))
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--repeats", type=int, default=7)
    found.add_argument("--plan", nargs="*", default=[], metavar="KEY=VALUE")
    found.add_argument("--device", default="cpu")
    found.add_argument("--json", type=Path)
    return found


if __name__ == "__main__":
    main()
