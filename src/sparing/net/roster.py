"""Who takes part: for every client the key by which its carrier knows it, its samples, and what its device declares.

The operator writes a CSV with a row for each client and the columns client and key; samples, and a column for each
thing a device declares (rank, width, up, down, speed, adapter), may follow. Several clients may share a key: they are
on one node. What a node says when it joins is checked against the roster and written down in the run folder; nothing
that a letter says later changes it.
"""

import csv
import io
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparing.core.errors import ConfigError
from sparing.data.files.unpacking import one_line
from sparing.fleet.fleet import can_declare
from sparing.net.letter import CAPACITIES, MOST_SAMPLES

_MOST_BYTES = 64 << 20
_LONGEST_KEY = 255


class Entry(NamedTuple):
    """One client."""

    client: int
    key: str
    samples: int | None = None  # None until it has joined
    capacity: tuple[float, ...] = (math.nan,) * len(CAPACITIES)


class ClientRoster:
    """All clients, 0 to N - 1."""

    def __init__(self, entries: list[Entry]):
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def count(self) -> Tensor:
        return torch.tensor([one.samples or 0 for one in self.entries])

    @property
    def capacity(self) -> dict[str, Tensor]:
        """What devices declare, each `[N]`; what only some declare is refused when the roster is read."""
        table = torch.tensor([one.capacity for one in self.entries], dtype=torch.float64)
        return {name: table[:, i] for i, name in enumerate(CAPACITIES) if not bool(table[:, i].isnan().any())}

    def joined(self, client: int, n: int, most: int | None) -> None:
        """A node has said how many samples this client has."""
        known = self.entries[client].samples
        if n < 1:
            raise ConfigError(f"client {client} has no samples; leave it out of the roster, or give it some")
        if most is not None and n > most:
            raise ConfigError(f"client {client} says it has {n} samples, more than network.most_samples {most}")
        if known is not None and n != known:
            raise ConfigError(
                f"client {client} says it has {n} samples, and the roster says {known}; correct the roster before a "
                "run begins, or put the node's samples back"
            )
        self.entries[client] = self.entries[client]._replace(samples=n)

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"client": one.client, "key": one.key, "samples": one.samples}
            | {name: x for name, x in zip(CAPACITIES, one.capacity, strict=True) if x == x}
            for one in self.entries
        ]

    @classmethod
    def from_json(cls, rows: list[dict[str, Any]]) -> "ClientRoster":
        """A ValueError or the like where it is none that `to_json` wrote after everybody had joined."""
        entries = [_entry(row, row["samples"]) for row in rows]
        sound = all(type(one.samples) is int and 0 < one.samples <= MOST_SAMPLES and one.key for one in entries)
        if not entries or not sound or [one.client for one in entries] != list(range(len(entries))):
            raise ValueError
        return cls(entries)


def _entry(row: dict[str, Any], samples: int | None) -> Entry:
    capacity = tuple(float(row.get(name, math.nan)) for name in CAPACITIES)
    return Entry(int(row["client"]), str(row["key"]), samples, capacity)


def read_roster(path: Path) -> ClientRoster:
    """The operator's CSV; every mistake is one sentence."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{path} is larger than any roster; give a CSV with the columns client, key")
        rows = list(csv.DictReader(io.StringIO(path.read_bytes().decode("utf-8-sig"), newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"the roster {path} cannot be read ({error}); give a CSV with the columns client, key"
        ) from None
    if not rows:
        raise ConfigError(f"the roster {path} names nobody; give a row client,key for each client")
    known = ("client", "key", "samples", *CAPACITIES)
    odd = [name for name in rows[0] if name not in known]
    lacking = [name for name in ("client", "key") if name not in rows[0]]
    if odd or lacking:
        what = f"a column {one_line(str(odd[0]))!r} that nothing reads" if odd else f"no column {lacking[0]!r}"
        raise ConfigError(f"the roster {path} has {what}; it may have {', '.join(known)}")
    entries: dict[int, Entry] = {}
    for line, row in enumerate(rows, start=2):
        entry = _read_row(row, f"the roster {path}, line {line}")
        if entry.client in entries:
            raise ConfigError(f"the roster {path} names client {entry.client} twice (line {line}); keep one row")
        entries[entry.client] = entry
    missing = next(i for i in range(len(entries) + 1) if i not in entries)
    if missing < len(entries):
        raise ConfigError(f"the roster {path} has no client {missing}; number its {len(entries)} clients from 0")
    table = [entries[i] for i in range(len(entries))]
    _refuse_uneven_capacity(table, path)
    return ClientRoster(table)


def _read_row(row: dict[str, Any], where: str) -> Entry:
    key = (row.get("key") or "").strip()
    if not key or not (key.isascii() and key.isprintable() and len(key) <= _LONGEST_KEY):
        what = "a key that no carrier knows" if key else "no key"
        raise ConfigError(
            f"{where}: client {one_line(str(row['client']))} has {what}; write the id its carrier knows it by"
        )
    try:
        client, samples = int(row["client"]), (row.get("samples") or "").strip()
        capacity = {name: float(row[name]) for name in CAPACITIES if (row.get(name) or "").strip()}
        n = int(samples) if samples else None
    except (TypeError, ValueError):
        raise ConfigError(f"{where} holds something that is not a number; correct it") from None
    if client < 0 or not (n is None or 0 < n <= MOST_SAMPLES) or not all(map(can_declare, capacity, capacity.values())):
        raise ConfigError(
            f"{where} holds a number that cannot be; clients count from 0, the rest is above 0, rank and width to 1"
        )
    return _entry({"client": client, "key": key, **capacity}, n)


def _refuse_uneven_capacity(entries: list[Entry], path: Path) -> None:
    for i, name in enumerate(CAPACITIES):
        told = [one.capacity[i] == one.capacity[i] for one in entries]
        if any(told) and not all(told):
            raise ConfigError(f"the roster {path} gives no {name} for client {told.index(False)}; give all or none")
