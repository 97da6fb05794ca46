"""What is kept of compiled loops on disk: a folder that fails, in whatever way, costs time alone."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from numba.core import caching

LOOP = """
from sparing.accel.compiled.compile import compiled


@compiled
def twice(x):
    for i in range(len(x)):
        x[i] *= 2
"""


@pytest.fixture
def twice(tmp_path):
    """Gives the loop as a new process would find it."""
    file = tmp_path / "loop_of_a_test.py"
    file.write_text(LOOP)

    def found():
        spec = importlib.util.spec_from_file_location("loop_of_a_test", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.twice

    return found


def kept(folder: Path, ending: str) -> list[Path]:
    return sorted(folder.rglob(f"loop_of_a_test.twice*.{ending}"))


def doubled(loop, x: np.ndarray) -> bool:
    before = x.copy()
    loop(x)
    return np.array_equal(x, 2 * before)


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    monkeypatch.setattr("numba.core.config.CACHE_DIR", "")


def test_what_was_compiled_is_found_again(twice, tmp_path):
    assert doubled(twice(), np.arange(4.0))
    assert len(kept(tmp_path, "nbc")) == 1
    again = twice()
    assert doubled(again, np.arange(4.0))
    assert sum(again.stats.cache_hits.values()) == 1


def test_a_full_disk_is_no_matter(twice, monkeypatch):
    def full(*args: object) -> None:
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_data", full)
    assert doubled(twice(), np.arange(4.0))


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_a_file_cut_short_is_written_anew(twice, tmp_path, ending):
    assert doubled(twice(), np.arange(4.0))
    kept(tmp_path, ending)[0].write_bytes(b"")
    assert doubled(twice(), np.arange(4.0))
    again = twice()
    assert doubled(again, np.arange(4.0))
    assert sum(again.stats.cache_hits.values()) == 1


def test_code_for_other_arguments_is_not_run(twice, tmp_path):
    """As two processes at once may leave it: whole rows, and every third number."""
    first = twice()
    assert doubled(first, np.arange(4.0))
    assert doubled(first, np.arange(12.0)[::3])
    one, other = kept(tmp_path, "nbc")
    names = one.read_bytes(), other.read_bytes()
    one.write_bytes(names[1])
    other.write_bytes(names[0])
    found = np.arange(12.0)
    twice()(found[::3])
    assert found.tolist() == [0, 1, 2, 6, 4, 5, 12, 7, 8, 18, 10, 11]
