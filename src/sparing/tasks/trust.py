"""Which code files this user has agreed to run: their digests, in a file of the user's own.

A study or a run folder from elsewhere may name code. Nothing of it runs before somebody has said so.
"""

import os
from pathlib import Path

from sparing.core.errors import ConfigError


def trust_record() -> Path:
    """One line for each file: its sha256, and where it lay."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "sparing" / "trusted"


def is_trusted(sha256: str) -> bool:
    return any(line.split(b" ", 1)[0] == sha256.encode() for line in _recorded().splitlines())


def _recorded() -> bytes:
    try:
        return trust_record().read_bytes()
    except OSError:
        return b""


def trust(sha256: str, path: Path) -> None:
    """From now on these bytes may run."""
    if is_trusted(sha256):
        return
    record, before = trust_record(), _recorded()
    broken = "" if not before or before.endswith(b"\n") else "\n"
    place = "".join(c if c.isprintable() else "?" for c in str(path.resolve()))
    try:
        record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        there = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(there, f"{broken}{sha256} {place}\n".encode())
        finally:
            os.close(there)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {record} ({error.strerror}), where trusted code is recorded; set XDG_STATE_HOME"
        ) from None
