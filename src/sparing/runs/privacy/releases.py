"""What has been released of a private run: releases.csv, a line for every noised sum that may have left.

A line says in which round, of which client (-1: of the whole cohort), and a keyed digest of the values that got noise.
It is durable before anything of that round is written, printed or sent. A round that is trained again after a crash
gives the same values, the same noise and the same line. Other values are another release of the same clients: they get
a line of their own, and epsilon counts every line.

Each line ends in a checksum of itself. A last line without an end was never durable, so nothing followed from it.
"""

import hashlib
from pathlib import Path

from sparing.core.errors import CheckpointError
from sparing.runs.files.growing_tables import GrowingTable, TableMark

_RELEASES_FILE = "releases.csv"
_RELEASES_HEADER = "round,client,digest,check\n"


class Releases:
    """Those of a run so far; in memory alone, where the run has no folder."""

    def __init__(self, folder: Path | None = None):
        self.table = GrowingTable(folder / _RELEASES_FILE) if folder else None
        self.digests: dict[tuple[int, int], set[str]] = {}
        self.unwritten = ""

    def create(self) -> None:
        if self.table:
            self.table.create(_RELEASES_HEADER)

    def restore(self, mark: TableMark) -> None:
        """All that were ever written: up to the checkpoint, and those of rounds after it."""
        assert self.table is not None
        self.table.restore(mark)
        data = self.table.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if _lacks_only_its_end(data[len(whole) :]):
            raise CheckpointError(f"{self.table.path} was altered after it was written; restore it from a copy")
        for line in whole[len(_RELEASES_HEADER) :].decode(errors="replace").splitlines():
            round, client, digest = _read_release_line(line, self.table.path)
            self.digests.setdefault((round, client), set()).add(digest)
        self.table.extend(whole[self.table.size :])

    def cut(self) -> None:
        """Drop a last line without an end."""
        if self.table:
            self.table.cut()

    def count(self, t: int, client: int) -> int:
        """How often this round of this client was released, or will be."""
        return max(1, len(self.digests.get((t, client), ())))

    def add(self, t: int, digests: dict[int, str]) -> bool:
        """Count what is about to be released. Whether some of it was released before with other values."""
        again = False
        for who, digest in digests.items():
            known = self.digests.setdefault((t, who), set())
            if digest not in known:
                again |= bool(known)
                known.add(digest)
                self.unwritten += _release_line(t, who, digest)
        return again

    def write(self) -> None:
        """Make it durable, before anything of it leaves."""
        if self.table and self.unwritten:
            self.table.append(self.unwritten)
            self.table.mark()
        self.unwritten = ""


def _lacks_only_its_end(tail: bytes) -> bool:
    """Whether what stands behind the last line is one that lost its end, and not one that was never written whole."""
    *_, last = tail.split(b",")
    return tail.count(b",") >= 3 and len(last) > 8


def _release_line(t: int, who: int, digest: str) -> str:
    text = f"{t},{who},{digest}"
    return f"{text},{_line_checksum(text)}\n"


def _line_checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _read_release_line(line: str, path: Path) -> tuple[int, int, str]:
    text, _, found = line.rpartition(",")
    if _line_checksum(text) != found:
        raise CheckpointError(f"{path} was altered after it was written; restore it from a copy")
    round, client, digest = text.split(",")
    return int(round), int(client), digest
