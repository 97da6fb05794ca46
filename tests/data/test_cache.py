"""Decoded once: reuse, renewal, damage, and folders that cannot be written to."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from formats import idx_bytes, write, write_mnist

from sparing.core.errors import DataError
from sparing.data import cache, load_dataset
from sparing.data.dataset import Dataset
from sparing.data.sets import mnist


@pytest.fixture
def reads(monkeypatch):
    """How many files were decoded."""
    seen = []
    monkeypatch.setattr(
        mnist, "read_unpacked", lambda path, real=mnist.read_unpacked: (seen.append(path), real(path))[1]
    )
    return seen


def kept(tmp_path):
    return sorted((tmp_path / "cache" / "sparing" / "decoded").iterdir())


def test_the_second_time_nothing_is_decoded(here, tmp_path, reads):
    write_mnist(here / "mnist")
    first, again = load_dataset("mnist", check=False), load_dataset("mnist", check=False)
    assert len(reads) == 4
    for a, b in ((first.x, again.x), (first.y, again.y), (first.official, again.official)):
        assert torch.equal(a, b)
    assert (first.names, first.classes) == (again.names, again.classes)
    assert [path.name.startswith("mnist-") for path in kept(tmp_path)] == [True]


def test_a_changed_source_is_read_anew_and_the_old_copy_goes(here, tmp_path, reads):
    write_mnist(here / "mnist")
    load_dataset("mnist", check=False)
    write_mnist(here / "mnist", train=7)
    assert len(load_dataset("mnist", check=False)) == 11
    assert len(reads) == 8
    assert len(kept(tmp_path)) == 1
    path = here / "mnist" / "train-labels-idx1-ubyte.gz"
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    load_dataset("mnist", check=False)
    assert len(reads) == 12


def test_options_have_copies_of_their_own(tmp_path):
    for side in (1, 2, 1):
        made = Dataset("a", torch.full((2, side), side), torch.tensor([0, 1]), 2)
        assert (
            cache.cached_dataset("a", ["version 1"], {"side": side}, lambda made=made: made).x.tolist()
            == made.x.tolist()
        )
    assert len(kept(tmp_path)) == 2


def test_a_damaged_copy_is_made_anew(here, tmp_path, reads):
    write_mnist(here / "mnist")
    x = load_dataset("mnist", check=False).x.clone()
    for spoil in ("about.json", "0.npy"):
        path = kept(tmp_path)[0] / spoil
        path.write_bytes(path.read_bytes()[:-5])
        assert torch.equal(load_dataset("mnist", check=False).x, x)
    assert len(reads) == 12


def test_writing_to_a_tensor_never_reaches_the_file(here):
    write_mnist(here / "mnist")
    x = load_dataset("mnist", check=False).x
    before = x.clone()
    x.zero_()
    assert torch.equal(load_dataset("mnist", check=False).x, before)


def test_a_cache_that_cannot_be_written(here, tmp_path):
    write_mnist(here / "mnist")
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.warns(UserWarning, match=r"mnist is decoded anew each time: cannot write .*decoded"):
        assert len(load_dataset("mnist", check=False)) == 10


def test_nothing_half_written_is_left(tmp_path):
    def broken():
        raise DataError("no")

    with pytest.raises(DataError):
        cache.cached_dataset("a", ["1"], {}, broken)
    assert not (tmp_path / "cache").exists()


def test_mnist_sized_data_comes_from_the_cache_at_once(here):
    for name, n in (("train", 60_000), ("t10k", 10_000)):
        write(here / "mnist" / f"{name}-images-idx3-ubyte", idx_bytes(np.zeros((n, 28, 28), np.uint8)))
        write(here / "mnist" / f"{name}-labels-idx1-ubyte", idx_bytes(np.zeros(n, np.uint8)))
    load_dataset("mnist", check=False)
    before, start = resident(), time.perf_counter()
    data = load_dataset("mnist", check=False)
    assert time.perf_counter() - start < 0.5
    assert resident() - before < 10e6
    assert data.x.shape == (70_000, 1, 28, 28)


def resident():
    """Bytes of this process in memory; 0 where the system does not say."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if file.exists() else 0
