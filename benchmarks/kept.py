"""Runs in processes of their own, their results kept in a file: a benchmark that was stopped goes on."""

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]


def read(path: Path) -> list[Job]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_all(jobs: list[Job], train: Callable[[Job], Job], mark: Callable[[Job], tuple], path: Path, count: int) -> None:
    """Those that the file does not hold yet, `count` at a time; two jobs with one mark are the same."""
    known = {mark(r) for r in read(path)}
    todo = [job for job in jobs if mark(job) not in known]
    path.parent.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(count, maxtasksperchild=8) as pool, open(path, "a") as file:
        for result in pool.imap_unordered(train, todo):
            file.write(json.dumps(result) + "\n")
            file.flush()
