"""One writer per run folder: a lock on one file of it, held for the life of a run.

The lock belongs to the open file, so nothing but its release or the end of the process lets it go: other descriptors of
the same file may come and go, and a child that the process forked does not inherit it.
"""

import fcntl
import os
import weakref
from pathlib import Path

from sparing.core.errors import CheckpointError

_LOCK_FILE = ".lock"


class FolderLock:
    """Taken when it is made; refused in one sentence where another process, or another run of this one, has it."""

    def __init__(self, folder: Path):
        self.path = path = folder / _LOCK_FILE
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise CheckpointError(
                f"cannot write to {folder} ({error.strerror}); a run needs a folder it may write to"
            ) from None
        self.release = weakref.finalize(self, os.close, self.fd)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self.fd, 20, 0).decode(errors="replace").strip() or "unknown"
            self.release()
            raise CheckpointError(
                f"{folder} is in use by another run (process {holder}); wait until it ends, or stop it"
            ) from None
        except OSError as error:
            self.release()
            raise CheckpointError(
                f"cannot lock {path} ({error.strerror}); choose a folder on a disk that knows locks"
            ) from None
        _HELD_LOCKS.add(self)
        try:
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            pass  # a full disk: the number is only said to whoever comes second

    def check(self) -> None:
        """Refuse to write where the locked file is no longer the folder's: somebody else may hold the one there now."""
        try:
            there = os.stat(self.path)
        except OSError:
            there = None
        if there is None or not os.path.samestat(os.fstat(self.fd), there):
            raise CheckpointError(
                f"{self.path} was removed or replaced while this run held it, so another run may write here; this one "
                "stops: let one of them go on"
            )


_HELD_LOCKS: "weakref.WeakSet[FolderLock]" = weakref.WeakSet()


def _release_in_child() -> None:
    """In a forked child: its copies of the descriptors are closed, which leaves the parent's locks as they are."""
    for lock in list(_HELD_LOCKS):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
