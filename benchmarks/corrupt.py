"""Files of run folders, corrupted one at a time: resuming and comparing give the same numbers, or name the file.

python benchmarks/corrupt.py [--count 1000] [--seed 0]
"""

import argparse
import random
import shutil
import signal
import tempfile
from collections import Counter
from pathlib import Path

from forked import METHODS, begun, done, ended, outcome, progress, study_of, warm

from sparing.reports.run_folders import read_run_folder
from sparing.runs.results import Record
from sparing.runs.start import resume, start_run
from sparing.runs.study import Study

CASES = {
    "psfed, memory": (METHODS["psfed"], "memory"),
    "pfedsim, file": (METHODS["pfedsim"], "file"),
    "dp": ([{"dp": {"noise": 2.0}}, "int8"], "memory"),
}


def made(folder: Path, study: Study, rounds: int | None) -> None:
    """A run that ends, or stops after so many rounds as if it had been killed."""

    class Stop(Exception):
        pass

    def stop(record: Record) -> None:
        if record.round == rounds:
            raise Stop

    try:
        start_run(study, out=folder, loggers=[stop], key=bytes(32))
    except Stop:
        return


def corrupted(data: bytes, draw: random.Random) -> tuple[str, bytes | None]:
    """What was done, and the bytes afterwards; None: the file is deleted."""
    kind = draw.choice(["bit", "bit", "byte", "cut", "longer", "swap", "zeros", "delete", "line"])
    place = draw.randrange(len(data)) if data else 0
    if kind == "delete":
        return kind, None
    if kind == "longer" or not data:
        return "longer", data + draw.randbytes(draw.randrange(1, 40))
    if kind == "cut":
        return kind, data[:place]
    if kind == "line":
        lines = data.splitlines(keepends=True)
        del lines[draw.randrange(len(lines))]
        return kind, b"".join(lines)
    out = bytearray(data)
    if kind == "bit":
        out[place] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        out[place] = draw.randrange(256)
    elif kind == "zeros":
        out[place : place + 16] = bytes(len(out[place : place + 16]))
    else:
        other = draw.randrange(len(data))
        out[place], out[other] = out[other], out[place]
    return kind, bytes(out)


def plain(folder: Path) -> list[dict]:
    """The table of rounds, without how long they took."""
    return [{k: v for k, v in vars(record).items() if k != "seconds"} for record in read_run_folder(folder).table]


def compared(folder: Path, want: list) -> None:
    """What `compare` and `report` would take from the folder."""
    found = plain(folder)
    if repr(found) != repr(want[: len(found)]):
        raise AssertionError("another table was read")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--count", type=int, default=1000)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    warm()
    draw, found, bad = random.Random(args.seed), Counter(), 0
    with tempfile.TemporaryDirectory() as place:
        sources = {}
        for name, (method, bank) in CASES.items():
            for state, rounds in (("finished", None), ("broken", 4)):
                folder = Path(place) / f"{name}-{state}"
                study = study_of(method, bank, "mlp", checkpoint=3, keep_secret=True)
                code, said = done(lambda f=folder, s=study, r=rounds: made(f, s, r))
                if code:
                    raise SystemExit(said)
                sources[name, state] = folder
        wanted = {name: outcome(sources[name, "finished"]) for name in CASES}
        tables = {name: plain(sources[name, "finished"]) for name in CASES}
        for i in range(args.count):
            (name, state), source = draw.choice(list(sources.items()))
            folder = Path(place) / "now"
            shutil.copytree(source, folder)
            file = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
            kind, data = corrupted(file.read_bytes(), draw)
            file.unlink() if data is None else file.write_bytes(data)
            for what, action in (
                ("compare", lambda f=folder, n=name: compared(f, tables[n])),
                ("resume", lambda f=folder: resume(f)),
            ):
                code, said = ended(begun(action))
                if code == 2 and file.name in said:
                    verdict = "refused by name"
                elif code == 0 and (what == "compare" or outcome(folder) == wanted[name]):
                    verdict = "identical"
                else:
                    verdict, bad = "WRONG", bad + 1
                    signalled = f"signal {signal.Signals(-code).name}" if code < 0 else said.strip().splitlines()[-1:]
                    print(f"  {what}: {name}, {state}, {file.name}, {kind}: exit {code}, {signalled}")
                found[file.name, what, verdict] += 1
            shutil.rmtree(folder)
            progress(f"{i + 1} of {args.count}")
    verdicts = ("identical", "refused by name", "WRONG")
    print("| file | resume: identical | refused by name | WRONG | compare: identical | refused by name | WRONG |")
    print("|---|---|---|---|---|---|---|")
    for name in sorted({key[0] for key in found}):
        cells = [found[name, what, verdict] for what in ("resume", "compare") for verdict in verdicts]
        print(f"| {name} | {' | '.join(map(str, cells))} |")
    print(f"{args.count} corruptions, {bad} wrong")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
