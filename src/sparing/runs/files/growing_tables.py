"""Files of a run that only grow, each with a running SHA-256, so that a checkpoint vouches for every byte before it.

A checkpoint records how long each file was and its digest up to there; what lies beyond was written by rounds that no
checkpoint holds. Digests run along with what is written, so that a checkpoint costs the same in a long run.

    >>> import tempfile
    >>> table = GrowingTable(Path(tempfile.mkdtemp(), "rounds.csv"))
    >>> table.create("round\\n")
    >>> table.append("1\\n")
    >>> mark = table.mark()
    >>> table.append("2\\n")
    >>> again = GrowingTable(table.path)
    >>> again.restore(mark)
    >>> again.cut()
    >>> table.path.read_text()
    'round\\n1\\n'
"""

import hashlib
import os
from pathlib import Path
from typing import Any

from sparing.core.errors import CheckpointError
from sparing.storage.atomic import os_errors_as_checkpoint_error

_READ_BLOCK = 1 << 20
TableMark = dict[str, Any]
"""How long a file was and what its bytes hash to: {"bytes": int, "sha256": hex digits}."""


class GrowingTable:
    """One file, as far as this run has written it."""

    def __init__(self, path: Path):
        self.path, self.size, self.digest = path, 0, hashlib.sha256()

    def create(self, text: str = "") -> None:
        self.size, self.digest = 0, hashlib.sha256()
        with os_errors_as_checkpoint_error(self.path), open(self.path, "wb"):
            pass
        self.append(text)

    def append(self, text: str) -> None:
        data = text.encode()
        with os_errors_as_checkpoint_error(self.path), open(self.path, "ab") as file:
            file.write(data)
        self.extend(data)

    def extend(self, data: bytes) -> None:
        """Take in bytes that stand in the file already."""
        self.digest.update(data)
        self.size += len(data)

    def follow(self) -> None:
        """Take in what somebody else of this process, such as a logger, has appended meanwhile."""
        with os_errors_as_checkpoint_error(self.path), open(self.path, "rb") as file:
            file.seek(self.size)
            while block := file.read(_READ_BLOCK):
                self.extend(block)

    def mark(self) -> TableMark:
        """What a checkpoint records, once the bytes are durable."""
        with os_errors_as_checkpoint_error(self.path), open(self.path, "rb") as file:
            os.fsync(file.fileno())
            found = os.fstat(file.fileno()).st_size
        if found != self.size:
            raise CheckpointError(
                f"{self.path} has {found} bytes where this run has written {self.size}; something else writes to it: "
                "stop that, then resume"
            )
        return {"bytes": self.size, "sha256": self.digest.hexdigest()}

    def restore(self, mark: TableMark) -> None:
        """Go on behind the mark, if every byte before it is as it was written."""
        self.size, self.digest = mark["bytes"], verify_table(self.path, mark)

    def cut(self) -> None:
        """Drop what was written behind the mark."""
        with os_errors_as_checkpoint_error(self.path):
            os.truncate(self.path, self.size)


def verify_table(path: Path, mark: TableMark) -> Any:
    """The running digest of a file up to its mark, which must be the one recorded."""
    digest, left = hashlib.sha256(), mark["bytes"]
    try:
        with open(path, "rb") as file:
            while left and (block := file.read(min(_READ_BLOCK, left))):
                digest.update(block)
                left -= len(block)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; restore it from a copy") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); check its permissions and its disk") from None
    if left:
        raise CheckpointError(
            f"{path} is shorter than the checkpoint says ({mark['bytes']} bytes); restore it from a copy"
        )
    if digest.hexdigest() != mark["sha256"]:
        raise CheckpointError(f"{path} was altered after it was written; restore it from a copy")
    return digest
