"""Contestants in processes of their own, told in turn what to do, so that one works at a time."""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from peers.child import Spec

WARM = 3  # rounds before anything is timed, and those by which it is found how many a repetition needs
LEAST = 1.0  # seconds that a repetition takes: whoever is quick does more rounds in it
PATIENCE = 60  # seconds to leave


class Contestant(NamedTuple):
    name: str
    process: subprocess.Popen
    log: IO[str]  # what it prints
    told: dict[str, Any] = {}  # noqa: RUF012 (when it was ready)


class Silent(Exception):
    """A contestant is not there, or ended before it answered."""


def launch(name: str, spec: Spec, tree: Path | None = None) -> Contestant:
    """`tree`: the checkout whose code it runs, if not this one."""
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115
    here = [str(Path(__file__).parents[1])] if tree is None else [str(tree / "benchmarks"), str(tree / "src")]
    path = os.pathsep.join(filter(None, [*here, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "peers.child", json.dumps({**spec._asdict(), "shape": spec.shape._asdict()})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    return Contestant(name, process, log)


def ask(contestant: Contestant, **words: Any) -> dict[str, Any]:
    assert contestant.process.stdin is not None
    contestant.process.stdin.write(json.dumps(words) + "\n")
    contestant.process.stdin.flush()
    return answer(contestant)


def answer(contestant: Contestant) -> dict[str, Any]:
    assert contestant.process.stdout is not None
    line = contestant.process.stdout.readline()
    if not line:
        contestant.log.seek(0)
        said = [line.strip() for line in contestant.log if line.strip()]
        raise Silent(said[-1] if said else "it ended without a word")
    return json.loads(line)


def dismiss(contestant: Contestant) -> None:
    with contestant.process as process, contestant.log:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()


def ready(specs: dict[str, Spec], rounds: int) -> list[Contestant]:
    """Those that could be started and have done so many rounds; of the others, a line says why not.

    They warm up in turn; on a GPU, where nobody finds out at the start what is fastest, they start side by side.
    """
    there, starting = [], (launch(name, spec) for name, spec in specs.items())
    if any(spec.device != "cpu" for spec in specs.values()):
        starting = list(starting)
    for contestant in starting:
        name, spec = contestant.name, specs[contestant.name]
        try:
            told = answer(contestant)
            if "missing" in told:
                raise Silent(f"not installed ({told['missing']})")
            ask(contestant, rounds=rounds)
            there.append(contestant._replace(told=told))
        except Silent as why:
            print(f"{spec.shape.name}: {name} is left out: {why}", flush=True)
            dismiss(contestant)
    return there


def contest(specs: dict[str, Spec], rounds: int, repeats: int, warm: int = WARM) -> dict[str, dict[str, Any]]:
    """Seconds of every contestant in every repetition, of the wall's clock and of all processors, and its memory."""
    there = ready(specs, warm)
    rows = {one.name: {**one.told, "seconds": [], "cpu": [], "peak_mb": 0.0, "gpu_mb": 0.0} for one in there}
    many = {one.name: at_least(rounds, ask(one, rounds=WARM)["seconds"] / WARM) for one in there}
    for _ in range(repeats):
        for contestant in there:
            n, row = many[contestant.name], rows[contestant.name]
            told = ask(contestant, rounds=n)
            row["seconds"].append(told["seconds"] / n)
            row["cpu"].append(told["cpu"] / n)
            row["peak_mb"], row["gpu_mb"] = max(row["peak_mb"], told["peak_mb"]), told["gpu_mb"]
    for contestant in there:
        dismiss(contestant)
    return rows


def at_least(rounds: int, seconds: float) -> int:
    """So many rounds, or more where one takes so few seconds that these would be too short to time.

    >>> at_least(3, seconds=0.004), at_least(3, seconds=2.0)
    (250, 3)
    """
    return max(rounds, math.ceil(LEAST / seconds))


def apart(specs: dict[str, Spec]) -> dict[str, float]:
    """How far from the plain loop's model each one ends: two steps of four clients in whole batches, no dropout."""
    models = {}
    few = {"clients": 4, "cohort": 4, "samples": 10, "batch": 10, "epochs": 2, "dropout": False}
    with tempfile.TemporaryDirectory() as folder:
        for contestant in ready({n: spec._replace(shape=spec.shape._replace(**few)) for n, spec in specs.items()}, 1):
            ask(contestant, save=f"{folder}/model.pt")
            dismiss(contestant)
            models[contestant.name] = torch.load(f"{folder}/model.pt")
    base = models.get("plain") or next(iter(models.values()))
    return {name: max(float((model[k] - base[k]).abs().max()) for k in base) for name, model in models.items()}
