"""Two processes on one run folder: the first ends as if it were alone, the second is refused and changes nothing.

python benchmarks/intrude.py [--times 20] [--seed 0]
"""

import argparse
import random
import shutil
import tempfile
import time
from pathlib import Path

from forked import METHODS, begun, done, ended, outcome, progress, study_of, warm

from sparing.runs.results import Record
from sparing.runs.start import resume, start_run

WAYS = ("run, then run", "run, then resume", "resume, then resume", "resume, then run")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--times", type=int, default=20)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    warm()
    draw, wrong = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as place:
        for bank in ("memory", "file"):
            study = study_of(METHODS["psfed"], bank)
            alone, half, began = Path(place) / f"alone-{bank}", Path(place) / f"half-{bank}", time.perf_counter()
            code, said = done(lambda f=alone, s=study: start_run(s, out=f))
            took = time.perf_counter() - began
            if code:
                raise SystemExit(said)
            done(lambda f=half, s=study: start_run(s, out=f, loggers=[stop]))
            want = outcome(alone)
            for way in WAYS:
                first, second = way.split(", then ")
                good = refused = 0
                for i in range(args.times):
                    folder = Path(place) / f"{bank}-{way}-{i}"
                    if first == "resume":
                        shutil.copytree(half, folder)
                    act = {"run": lambda f=folder, s=study: start_run(s, out=f), "resume": lambda f=folder: resume(f)}
                    one = begun(act[first])
                    time.sleep(draw.uniform(0, took))
                    other = begun(act[second])
                    (code, said), (code_2, said_2) = ended(one), ended(other)
                    told = code_2 == 2 and "\n" not in said_2
                    late = code_2 == 0  # the second came when the first had ended, or before it had begun
                    beaten = (code == 2 and "in use by another run" in said) or "already holds a run" in said
                    fine = (code == 0 or (late and beaten)) and (told or late) and outcome(folder) == want
                    good, refused = good + fine, refused + told
                    if not fine:
                        print(f"  {bank}, {way}: first {code} {said[-200:]!r}, second {code_2} {said_2[-200:]!r}")
                    progress(f"{bank}, {way}: {i + 1} of {args.times}")
                wrong += args.times - good
                print(f"bank {bank}, {way}: {good} of {args.times} as if alone, {refused} refused in one sentence")
    raise SystemExit(bool(wrong))


def stop(record: Record) -> None:
    if record.round == 2:
        raise KeyboardInterrupt


if __name__ == "__main__":
    main()
