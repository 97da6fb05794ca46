"""benchmarks/fuzz_data.py: a few hundred damaged files here and now, and whether it would notice."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def fuzzer():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import fuzz_data
    finally:
        sys.path.remove(str(BENCHMARKS))
    return fuzz_data


@pytest.mark.filterwarnings("ignore")  # Pillow warns of damaged pictures
def test_damaged_files_are_read_or_refused_in_one_sentence(fuzzer, tmp_path, monkeypatch):
    seen = {}
    for number, case in enumerate(fuzzer.cases()):
        folder = tmp_path / str(number)
        monkeypatch.setenv("SPARING_DATA", str(folder))
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        fuzzer.prepare(case, folder)
        assert fuzzer.attempt(case, case.files[case.target], folder) == (fuzzer.READ, "")
        for seed in range(8):
            outcome, said = fuzzer.attempt(case, fuzzer.content_of(case, None, seed), folder)
            assert outcome in (fuzzer.READ, fuzzer.REFUSED), f"{case.target}, damage {seed}: {said}"
            seen.setdefault(case.reader, set()).add(outcome)
    readers = {"pickle", "npz", "idx", "gz", "PNG", "other pictures", "CSV", "LEAF, json", "xz, bz2", "YAML", "torch"}
    assert seen.keys() == readers | {"cache"}
    assert all(fuzzer.REFUSED in outcomes for reader, outcomes in seen.items() if reader != "cache")


def test_every_hostile_file_has_its_place(fuzzer):
    cases = fuzzer.cases()
    for one in fuzzer.hostile():
        assert any(case.reader == one.reader and one.part in case.target for case in cases), one


NOTICES = """
import os, time
import numpy as np
import fuzz_data
from fuzz_files import Case
from sparing.core.errors import DataError

def read(folder):
    number = int((folder / "a").read_bytes())
    if number == 1: os.abort()
    if number == 2: np.ones(2 << 30, np.uint8)
    if number == 3: 1 / 0
    if number == 4: raise DataError("no\\nsentence")
    if number == 5: raise DataError("cannot allocate that much")
    if number == 6: raise DataError("no")
    if number == 7:
        while True: pass

case = Case("x", {"a": b""}, "a", lambda rng, data: data, read)
fuzz_data.LONGEST = 0.1
row = fuzz_data.Row()
fuzz_data.run([fuzz_data.Job((case, b"%d" % i, 0)) for i in range(9)], row, show=False)
print(row.files, row.read, row.refused, row.crashed, row.tracebacks, row.beyond, row.failed)
"""


def test_the_fuzzer_notices():
    """A reader that dies, takes memory, raises, says too much, runs out of memory in a sentence, or never ends."""
    code = textwrap.dedent(NOTICES)
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["9", "2", "1", "2", "2", "2", "6"]
