"""Weighted sums of many records of a file: each is read once, while those before it are added up.

Every sum is added up in float32 and in the order asked for, whoever else is asked for, so neither the number of
threads nor the sizes below can change it. Of a large file as much is read through the page cache as stays there until
next time, and the rest past it, where the file system lets us: it would only flush the others.
"""

import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

_PANEL_FLOATS = 1 << 20
"""Floats of one record that are read at once: large for a disk, small for memory, which holds many records' panels."""
_BATCH_BYTES = 256 << 20
"""Bytes of panels in memory at once; the next so many are read in the meantime."""
_STRIPE_FLOATS = 1 << 15
"""Floats added at once: the sums that many records go into, a stripe of each, stay in cache."""
_READER_THREADS = 4
_DIRECT_FROM = 1 << 30
"""From so many bytes on not all is read through the page cache."""
_CACHED_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
"""Bytes of a large file that are: the beginning of every stretch of it, so that disk and memory work side by side."""
_STRETCH_BYTES = 64 << 20
_PAGE_BYTES = 4096


def weighted_sums(
    read: Callable[[int, slice, np.ndarray], np.ndarray], size: int, weight: np.ndarray, threads: int
) -> Tensor:
    """`[K, m]` weights of m records of `size` floats -> sums `[K, size]`.

    `read(i, columns, room)` gives some floats of record i; it may put them into `room`, page-aligned memory with two
    pages to spare. It is called from several threads.
    """
    out = torch.from_numpy(_page_aligned_rows(len(weight), 4 * size).view(np.float32))
    used, room = np.flatnonzero(weight.any(0)), 4 * min(_PANEL_FLOATS, size) + 2 * _PAGE_BYTES
    rows = max(1, _BATCH_BYTES // room)
    panels = [slice(a, min(a + _PANEL_FLOATS, size)) for a in range(0, size, _PANEL_FLOATS)]
    steps = list(product(panels, [used[a : a + rows] for a in range(0, len(used), rows)]))
    shelves = [_page_aligned_rows(min(rows, len(used)), -(-room // _PAGE_BYTES) * _PAGE_BYTES) for _ in steps[:2]]
    with ThreadPoolExecutor(_READER_THREADS) as readers, ThreadPoolExecutor(threads) as adders:

        def begin(number: int) -> list[Future]:
            columns, part = steps[number]
            return [readers.submit(read, i, columns, into) for i, into in zip(part, shelves[number % 2], strict=False)]

        coming = begin(0) if steps else []
        for number, (columns, part) in enumerate(steps):
            found = [torch.from_numpy(job.result()) for job in coming]
            coming = begin(number + 1) if number + 1 < len(steps) else []
            terms = [(k, i, float(weight[k, part[i]])) for k, i in np.argwhere(weight[:, part]).tolist()]
            stripes = [slice(a, a + _STRIPE_FLOATS) for a in range(0, columns.stop - columns.start, _STRIPE_FLOATS)]
            list(adders.map(partial(_add_rows, out[:, columns], found, terms), stripes))
    return out


def _add_rows(out: Tensor, rows: list[Tensor], terms: list[tuple[int, int, float]], stripe: slice) -> None:
    """Some columns of a few records into every sum that uses them; no other thread has these columns."""
    into, pieces = [x[stripe] for x in out], [x[stripe] for x in rows]
    for k, i, w in terms:
        into[k].add_(pieces[i], alpha=w)


def _page_aligned_rows(rows: int, stride: int) -> np.ndarray:
    """Page-aligned zeros for so many records, in large pages where there are any: a disk fills those faster."""
    area = mmap.mmap(-1, max(1, rows * stride))
    with suppress(AttributeError, OSError):
        area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, np.uint8, rows * stride).reshape(rows, stride)


def read_record(fd: int, room: np.ndarray, offset: int, size: int) -> np.ndarray | None:
    """`size` bytes at `offset`, read as whole pages; None where the file ends early."""
    skip = offset % _PAGE_BYTES
    span = room[: -(-(skip + size) // _PAGE_BYTES) * _PAGE_BYTES].data
    found = 0
    while found < skip + size:
        done = os.preadv(fd, [span[found:]], offset - skip + found)
        if not done:
            return None
        found += done
    return room[skip : skip + size]


@contextmanager
def open_readers(path: str | os.PathLike, fd: int, amount: int) -> Iterator[Callable[[int], int]]:
    """offset -> what to read whole pages from: `fd`, or the same file past the page cache where that pays."""
    past = _open_past_cache(path) if amount >= _DIRECT_FROM else None
    if past is None:
        yield lambda offset: fd
        return
    cached = _STRETCH_BYTES * _CACHED_BYTES // max(_CACHED_BYTES, os.fstat(fd).st_size)
    try:
        yield lambda offset: fd if offset % _STRETCH_BYTES < cached else past
    finally:
        os.close(past)


def _open_past_cache(path: str | os.PathLike) -> int | None:
    """The file opened so that reads leave the page cache out; None where the system does not let us."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (AttributeError, OSError):
        return None
    try:
        os.preadv(fd, [mmap.mmap(-1, _PAGE_BYTES)], 0)
    except OSError:
        os.close(fd)
        return None
    return fd
