"""Runs in children that are forked after the imports, so that hundreds can be begun, broken off and compared."""

import csv
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sparing.core.errors import SparingError
from sparing.runs.start import resume, start_run
from sparing.runs.study import Study, study_from

METHODS = {
    "psfed": ["psfed", "topk", "int8", "memory"],
    "pfedsim": [{"pfedsim": {"mode": "published", "warmup": 0.3}}],
    "fedscr": ["fedscr"],
    "fedhm": ["fedhm"],
    "stein": ["stein", "topk", "memory"],
}
ROUNDS = 6
TABLES = ("ledger.csv", "clients.csv", "metrics.csv", "pictures.jsonl")


def study_of(method: list[Any], bank: str, model: str = "cnn", **more: Any) -> Study:
    study = {
        "task": {"data": "digits", "clients": 10, "model": model},
        "method": method,
        "rounds": ROUNDS,
        "sample": 5,
        "local": {"epochs": 1, "batch": 32},
        "plan": {"path": "loop-fast", "bank": bank, "threads": 1},
    }
    return study_from(study | more)


def warm() -> None:
    """All that a first run imports and reads, once; on one thread, since a fork copies no threads."""
    torch.set_num_threads(1)
    start_run(study_of(METHODS["psfed"], "memory", rounds=1))


def begun(action: Callable[[], Any]) -> tuple[int, int]:
    """A child that does this, and a pipe that says how it went: nothing, or the sentence in which it was refused."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child:
        os.close(theirs)
        return child, ours
    os.close(ours)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    code = 0
    try:
        action()
    except SparingError as error:
        os.write(theirs, str(error).encode())
        code = 2
    except BaseException:
        os.write(theirs, traceback.format_exc().encode())
        code = 1
    os._exit(code)


def ended(child: tuple[int, int]) -> tuple[int, str]:
    """(exit code, what was said); minus a signal's number where one ended it."""
    said = b""
    while block := os.read(child[1], 1 << 16):
        said += block
    os.close(child[1])
    return os.waitstatus_to_exitcode(os.waitpid(child[0], 0)[1]), said.decode()


def done(action: Callable[[], Any]) -> tuple[int, str]:
    return ended(begun(action))


def go_on(folder: Path, study: Study) -> None:
    """Resume a run, or begin it where it had not begun."""
    if (folder / "config.yaml").exists():
        resume(folder)
    else:
        start_run(study, out=folder)


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run came to, without how long it took."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = list(csv.DictReader((folder / "rounds.csv").read_text().splitlines()))
    for one in (summary, *rows):
        one.pop("seconds")
    return {"summary": summary, "rounds": rows} | {name: (folder / name).read_bytes() for name in TABLES}


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:70}", end="", file=sys.stderr, flush=True)
