"""The audit log: every letter that was refused, with the reason, one line of JSON each, in audit.jsonl of the run."""

import json
import time
from pathlib import Path

from sparing.net.letter import printable
from sparing.storage.atomic import os_errors_as_checkpoint_error

AUDIT_FILE = "audit.jsonl"
_MOST_BYTES = 64 << 20


class AuditLog:
    """Appends; what a stranger can make it write is bounded."""

    def __init__(self, path: Path | None = None):
        self.path, self.refusals, self.reasons = path, 0, {}

    def refuse(self, t: int, client: int, reason: str) -> None:
        line = printable(reason)
        self.refusals += 1
        self.reasons[client] = line
        if self.path is None:
            return
        entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "round": t, "client": client, "why": line}
        with os_errors_as_checkpoint_error(self.path), open(self.path, "a") as file:
            if file.tell() < _MOST_BYTES:
                file.write(json.dumps(entry) + "\n")
