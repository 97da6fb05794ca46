"""The wire: parcels as bytes, their exact size, and back without trust.

    magic, version, schema hash, body length | one section a leaf, one for the notes | crc32

`docs/wire.md` is the format in full. Three laws hold it together: a parcel and its size agree to the byte, what
arrives is what was sent, and accepted bytes of version 1 encode to themselves, so nothing can be written in two ways.
Version 3, written where a leaf is tight, leaves the sender a choice of codes.

    >>> parcel = Parcel({"w": Leaf(torch.tensor([[1.0, 2.0]]))}, {"n": torch.tensor([20.0])})
    >>> data = to_bytes(parcel, 0)
    >>> len(data) == int(nbytes(parcel)[0])
    True
    >>> from_bytes(data, Schema({"w": Spec((2,))}, {"n": 1})).leaves["w"].value
    tensor([[1., 2.]])
"""

import hashlib
import json
import math
import zlib
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from sparing.core.errors import WireError
from sparing.core.parcel import Leaf, Parcel, Schema, Spec, client_count, parcel_row
from sparing.wire.count import LeafSizes, leaf_sizes
from sparing.wire.index import Buffer, Number, Reader, varint, varint_size
from sparing.wire.section import CODES, numpy_array, read_floats, read_leaf, write_leaf

MAGIC = b"SPAR"
HASH, CRC = 8, 4
SHORTEST = len(MAGIC) + 1 + HASH + 1 + CRC
BYTE_KINDS = ("value", "index", "scale", "header", "notes")
"""What the bytes of a parcel are counted as."""


def schema_of(parcel: Parcel, about: str = "") -> Schema:
    """The schema a receiver of this parcel's first row must hold.

    >>> schema_of(Parcel({"w": Leaf(torch.zeros(3, 2))}, {"n": torch.zeros(3)})).leaves["w"].shape
    (2,)
    """
    leaves = {name: _leaf_spec(leaf) for name, leaf in parcel.leaves.items()}
    return Schema(leaves, {name: math.prod(x.shape[1:]) for name, x in parcel.notes.items()}, about)


def _leaf_spec(leaf: Leaf) -> Spec:
    return Spec(
        tuple(leaf.value.shape[1:]),
        leaf.value.dtype,
        None if leaf.told or leaf.scope is None else leaf.scope[:1],
        leaf.told,
        tuple(tuple(keep.shape[1:]) for keep in leaf.keep),
        0 if leaf.scale is None else leaf.scale.shape[1],
        leaf.tight,
    )


def version_of(schema: Schema) -> int:
    return 3 if any(spec.tight for spec in schema.leaves.values()) else 1


def fingerprint(schema: Schema) -> bytes:
    """Eight bytes by which two ends know that they mean the same layout; what a mask holds is not part of it."""
    leaves = [
        [name, spec.shape, str(spec.dtype).removeprefix("torch."), spec.told, spec.grains, spec.scales]
        + ["tight"] * spec.tight
        for name, spec in schema.leaves.items()
    ]
    text = json.dumps([schema.about, leaves, sorted(schema.notes.items())], separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=HASH).digest()


def dense_bytes(schema: Schema) -> int:
    """Bytes of a decoded parcel in memory, all positions present, a packed code counted as four.

    `from_bytes` never holds more than twice this and a constant.

    >>> dense_bytes(Schema({"w": Spec((10,), grains=((10,),))}, {"n": 1}))
    54
    """
    total = 4 * sum(schema.notes.values())
    for spec in schema.leaves.values():
        item = 4 if spec.dtype == CODES else spec.dtype.itemsize
        masks = (*spec.grains, spec.shape) if spec.told else spec.grains
        total += math.prod(spec.shape) * item + sum(map(math.prod, masks)) + 4 * spec.scales
    return total


# ---------------------------------------------------------------------------------------------------------- writing


def to_bytes(parcel: Parcel, k: int, about: str = "") -> bytes:
    """Client k's parcel. `about` must be the receiver's `schema.about`.

    >>> to_bytes(Parcel({}, {}), 0).hex()
    '53504152017d1fc208fafa1450010053351a79'
    """
    return written_parcel(parcel, k, about)[0]


def written_parcel(parcel: Parcel, k: int, about: str = "") -> tuple[bytes, dict[str, int]]:
    """The same, and what its bytes are spent on."""
    if not 0 <= k < client_count(parcel):
        raise WireError(f"client {k} of a parcel of {client_count(parcel)}: count from 0")
    one = parcel_row(parcel, k)
    leaves = [write_leaf(name, leaf) for name, leaf in one.leaves.items()]
    notes: list[Buffer] = [write_note(name, one.notes[name]) for name in sorted(one.notes)]
    body = [piece for pieces in (*(leaf.pieces for leaf in leaves), notes) for piece in _section_bytes(pieces)]
    schema = schema_of(one, about)
    head = MAGIC + bytes([version_of(schema)]) + fingerprint(schema) + varint(sum(map(len, body)))
    crc = 0
    for piece in (head, *body):
        crc = zlib.crc32(piece, crc)
    data = b"".join((head, *body, crc.to_bytes(CRC, "little")))
    value, index = (sum(leaf.size[i] for leaf in leaves) for i in (0, 1))
    scale, noted = sum(len(x) for leaf in leaves for x in leaf.scale), sum(map(len, notes))
    header = len(data) - value - index - scale - noted
    return data, dict(zip(BYTE_KINDS, (value, index, scale, header, noted), strict=True))


def _section_bytes(pieces: list[Buffer]) -> list[Buffer]:
    return [varint(sum(map(len, pieces))), *pieces]


def write_note(name: str, note: Tensor) -> bytes:
    if note.dtype != torch.float32:
        raise WireError(f"note {name!r} is {note.dtype}: notes travel as float32, call .float()")
    return numpy_array(note).astype("<f4", copy=False).tobytes()


# ---------------------------------------------------------------------------------------------------------- reading


def from_bytes(data: Buffer | bytearray, schema: Schema) -> Parcel:
    """The parcel (K = 1, on the CPU) in bytes that may come from anyone; WireError for all that is not one."""
    reader = Reader(memoryview(data).cast("B"))
    read_header(reader, schema)
    leaves = {}
    for number, (name, spec) in enumerate(schema.leaves.items()):
        part = reader.section(f"leaf {number} ({name})")
        leaves[name] = read_leaf(part, spec)
        part.close()
    part = reader.section("notes")
    notes = {name: read_floats(part, schema.notes[name], "note") for name in sorted(schema.notes)}
    part.close()
    reader.close()
    return Parcel(leaves, {name: notes[name] if m != 1 else notes[name][:, 0] for name, m in schema.notes.items()})


def read_header(reader: Reader, schema: Schema) -> None:
    """All that is checked before the body is looked at; the reader is left with exactly the body."""
    version, seen = read_frame(reader)
    if seen != (mine := fingerprint(schema)):
        raise WireError(
            f"schema hash {seen.hex()}, expected {mine.hex()}: the two sides differ in layout, method or round "
            f"({schema.about or 'no about'}); start both from the same config and answer the same round"
        )
    if version != version_of(schema):
        raise WireError(f"wire version {version}, but these leaves are written in version {version_of(schema)}")


def split_parcels(data: Buffer | bytearray, most: int | None = None) -> list[memoryview]:
    """Parcels that stand one behind the other, at least one and at most so many; every one tells its own length.

    >>> one = to_bytes(Parcel({}, {}), 0)
    >>> [bytes(part) == one for part in split_parcels(one + one)]
    [True, True]
    """
    rest, parts = memoryview(data).cast("B"), []
    while len(rest) or not parts:
        if len(parts) == most:
            raise WireError(f"{len(rest)} bytes after {most} parcels, which is all that can be meant")
        reader = Reader(rest)
        _, _, body = read_opening(reader)
        end = reader.at + body + CRC
        parts.append(rest[:end])
        rest = rest[end:]
    return parts


def hash_in(data: Buffer) -> bytes:
    """The schema hash that a parcel begins with."""
    return read_opening(Reader(memoryview(data).cast("B")))[1]


def read_frame(reader: Reader) -> tuple[int, bytes]:
    """What can be checked without a schema; gives the version and the hash, and leaves the reader with the body."""
    data = reader.data
    version, seen, body = read_opening(reader)
    if body < reader.left - CRC:
        raise WireError(f"{reader.left - CRC - body} bytes behind the parcel; pass exactly one parcel")
    reader.end -= CRC
    crc, told = zlib.crc32(data[: reader.end]), int.from_bytes(data[reader.end :], "little")
    if crc != told:
        raise WireError(f"checksum {crc:08x}, the parcel says {told:08x}: damaged on the way; send it again")
    return version, seen


def read_opening(reader: Reader) -> tuple[int, bytes, int]:
    """Version, schema hash and length of the body, of which so many bytes and a checksum are there."""
    data = reader.data
    if len(data) < SHORTEST:
        raise WireError(f"truncated: {len(data)} bytes, no parcel has less than {SHORTEST}; send it again")
    if (magic := bytes(reader.take(len(MAGIC), "magic"))) != MAGIC:
        raise WireError(f"not a parcel: it begins with {magic.hex()}, not {MAGIC.hex()}; pass what to_bytes wrote")
    if (version := reader.byte("version")) not in (1, 3):
        raise WireError(f"wire version {version}, this side reads 1 and 3; install the same sparing on both sides")
    seen = bytes(reader.take(HASH, "schema hash"))
    body = reader.varint("body length")
    if body > reader.left - CRC:
        raise WireError(f"truncated: {body} bytes of body promised, {max(reader.left - CRC, 0)} came; send it again")
    return version, seen, body


# --------------------------------------------------------------------------------------------------------- counting


def nbytes(parcel: Parcel) -> Tensor:
    """`[K]` int64: the length of every client's `to_bytes`; nothing but tight leaves is encoded for it.

    >>> nbytes(Parcel({"w": Leaf(torch.zeros(2, 10))}, {}))
    tensor([60, 60])
    """
    return torch.stack(list(parcel_sizes(parcel).values())).sum(0)


Later = Callable[[], dict[str, Tensor]]


def parcel_sizes(parcel: Parcel) -> dict[str, Tensor]:
    """What the bytes are spent on: value, index, scale, header, notes, each `[K]` int64 on the CPU."""
    return sizes_later(parcel)()


def sizes_later(parcel: Parcel, found: LeafSizes | None = None) -> Later:
    """The same, counted now, but a device is waited for when this is called; `found` is what is known of the leaves."""
    leaves, k = parcel.leaves.values(), client_count(parcel)
    notes = 4 * sum(math.prod(x.shape[1:]) for x in parcel.notes.values())
    if is_plain(parcel):
        values = tuple(x.numel() // max(x.shape[0], 1) * x.element_size() for x in (leaf.value for leaf in leaves))
        return lambda: dict(plain_sizes(values, notes, k))
    scales = [0 if leaf.scale is None else 4 * leaf.scale.shape[1] for leaf in leaves]
    tags = [len(leaf.keep) + leaf.told + (leaf.value.dtype == CODES) for leaf in leaves]
    found = found or leaf_sizes(parcel.leaves)
    return lambda: _added_up(found(), scales, tags, notes, k)


def is_plain(parcel: Parcel) -> bool:
    """Whether values are all that is written: then its size follows from shapes alone."""
    return all(map(_is_bare, parcel.leaves.values()))


def _is_bare(leaf: Leaf) -> bool:
    return leaf.scope is None and not leaf.keep and leaf.scale is None and not leaf.told and leaf.value.dtype != CODES


@lru_cache(maxsize=256)
def plain_sizes(values: tuple[int, ...], notes: int, k: int) -> dict[str, Tensor]:
    """Of leaves that are sent as they are."""
    none = [0] * len(values)
    return _added_up([(size, 0) for size in values], none, none, notes, k)


def _added_up(
    found: list[tuple[Number, Number]], scales: list[int], tags: list[int], notes: int, k: int
) -> dict[str, Tensor]:
    value, indices = np.zeros((2, len(found), k), dtype=np.int64)
    for i, (a, b) in enumerate(found):
        value[i], indices[i] = a, b
    one = value + indices + np.array([scales, tags], dtype=np.int64).sum(0)[:, None]
    body = (varint_size(one) + one).sum(0) + varint_size(notes) + notes
    value, indices, scale = value.sum(0), indices.sum(0), sum(scales)
    header = SHORTEST - 1 + varint_size(body) + body - value - indices - scale - notes
    spent = dict(zip(BYTE_KINDS, (value, indices, scale, header, notes), strict=True))
    return {kind: torch.as_tensor(x, dtype=torch.int64).expand(k) for kind, x in spent.items()}
