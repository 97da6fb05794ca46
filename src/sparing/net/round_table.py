"""One round at the desk in which clients send parcels: who has answered, and what it comes to so far."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import WireError
from sparing.core.fold import Collect, Fold
from sparing.core.parcel import map_tensors
from sparing.core.round import Server, incoming, outgoing, schema_up
from sparing.engines.engine import Sizes, Tally
from sparing.net.downloads import Downloads
from sparing.net.letter import Kind
from sparing.wire import from_bytes, parcel_sizes

if TYPE_CHECKING:
    from sparing.net.desk import Desk


class RoundTable:
    def __init__(self, desk: "Desk", server: Server, cohort: Ctx, fold: Fold | Collect):
        self.desk, self.fold, self.server, self.t = desk, fold, server, cohort.round
        self.downloads = Downloads(desk.job, server, cohort, desk.letter)
        self.counted: dict[int, tuple[Sizes, Tensor]] = {}  # client -> bytes of its upload, its loss
        self.enough = enough_of(len(cohort.ids), desk.section.over)
        self.report: dict[str, float] = {}
        self.bytes = 0

    def play(self) -> None:
        self.desk.waiting.ask(self)

    def missing(self) -> list[int]:
        return [who for who in self.downloads.rows if who not in self.counted]

    def letters(self, clients: list[int]) -> Iterator[tuple[int, bytes]]:
        return self.downloads.letters(clients)

    def most(self, who: int) -> int:
        return self.downloads.asked[who].most if who in self.downloads.asked else 0

    def greet(self, clients: list[int], seconds: float) -> None:
        self.desk.greet(clients, seconds, self.t)

    def is_answered(self) -> bool:
        return len(self.counted) >= self.enough

    def suffices(self) -> bool:
        return len(self.counted) >= self.quorum

    @property
    def quorum(self) -> int:
        return quorum_of(self.enough, self.desk.section.quorum)

    def too_few(self) -> str:
        return said_of_missing(self.desk, self.t, f"{len(self.counted)} uploads", self.quorum, self.missing())

    def take(self, who: int, data: bytes) -> bool:
        """Count an answer, or write down why not. True: this client needs everything first."""
        desk, needy = self.desk, False
        with desk.blaming(self.t, who):
            asked = desk.letter(Kind.TRAIN, self.server, self.downloads.asked[who].ctx)
            letter = desk.checked(data, self.most(who), asked, Kind.UPLOAD)
            needy = letter.kind == Kind.NEED
            if needy:
                self.downloads.lose(who)
                desk.audit.refuse(self.t, who, "has lost its state, and is sent everything")
            else:
                self.count(who, letter.body)
        desk.tell(self.t, len(self.downloads.rows), set(self.counted), self.missing(), self.bytes)
        return needy

    def count(self, who: int, upload: bytes) -> None:
        ctx, server, method = self.downloads.asked[who].ctx, self.downloads.asked[who].server, self.desk.job.method
        down = outgoing(method, server, ctx)
        device = server.device
        arrived = from_bytes(upload, schema_up(method, down, ctx))
        sizes = {kind: x.cpu() for kind, x in parcel_sizes(arrived).items()}
        if sum(int(x[0]) for x in sizes.values()) != len(upload):
            raise WireError(f"an upload of {len(upload)} bytes that says no more than a shorter one would")
        hidden = method.privacy is not None and method.privacy.mode == "local"  # then everybody says 1
        told, n = float(arrived.notes["n"][0]), 1 if hidden else int(ctx.n[0])
        if told != n:
            raise WireError(f"an upload of {told:g} samples, where {n} must be said")
        loss = arrived.notes["loss"]
        if not bool(torch.isfinite(loss).all()):
            raise WireError(f"client {who} says its loss is {float(loss[0])}, which is no number to go on with")
        left_out = self.fold.roster.refused
        incoming(method, server, self.fold, down, map_tensors(arrived, lambda x: x.to(device)), ctx)
        if self.fold.roster.refused > left_out:
            self.desk.audit.refuse(
                self.t, who, "its numbers are not finite or too large, and the blend leaves them out"
            )
        self.counted[who] = (sizes, loss)
        self.bytes += len(upload)

    def tally(self) -> Tally:
        tally = Tally()
        some = next(iter(self.downloads.asked.values())).sizes
        nothing = {kind: torch.zeros_like(x) for kind, x in some.items()}
        for who in sorted(self.downloads.rows):
            asked = self.downloads.asked.get(who)
            if asked is None:  # enough had answered before its letter was written
                tally.add_absent(self.downloads.rows[who], nothing)
                continue
            if who not in self.counted:
                tally.add_absent(asked.ctx, asked.sizes)
                continue
            sizes, loss = self.counted[who]
            gone_K = torch.zeros(1, dtype=torch.bool)
            tally.add(asked.ctx, lambda down=asked.sizes: down, lambda up=sizes: up, loss, gone_K)
        return tally


def enough_of(cohort: int, over: float) -> int:
    """How many of a cohort count, where more were asked than are wanted."""
    return min(cohort, math.ceil(cohort / (1 + over) - 1e-9))


def quorum_of(enough: int, said: int | float) -> int:
    return max(1, said if isinstance(said, int) else math.ceil(said * enough - 1e-9))


def said_of_missing(desk: "Desk", t: int, seen: str, needed: int, missing: list[int]) -> str:
    """What a round lacks when all its deadlines have passed."""
    reasons, section = desk.audit.reasons, desk.section
    why = next((f"; client {who}: {reasons[who]}" for who in missing if who in reasons), "")
    return (
        f"round {t} has {seen} and needs {needed} (network.quorum), after {section.retries + 1} deadlines of "
        f"{section.deadline:g} s; missing: clients {', '.join(map(str, missing[:10]))}{why}. Nothing is lost: bring "
        "them back and resume"
    )
