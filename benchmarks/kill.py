"""kill -9 at random moments of a run with error feedback, then resume: the same model as the unbroken run, or not.

python benchmarks/kill.py [--times 10] [--bank memory] [--rounds 20] [--seed 0]
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OVERRIDES = ["method=psfed+topk+int8+memory", "task.clients=10", "sample=5", "local.lr=0.1"]


def command(folder: Path, rounds: int, bank: str) -> list[str]:
    keys = [*OVERRIDES, f"rounds={rounds}", f"plan.bank={bank}", "plan.path=loop"]
    return [sys.executable, "-m", "sparing", "run", *keys, "--out", str(folder), "--json"]


def finished(arguments: list[str]) -> dict:
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def killed(arguments: list[str], folder: Path, at: int, pause: float) -> int:
    """Start a run and kill it `pause` seconds after its table shows `at` rounds; the rounds it had reached."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and reached(folder) < at:
        time.sleep(0.001)
    time.sleep(pause)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        raise SystemExit("the run was over before it could be killed; use more rounds")
    return reached(folder)


def reached(folder: Path) -> int:
    path = folder / "rounds.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else -1


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--times", type=int, default=10)
    options.add_argument("--bank", default="memory")
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole"
        want = finished(command(whole, args.rounds, args.bank))
        tables = (whole / "ledger.csv").read_bytes()
        took = want["seconds"]
        print(f"unbroken: {args.rounds} rounds in {took:.2f} s, bank {args.bank}, {want['model_sha256'][:16]}")
        good = 0
        for i in range(args.times):
            folder = Path(place) / f"killed{i}"
            at, pause = draw.randrange(args.rounds - 2), draw.uniform(0, took / args.rounds)
            rounds = killed(command(folder, args.rounds, args.bank), folder, at, pause)
            got = finished([sys.executable, "-m", "sparing", "resume", str(folder), "--json"])
            same = got["model_sha256"] == want["model_sha256"] and (folder / "ledger.csv").read_bytes() == tables
            good += same
            print(f"  killed after {rounds:2d} rounds: {'same model, same ledger' if same else 'DIFFERENT'}")
    print(f"{good} of {args.times} the same")
    raise SystemExit(good != args.times)


if __name__ == "__main__":
    main()
