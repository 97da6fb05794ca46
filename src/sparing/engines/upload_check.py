"""One client's upload of a round is really asked for and written, and must be as long as was counted."""

from sparing.core.context import Ctx
from sparing.core.errors import SparingError
from sparing.core.keys import tag_word
from sparing.core.method import Method
from sparing.core.ops import is_formed
from sparing.core.parcel import Parcel, parcel_row
from sparing.core.round import schema_up
from sparing.wire import Later, is_plain, to_bytes

EVERY = 100
"""Rounds from one such client to the next on a device, where a round takes less time than writing a parcel."""


def client_to_check(cohort: Ctx) -> int | None:
    """Whose upload is weighed in this round, if anybody's."""
    ids, every = cohort.ids, 1 if cohort.device.type == "cpu" else EVERY
    now = len(ids) > 0 and cohort.round % every == 1 % every
    return int(ids[tag_word(cohort.seed, cohort.round, "weighed") % len(ids)]) if now else None


def check_request(method: Method, sent: Parcel, who: int | None, ctx: Ctx) -> None:
    """What the server asks back of the client `who` must make sense, if it is among these K."""
    ids = ctx.ids.tolist() if who is not None else []
    if who in ids and method.fit is None:
        k = ids.index(who)
        schema_up(method, parcel_row(sent, k), ctx.at(slice(k, k + 1)))


def check_written_size(parcel: Parcel, counted: Later, who: int | None, ctx: Ctx) -> Later:
    """The sizes of these K clients' parcels, compared with what the client `who` writes, if it is among them.

    Parcels of plain values all have the size of their shapes, so there the first round is enough.
    """
    ids, leaves = ctx.ids.tolist() if who is not None else [], parcel.leaves.values()
    formed = all(is_formed(leaf.value) for leaf in leaves)
    if who not in ids or not formed or (ctx.round > 1 and is_plain(parcel)):
        return counted
    k = ids.index(who)
    length = len(to_bytes(parcel, k))

    def compared() -> dict:
        sizes = counted()
        total = sum(int(x.expand(len(ids))[k]) for x in sizes.values())
        if total != length:
            raise SparingError(
                f"counted {total} bytes for client {who} in round {ctx.round}, but it wrote {length}; this is a bug, "
                "please report it"
            )
        return sizes

    return compared
