"""Damage data files in every way we can think of and watch what their readers do.

    python benchmarks/fuzz_data.py --count 100000 [--seed 0]

Every outcome must be what the reader is for, or one of sparing's own errors in one sentence: no other exception, no end
by a signal, not more than 10 s of processor time, and not more than 1 GiB of memory. Files are read in children forked
once everything is imported, up to 100 by one child, which tells each outcome; where a child dies, the next file is to
blame, and another child goes on behind it. The memory is bounded by RLIMIT_DATA: it counts what a process can write to,
be it touched or not, so that asking for too much fails at once. RLIMIT_AS would count the libraries' own files as well,
which are mapped and hardly read. The 1 GiB includes what the imports took, some 300 MB. A reader that runs into the
limit and makes a sentence of that has failed too. The table's memory is the most that was resident in a child.
"""

import argparse
import logging
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from fuzz_files import Case, cases, hostile

from sparing.core.errors import SparingError
from sparing.data import known_datasets

LIMIT = 1 << 30
LONGEST = 10  # seconds of processor time
LONGEST_SENTENCE = 2_000  # characters; the command that fetches a dataset is part of it
BATCH = 100  # files a child
READ, REFUSED, RAISED, BEYOND, WORDY = range(5)
MEMORY = ("memory", "alloc")


@dataclass
class Row:
    """What became of the files of one reader."""

    files: int = 0
    read: int = 0
    refused: int = 0
    crashed: int = 0
    tracebacks: int = 0
    beyond: int = 0  # ran into the limit
    memory: int = 0  # bytes
    seconds: float = 0.0
    sentences: set[str] = field(default_factory=set)

    @property
    def failed(self) -> int:
        return self.crashed + self.tracebacks + self.beyond


class Job(tuple[Case, bytes | None, int]):
    """A case, the content of its damaged file where that is made by hand, and otherwise the seed of the damage."""


def content_of(case: Case, given: bytes | None, seed: int) -> bytes:
    return case.damage(random.Random(seed), case.files[case.target]) if given is None else given


def attempt(case: Case, data: bytes, folder: Path) -> tuple[int, str]:
    """Read the damaged file as the only one of its kind in this folder."""
    (folder / case.target).write_bytes(data)
    try:
        case.read(folder)
    except SparingError as error:
        said = str(error)
        if any(word in said for word in MEMORY):
            return BEYOND, said
        if "\n" in said or len(said) > LONGEST_SENTENCE or not said.isprintable():
            return WORDY, f"not one sentence: {said[:3000]!r}"
        return REFUSED, said
    except MemoryError:
        return BEYOND, traceback.format_exc()
    except Exception:
        return RAISED, traceback.format_exc()
    return READ, ""


def prepare(case: Case, folder: Path) -> None:
    """The case's good files, where the readers look for them."""
    for name, data in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    os.environ["SPARING_DATA"], os.environ["XDG_CACHE_HOME"] = str(folder), str(folder / "cache")


def confine() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def child(jobs: Sequence[Job], start: int, folder: Path, out: int) -> None:
    """Read files from number `start` on; tell each number before, and the outcome after."""
    confine()
    warnings.simplefilter("ignore")
    logging.disable()
    prepare(jobs[start][0], folder)
    for number in range(start, len(jobs)):
        case, given, seed = jobs[number]
        signal.setitimer(signal.ITIMER_PROF, LONGEST)  # ends the process
        began = time.process_time()
        outcome, said = attempt(case, content_of(case, given, seed), folder)
        words = said.encode(errors="replace")[:4000]
        os.write(out, struct.pack("<IBdI", number, outcome, time.process_time() - began, len(words)) + words)


def run(jobs: Sequence[Job], row: Row, show: bool = True) -> None:
    """Read these files, all of one case, in children."""
    start = 0
    while start < len(jobs):
        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
            told, out = os.pipe()
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                os.close(told)
                try:
                    child(jobs, start, Path(folder), out)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            os.close(out)
            done = listen(told, row, show)
            _, status, usage = os.wait4(pid, 0)
            row.memory = max(row.memory, usage.ru_maxrss * 1024)
        start += done
        if status:
            row.files += 1
            row.crashed += 1
            start += 1
            if show:
                case, given, seed = jobs[start - 1]
                start_of = content_of(case, given, seed)[:300].hex()
                print(f"{case.target}, damage {seed}: exit {os.waitstatus_to_exitcode(status)}; {start_of}", flush=True)


def listen(told: int, row: Row, show: bool) -> int:
    """Count outcomes until the child ends; how many there were."""
    done = 0
    with os.fdopen(told, "rb") as file:
        while head := file.read(17):
            number, outcome, seconds, n = struct.unpack("<IBdI", head)
            said = file.read(n).decode()
            done += 1
            row.files += 1
            row.seconds = max(row.seconds, seconds)
            row.read += outcome == READ
            row.refused += outcome == REFUSED
            row.tracebacks += outcome in (RAISED, WORDY)
            row.beyond += outcome == BEYOND
            if outcome == REFUSED:
                row.sentences.add("".join(c for c in said.split("; fetch")[0] if c.isalpha() or c == " ")[-40:])
            elif outcome != READ and show:
                print(f"file {number}: {said}", flush=True)
    return done


def batches(count: int, seed: int) -> Iterator[list[Job]]:
    """The hostile files, then as many damaged ones as it takes, evenly over the cases, in batches of one case."""
    made, harmful = cases(), hostile()
    for one in harmful:
        case = next(case for case in made if case.reader == one.reader and one.part in case.target)
        yield [Job((case, one.make(), 0))]
    left = max(count - len(harmful), 0)
    for i, case in enumerate(made):
        own = left // len(made) + (i < left % len(made))
        seeds = [(seed * 1_000_003 + i) * 10_000_019 + k for k in range(own)]
        for at in range(0, own, BATCH):
            yield [Job((case, None, one)) for one in seeds[at : at + BATCH]]


def fuzz(count: int, seed: int, show: bool = True) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    began = said = time.monotonic()
    for batch in batches(count, seed):
        run(batch, rows.setdefault(batch[0][0].reader, Row()), show)
        if show and time.monotonic() - said > 30:
            said = time.monotonic()
            files, failed = (sum(getattr(row, name) for row in rows.values()) for name in ("files", "failed"))
            print(f"{files:,} files, {failed} failures, {said - began:,.0f} s", flush=True)
    return rows


def begin() -> None:
    """Everything imported before the first fork."""
    import sklearn.datasets  # noqa: F401

    torch.set_num_threads(1)
    known_datasets()


def table(rows: dict[str, Row]) -> str:
    head = (
        "reader",
        "files",
        "read",
        "refused",
        "crashed",
        "tracebacks",
        "beyond 1 GiB",
        "most memory",
        "slowest file",
    )
    lines = [head, ("---",) * len(head)]
    for name, row in rows.items():
        refused = f"{row.refused:,} ({len(row.sentences)} kinds of sentence)"
        failed = (row.crashed, row.tracebacks, row.beyond)
        spent = (f"{row.memory / 1e6:,.0f} MB", f"{row.seconds:.2f} s")
        lines.append((name, f"{row.files:,}", f"{row.read:,}", refused, *map(str, failed), *spent))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Damage data files and watch their readers.")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begin()
    rows = fuzz(args.count, args.seed)
    print(table(rows))
    return 1 if any(row.failed for row in rows.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
