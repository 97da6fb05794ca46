"""Clients as they are: when they can be reached, how often they vanish in mid-round, what their devices can do, how
long a round waits for them, and which of them lie.

All of it is keyed: the same seed gives the same absences, whatever the engine and however clients are grouped.
"""

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparing.core.context import EVERYONE, Ctx, context, few_keys
from sparing.core.errors import DataError, UploadError, nearest_name
from sparing.core.keys import few_hashes
from sparing.core.method import Local
from sparing.core.parcel import Parcel
from sparing.core.tree import Models, Tree
from sparing.data.files.unpacking import damage_as_data_error, one_line
from sparing.fleet.attack import Attack
from sparing.fleet.timing import seconds_until_upload, upload_bytes_in_time


class Fleet(NamedTuple):
    """`capacity` holds one number per client, `[N]`, for each thing its device declares (rank, up, down, speed)."""

    available: float = 1.0  # chance that a client can be reached in a round
    trace: "AvailabilityTrace | None" = None  # who can be reached when; repeats when it is over
    dropout: float = 0.0  # chance that a client vanishes after training, before its upload
    capacity: dict[str, Tensor] = {}  # noqa: RUF012
    held_out: Tensor | None = None  # ids that are never asked
    attack: Attack | None = None
    latency: float = 0.0  # seconds, paid once each way
    deadline: float | None = None  # seconds after which a round takes no more uploads
    draw: Callable[[int, int], np.ndarray] | None = None  # (round, n) -> uint64 words for cohorts; None: by the seed
    arrivals: "Arrivals | None" = None  # who was asked and who counted in a run that is played again

    @property
    def everybody(self) -> bool:
        """Whether all clients can always be reached."""
        return self.available >= 1 and self.trace is None and (self.held_out is None or not len(self.held_out))

    @property
    def sure(self) -> bool:
        """Whether every upload arrives."""
        return not self.dropout and self.deadline is None

    def present(self, seed: int, t: int, clients: int) -> Tensor:
        """Who can be reached in round t: bool `[N]`."""
        if self.everybody:
            return torch.ones(clients, dtype=torch.bool)
        ids = torch.arange(clients)
        there = context(seed, t, 0, ids, ids, clients, 0).uniform("available", 1)[:, 0] < self.available
        if self.held_out is not None:
            there[self.held_out] = False
        return there if self.trace is None else there & self.trace.present(t, clients)

    def cohort(self, seed: int, t: int, clients: int, count: int) -> Tensor:
        """`count` of the clients that can be reached in round t, or all of them if they are fewer: `[n]` ids in order.

        >>> Fleet().cohort(seed=0, t=1, clients=10, count=3)
        tensor([2, 5, 7])
        """
        if self.arrivals is not None:
            return self.arrivals.asked(t)
        words = (self.draw(t, clients) if self.draw else _public_cohort_words(seed, t, clients)).view(np.int64)
        if self.everybody:
            return torch.from_numpy(_smallest_places(words, count))
        present = self.present(seed, t, clients).nonzero()[:, 0]
        return present[torch.from_numpy(_smallest_places(words[present.numpy()], count))]

    def vanished(self, ctx: Ctx) -> Tensor:
        """Which of these clients drop out of the round: bool `[K]`."""
        if not self.dropout:
            return torch.zeros(len(ctx.ids), dtype=torch.bool)
        return (ctx.uniform("dropout", 1)[:, 0] < self.dropout).cpu()

    def timed(self, local: Local, ctx: Ctx, down_K: Tensor) -> Ctx:
        """The same round, once these clients' downloads are known: with how much they may upload by the deadline."""
        if self.deadline is None:
            return ctx
        capacity = ctx.capacity or {}
        began = seconds_until_upload(self.latency, local, capacity, ctx.n, down_K.to(ctx.n.device))
        return ctx._replace(members=ctx.members._replace(budget=upload_bytes_in_time(self.deadline, capacity, began)))

    def gone(self, ctx: Ctx, up_K: Tensor) -> Tensor:
        """Whose upload of so many bytes never arrives, because they vanished or are late: bool `[K]`."""
        vanished = self.vanished(ctx)
        if ctx.budget is None:
            return vanished
        return vanished.to(ctx.budget.device) | (up_K.to(ctx.budget.device) > ctx.budget)

    def counted(self, ctx: Ctx) -> Tensor:
        """Who of these clients takes part at all: bool `[K]`. To the others this round never happens."""
        if self.arrivals is None:
            return torch.ones(len(ctx.ids), dtype=torch.bool)
        return torch.isin(ctx.ids, self.arrivals.counted(ctx.round))

    def reached(self, ctx: Ctx) -> Tensor:
        """To whom of these clients anything is sent: bool `[K]`."""
        if self.arrivals is None:
            return torch.ones(len(ctx.ids), dtype=torch.bool)
        return torch.isin(ctx.ids, self.arrivals.reached(ctx.round))

    def claim(self, start: Tree, after: Models, ctx: Ctx) -> Models:
        """What these clients say they have learned."""
        return self.attack.claim(start, after, ctx) if self.attack else after

    def refuse_nan(self, parcel: Parcel, gone_K: Tensor, ctx: Ctx) -> None:
        """Stop where an attacker's upload without numbers arrives at a blend that takes every upload."""
        if self.attack:
            self.attack.refuse_nan(parcel, gone_K, ctx)

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Where an attacker's upload stops the run, this says so."""
        try:
            yield
        except UploadError as error:
            if self.attack is None or not self.attack.lies(error.client):
                raise
            raise self.attack.stopped(str(error).partition(";")[0]) from error


def _public_cohort_words(seed: int, t: int, clients: int) -> np.ndarray:
    return few_hashes(few_keys(context(seed, t, 0, [EVERYONE], [EVERYONE], clients, 0), "cohort")[0], clients)[0]


def _smallest_places(words: np.ndarray, count: int) -> np.ndarray:
    """The places, in order, of so many of these words, no two of which are equal: the smallest, or all."""
    if count >= len(words):
        return np.arange(len(words))
    return np.flatnonzero(words < np.partition(words, count)[count])


class Arrivals:
    """Who was asked in each round of a run, and whose upload counted, as its ledger says."""

    def __init__(self, rounds: dict[int, "_Attendance"], where: str):
        self.rounds, self.where = rounds, where

    @property
    def most_asked(self) -> int:
        """Clients of the largest cohort."""
        return max(len(one.asked) for one in self.rounds.values())

    def asked(self, t: int) -> Tensor:
        return torch.tensor(self._of(t).asked, dtype=torch.int64)

    def reached(self, t: int) -> Tensor:
        """Those of them to whom anything was sent."""
        return torch.tensor(self._of(t).reached, dtype=torch.int64)

    def counted(self, t: int) -> Tensor:
        return torch.tensor(self._of(t).counted, dtype=torch.int64)

    def _of(self, t: int) -> "_Attendance":
        if t not in self.rounds:
            raise DataError(f"{self.where} ends with round {max(self.rounds, default=0)}, but this is round {t}")
        return self.rounds[t]


_LEDGER_KEYS = ["round", "client", "direction"]


class _Attendance(NamedTuple):
    """Of one round: ids of clients."""

    asked: list[int]
    reached: list[int]
    counted: list[int]


_COUNTED = "counted"
"""The column that ledgers of secure sums have."""


def read_arrivals(path: Path, clients: int) -> Arrivals:
    """From a ledger: whoever has a row down was asked, and counted if any byte went up, or if a column says so."""
    rows: set[tuple[int, int, str]] = set()
    rounds: dict[int, _Attendance] = {}
    for t, who, direction, is_there in sorted(_ledger_rows(path)):
        if who not in range(clients):
            raise DataError(f"{path} names client {who}; there are clients 0 to {clients - 1}")
        if (t, who, direction) in rows:
            raise DataError(f"{path} names client {who} twice in round {t}; restore it from a copy")
        if direction == "up" and (t, who, "down") not in rows:
            raise DataError(f"{path} has an upload of client {who} in round {t}, who was never asked; restore it")
        rows.add((t, who, direction))
        there = rounds.setdefault(t, _Attendance([], [], []))
        if direction == "down":
            there.asked.append(who)
        if is_there:
            (there.reached if direction == "down" else there.counted).append(who)
    return Arrivals(rounds, str(path))


def _ledger_rows(path: Path) -> list[tuple[int, int, str, bool]]:
    """Round, client, direction, and whether anything was sent down or the client counted."""
    try:
        with damage_as_data_error(f"{path} is no ledger of a run"), open(path, newline="") as file:
            names, *rows = csv.reader(file)
            if names[:3] != _LEDGER_KEYS or not rows:
                raise ValueError(f"no rows of {', '.join(_LEDGER_KEYS)}")
            if odd := next((row for row in rows if len(row) != len(names) or row[2] not in ("down", "up")), None):
                raise ValueError(f"a row {','.join(odd)}")
            at = names.index(_COUNTED) if _COUNTED in names else None
            told = {"down": slice(3, at), "up": slice(3 if at is None else at, None)}
            return [(int(row[0]), int(row[1]), row[2], any(int(x) for x in row[told[row[2]]])) for row in rows]
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); name the folder of a run") from None


class AvailabilityTrace(NamedTuple):
    """Stretches of rounds, each `[n]` int64: `client` can be reached in rounds `first` to `last`, both included."""

    client: Tensor
    first: Tensor
    last: Tensor

    def present(self, t: int, clients: int) -> Tensor:
        """Who can be reached in round t: bool `[N]`. After the last round of all, the first one follows.

        >>> trace = AvailabilityTrace(torch.tensor([0, 1]), torch.tensor([1, 2]), torch.tensor([2, 3]))
        >>> trace.present(1, 2).tolist(), trace.present(6, 2).tolist()
        ([True, False], [False, True])
        """
        now = (t - 1) % int(self.last.max()) + 1
        there = torch.zeros(clients, dtype=torch.bool)
        there[self.client[(self.first <= now) & (now <= self.last)]] = True
        return there


def read_trace(path: str | Path, clients: int) -> AvailabilityTrace:
    """A CSV with the columns client, from, to: client can be reached in rounds from .. to, both included."""
    rows = _read_client_rows(path, ("client", "from", "to"), clients)
    if not rows:
        raise DataError(f"{path} reaches nobody in any round; give at least one row client,from,to")
    for row in rows:
        for name in ("from", "to"):
            if row[name] != int(row[name]) or row[name] > _LAST_ROUND:
                raise DataError(
                    f"{path}: client {row['client']:g} has {name} {row[name]:g}; rounds are whole numbers, "
                    f"at most {_LAST_ROUND:,}"
                )
        if not 1 <= row["from"] <= row["to"]:
            raise DataError(
                f"{path}: client {row['client']:g} is there from {row['from']:g} to {row['to']:g}; rounds count from 1"
            )
    return AvailabilityTrace(*(torch.tensor([int(row[name]) for row in rows]) for name in ("client", "from", "to")))


_LAST_ROUND = 2**53  # up to which a float tells whole numbers apart

_MOST_DECLARED = {"rank": 1.0, "width": 1.0} | dict.fromkeys(("up", "down", "speed", "adapter"), math.inf)
"""What a device can declare, and the most it can be: rank and width are shares of the full model's; up and down are in
Mbit/s, speed in samples a second, adapter is the rank of its adapters."""


def can_declare(name: str, value: float) -> bool:
    """A device may be able to train no adapter at all."""
    return (value > 0 or (name == "adapter" and value == 0)) and value <= _MOST_DECLARED[name] and value < math.inf


def read_capacity(path: str | Path, clients: int) -> dict[str, Tensor]:
    """A CSV with the column client and one column for each thing declared, such as rank, up, down, speed."""
    rows = _read_client_rows(path, ("client",), clients)
    known = {int(row["client"]) for row in rows}
    missing = next((i for i in range(clients) if i not in known), None)
    if missing is not None:
        raise DataError(f"{path} says nothing of client {missing}; give one row for each of the {clients} clients")
    names = [name for name in rows[0] if name != "client"]
    ids = [int(row["client"]) for row in rows]
    if len(ids) > len(known):
        raise DataError(f"{path} names client {Counter(ids).most_common(1)[0][0]} twice; keep one row")
    for name in names:
        if name not in _MOST_DECLARED:
            raise DataError(
                f"{path} has a column {one_line(name)!r} that nothing reads; "
                f"{nearest_name(one_line(name), _MOST_DECLARED)}"
            )
        for row in rows:
            if not can_declare(name, row[name]):
                least = "0 or more" if name == "adapter" else "above 0"
                most = f"above 0 and at most {_MOST_DECLARED[name]:g}" if _MOST_DECLARED[name] < math.inf else least
                raise DataError(f"{path}: client {row['client']:g} declares {name} {row[name]:g}; it must be {most}")
    by_id = {int(row["client"]): row for row in rows}
    return {name: torch.tensor([by_id[i][name] for i in range(clients)], dtype=torch.float64) for name in names}


def _read_client_rows(path: str | Path, columns: tuple[str, ...], clients: int) -> list[dict[str, float]]:
    if not Path(path).is_file():
        raise DataError(f"there is no file {str(path)!r}; it should be a CSV with the columns {', '.join(columns)}")
    with damage_as_data_error(f"{path} is no CSV in UTF-8: save it as one"):
        table = list(_csv_lines(io.StringIO(Path(path).read_bytes().decode("utf-8-sig"), newline="")))
    names = table[0][1] if table else []
    lacking = [name for name in columns if name not in names]
    if lacking:
        raise DataError(f"{path} has no column {lacking[0]!r}; it needs {', '.join(columns)}")
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise DataError(f"{path} has two columns {one_line(twice)!r}; keep one")
    rows = []
    for line, values in table[1:]:
        try:
            rows.append({name: _finite_number(value) for name, value in zip(names, values, strict=True)})
        except ValueError:
            raise DataError(f"{path}: line {line} holds something that is not a number") from None
    for row in rows:
        if row["client"] not in range(clients):
            raise DataError(f"{path} names client {row['client']:g}; there are clients 0 to {clients - 1}")
    return rows


def _csv_lines(text: io.StringIO) -> Iterator[tuple[int, list[str]]]:
    """The lines of a CSV that are not empty, split, and where each ends."""
    reader = csv.reader(text)
    for values in reader:
        if values:
            yield reader.line_num, values


def _finite_number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError
    return value
