"""What the clients of a round are sent, and how each of them is to see the round."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from sparing.core.context import Ctx
from sparing.core.download import download_kinds, write_download
from sparing.core.errors import WireError
from sparing.core.parcel import Parcel
from sparing.core.round import Server, outgoing, schema_up
from sparing.core.versions import commonly_held, first_held
from sparing.engines.engine import Job, Sizes
from sparing.net.letter import HEAD_BYTES, Kind, Letter, write_letter
from sparing.net.node import model_digest
from sparing.wire.bound import most_bytes

MOST_ELSE = 4096
"""Bytes of an answer that is not what was asked for."""
MakeLetter = Callable[..., Letter]


class Asked(NamedTuple):
    """What one client of a round was asked."""

    ctx: Ctx
    server: Server  # as this client is to see it
    sizes: Sizes  # of its download
    most: int  # bytes of its answer


class Downloads:
    """Letters that ask the clients of a round to train; `letter` is that of the desk."""

    def __init__(self, job: Job, server: Server, cohort: Ctx, letter: MakeLetter):
        self.job, self.server, self.letter = job, server, letter
        self.rows = {who: cohort.at(slice(k, k + 1)) for k, who in enumerate(cohort.ids.tolist())}
        self.lost: set[int] = set()  # clients that have lost their state
        self.asked: dict[int, Asked] = {}

    def letters(self, clients: list[int], before: bytes = b"", most: int = 0) -> Iterator[tuple[int, bytes]]:
        """Made one by one, as the carrier takes them: they may be large. `before`: stands before every download.

        `most`: bytes of an answer, where that is not an upload.
        """
        for who in clients:
            ctx, server = self.seen_by(who)
            down = outgoing(self.job.method, server, ctx)
            body = before + write_download(self.job.method, server.past, down, ctx)
            sizes = download_kinds(self.job.method, server.past, down, ctx)[1]
            longest = most or most_bytes(schema_up(self.job.method, down, ctx))
            self.asked[who] = Asked(ctx, server, sizes, HEAD_BYTES + max(longest, MOST_ELSE))
            yield who, write_letter(self.letter(Kind.TRAIN, server, ctx, body, self.digest(down)))

    def seen_by(self, who: int) -> tuple[Ctx, Server]:
        """The round and the server as this client is to see them; one that has lost its state is met anew."""
        ctx = self.rows[who]
        if who not in self.lost:
            return ctx, self.server
        ctx = ctx._replace(members=ctx.members._replace(first=torch.tensor([True])))
        past = self.server.past
        if "held" in past:
            place = torch.tensor([who], device=past["held"].device)
            past = past | {"held": past["held"].index_fill(0, place, first_held(self.job.method))}
        return ctx, self.server._replace(past=past)

    def lose(self, who: int) -> None:
        """This client says that it has lost its state."""
        if who in self.lost:
            raise WireError("the node asks for everything twice in a round")
        self.lost.add(who)

    def digest(self, down: Parcel) -> bytes:
        """Of the model that a client holds from this round on, where the server broadcasts."""
        names = commonly_held(self.job.method)
        return model_digest({n: down.leaves[n].value for n in names if n in down.leaves}) if names else bytes(16)

    def sizes(self, who: int) -> Sizes:
        """What this client's download took, or would have taken."""
        if who in self.asked:
            return self.asked[who].sizes
        ctx, server = self.seen_by(who)
        return download_kinds(self.job.method, server.past, outgoing(self.job.method, server, ctx), ctx)[1]
