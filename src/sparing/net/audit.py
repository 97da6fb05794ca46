"""The audit log: every letter that was refused, with the reason, one line of JSON each, in audit.jsonl of the run.

What went wrong in a round for which no single client is to blame has a line without a client.
"""

import json
import time
from pathlib import Path
from typing import Any

from sparing.net.letter import printable
from sparing.storage.atomic import os_errors_as_checkpoint_error

AUDIT_FILE = "audit.jsonl"
_MOST_BYTES = 64 << 20


class AuditLog:
    """Appends; what a stranger can make it write is bounded."""

    def __init__(self, path: Path | None = None):
        self.path, self.refusals, self.reasons = path, 0, {}

    def refuse(self, t: int, client: int, reason: str) -> None:
        self.refusals += 1
        self.reasons[client] = printable(reason)
        self._append(t, {"client": client, "why": self.reasons[client]})

    def note(self, t: int, why: str) -> None:
        """What befell a round, by nobody's fault that could be told."""
        self._append(t, {"client": None, "why": printable(why)})

    def _append(self, t: int, what: dict[str, Any]) -> None:
        if self.path is None:
            return
        entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "round": t} | what
        with os_errors_as_checkpoint_error(self.path), open(self.path, "a") as file:
            if file.tell() < _MOST_BYTES:
                file.write(json.dumps(entry) + "\n")
