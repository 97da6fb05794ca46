"""The messages of a sum as bytes and back: a head of fixed length, then what its kind says.

    client -> server   PREPARE    a signed fresh key, and for each neighbour a box with two shares
    server -> client   INTRODUCE  of each neighbour that prepared: its signed fresh key, and its box for this client
    client -> server   UPLOAD     the masked values
    server -> client   UNMASK     who survived, and who dropped out
    client -> server   SHARES     of each neighbour that prepared one share, of the kind that the lists say

The head repeats the digest of the terms and the client from or for whom it is. From the terms follows every length, and
it is compared before anything is read. Bytes may come from anyone: SecureError is all that they can cause.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from sparing.core.errors import SecureError
from sparing.secure.bit_packing import packed_bytes
from sparing.secure.primitives import KEY_BYTES, SIGNATURE_BYTES, TAG_BYTES
from sparing.secure.shamir import PRIME, SHARE_BYTES
from sparing.secure.sum_terms import SumTerms

_HEAD = struct.Struct("<4sBxxxI32s")
_MAGIC = b"SSUM"
BOX_BYTES = 2 * SHARE_BYTES + TAG_BYTES
_KEY = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}s{SIGNATURE_BYTES}s")
MESSAGE_HEAD_BYTES, SIGNED_KEY_BYTES = _HEAD.size, _KEY.size


class MessageKind(IntEnum):
    PREPARE, INTRODUCE, UPLOAD, UNMASK, SHARES = 1, 2, 3, 4, 5


class SignedKey(NamedTuple):
    """A fresh public key and a commitment to the self-mask's seed, signed together."""

    fresh: bytes
    commitment: bytes
    signature: bytes


class Prepared(NamedTuple):
    """What a client sends in prepare."""

    key: SignedKey
    boxes: dict[int, bytes]  # neighbour -> two shares, encrypted for it


class Introduced(NamedTuple):
    """What a client hears of a neighbour."""

    key: SignedKey
    box: bytes


class UnmaskLists(NamedTuple):
    survivors: frozenset[int]
    dropped: frozenset[int]


def write_prepare(terms: SumTerms, client: int, prepared: Prepared) -> bytes:
    boxes = [prepared.boxes[other] for other in sorted(prepared.boxes)]
    return _head(MessageKind.PREPARE, terms, client) + _KEY.pack(*prepared.key) + b"".join(boxes)


def read_prepare(data: bytes, terms: SumTerms, client: int, neighbours: Sequence[int]) -> Prepared:
    body = _body(data, MessageKind.PREPARE, terms, client)
    _check_length(body, _KEY.size + BOX_BYTES * len(neighbours), "prepare message", client)
    cuts = range(_KEY.size, len(body), BOX_BYTES)
    boxes = {other: bytes(body[at : at + BOX_BYTES]) for other, at in zip(neighbours, cuts, strict=True)}
    return Prepared(SignedKey(*_KEY.unpack(body[: _KEY.size])), boxes)


def write_introduction(
    terms: SumTerms, client: int, neighbours: Sequence[int], others: Mapping[int, Introduced]
) -> bytes:
    parts = [_KEY.pack(*others[other].key) + others[other].box for other in neighbours if other in others]
    return _head(MessageKind.INTRODUCE, terms, client) + _bitmap(neighbours, others) + b"".join(parts)


def read_introduction(data: bytes, terms: SumTerms, client: int, neighbours: Sequence[int]) -> dict[int, Introduced]:
    body = _body(data, MessageKind.INTRODUCE, terms, client)
    named, body = _named(body, neighbours, "introduction", client)
    each = _KEY.size + BOX_BYTES
    _check_length(body, each * len(named), "introduction", client)
    others = {}
    for i, other in enumerate(named):
        part = body[i * each : (i + 1) * each]
        others[other] = Introduced(SignedKey(*_KEY.unpack(part[: _KEY.size])), bytes(part[_KEY.size :]))
    return others


def write_upload(terms: SumTerms, client: int, packed: bytes) -> bytes:
    return _head(MessageKind.UPLOAD, terms, client) + packed


def read_upload(data: bytes, terms: SumTerms, client: int) -> memoryview:
    """The packed values."""
    body = _body(data, MessageKind.UPLOAD, terms, client)
    _check_length(body, packed_bytes(terms.size, terms.bits), "masked upload", client)
    return body


def write_unmask(terms: SumTerms, client: int, lists: UnmaskLists) -> bytes:
    return _head(MessageKind.UNMASK, terms, client) + b"".join(_bitmap(terms.cohort, one) for one in lists)


def read_unmask(data: bytes, terms: SumTerms, client: int) -> UnmaskLists:
    body = _body(data, MessageKind.UNMASK, terms, client)
    survivors, body = _named(body, terms.cohort, "request to unmask", client)
    dropped, body = _named(body, terms.cohort, "request to unmask", client)
    _check_length(body, 0, "request to unmask", client)
    return UnmaskLists(frozenset(survivors), frozenset(dropped))


def write_shares(terms: SumTerms, client: int, neighbours: Sequence[int], shares: Mapping[int, int]) -> bytes:
    parts = [shares[other].to_bytes(SHARE_BYTES, "little") for other in neighbours if other in shares]
    return _head(MessageKind.SHARES, terms, client) + _bitmap(neighbours, shares) + b"".join(parts)


def read_shares(data: bytes, terms: SumTerms, client: int, neighbours: Sequence[int]) -> dict[int, int]:
    """Neighbour -> the share of it that this client gives."""
    body = _body(data, MessageKind.SHARES, terms, client)
    named, body = _named(body, neighbours, "answer with shares", client)
    _check_length(body, SHARE_BYTES * len(named), "answer with shares", client)
    shares = {other: share_in(body[i * SHARE_BYTES :][:SHARE_BYTES]) for i, other in enumerate(named)}
    return {other: share for other, share in shares.items() if share is not None}


def share_in(data: bytes | memoryview) -> int | None:
    """None where it is no element of the field."""
    share = int.from_bytes(data, "little")
    return share if share < PRIME else None


def _head(kind: MessageKind, terms: SumTerms, client: int) -> bytes:
    return _HEAD.pack(_MAGIC, kind, client, terms.digest)


def _body(data: bytes, kind: MessageKind, terms: SumTerms, client: int) -> memoryview:
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise SecureError(f"a message of {len(view)} bytes, where the head alone has {_HEAD.size}; send it again")
    if view[: _HEAD.size] == _head(kind, terms, client):
        return view[_HEAD.size :]
    magic, found, who, digest = _HEAD.unpack(view[: _HEAD.size])
    if magic != _MAGIC or found != kind:
        raise SecureError(f"not a message of kind {kind.name}: it begins with {bytes(view[:5]).hex()}; send that one")
    if digest != terms.digest:
        raise SecureError(
            f"a message of another sum than round {terms.round}, attempt {terms.attempt}, or by other terms; "
            "late, or somebody else's"
        )
    raise SecureError(f"a message of client {who} where one of client {client} was due; send that one")


def _bitmap(clients: Sequence[int], chosen: Iterable[int]) -> bytes:
    chosen = set(chosen)
    return np.packbits([who in chosen for who in clients], bitorder="little").tobytes()


def _named(body: memoryview, clients: Sequence[int], what: str, client: int) -> tuple[list[int], memoryview]:
    """Clients whose bits are set, and the rest of the body."""
    n = -(-len(clients) // 8)
    if len(body) < n:
        raise SecureError(f"the {what} of client {client} ends within its list of clients; send it again")
    bits = np.unpackbits(np.frombuffer(body[:n], np.uint8), bitorder="little")
    if bits[len(clients) :].any():
        raise SecureError(f"the {what} of client {client} names clients that there are not; send it again")
    return [clients[i] for i in np.flatnonzero(bits).tolist()], body[n:]


def _check_length(body: memoryview, length: int, what: str, client: int) -> None:
    if len(body) != length:
        raise SecureError(f"the {what} of client {client} has {len(body)} bytes, not {length}; send it again")


def prepare_length(terms: SumTerms) -> int:
    """Bytes of the message."""
    return MESSAGE_HEAD_BYTES + SIGNED_KEY_BYTES + BOX_BYTES * terms.degree


def upload_length(terms: SumTerms) -> int:
    return MESSAGE_HEAD_BYTES + packed_bytes(terms.size, terms.bits)


def most_shares_length(terms: SumTerms) -> int:
    return MESSAGE_HEAD_BYTES + -(-terms.degree // 8) + SHARE_BYTES * terms.degree
