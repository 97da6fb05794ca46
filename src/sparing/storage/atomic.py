"""Files that are whole or not there: what checkpoints, slot files and results share.

A crash may come at any moment. Whoever writes through this page leaves either the old file or the new one, never a
half; a leftover `.name.part` is overwritten by the next write. One process writes a given path.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomic(Path(folder, "a.txt"), b"whole")
    ...     Path(folder, "a.txt").read_bytes()
    b'whole'
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from sparing.core.errors import CheckpointError

_BytesLike = bytes | bytearray | memoryview


@contextmanager
def replace_file(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write to that takes the place of `path`, durably, once the block ends without an error."""
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # before the rename, or the new name could outlive its bytes
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def owner_only() -> Iterator[None]:
    """Files and sockets that are made meanwhile are for their owner alone, from the first byte."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def os_errors_as_checkpoint_error(path: str | Path) -> Iterator[None]:
    """What the operating system refuses while a run's file is written, such as a full disk, becomes one sentence."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written ({error.strerror}); free some space or check its permissions, then try again"
        ) from error


def write_atomic(path: str | Path, data: _BytesLike) -> None:
    """`path` holds exactly `data` afterwards, or what it held before if anything goes wrong on the way."""
    with replace_file(path) as file:
        file.write(data)


def write_json(path: str | Path, value: Any) -> None:
    """`value` as readable JSON, atomically."""
    write_atomic(path, (json.dumps(value, indent=2) + "\n").encode())


def sync_folder(folder: str | Path) -> None:
    """Makes new and renamed entries of a folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """All of `data` at `offset`: one system call may write less than it was given."""
    while len(data):
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def read_at(fd: int, out: memoryview, offset: int) -> int:
    """Fills `out` from `offset`; the number of bytes found, which is less only at the end of the file."""
    found = 0
    while found < len(out):
        done = os.preadv(fd, [out[found:]], offset + found)
        if not done:
            break
        found += done
    return found
