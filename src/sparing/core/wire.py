"""The wire, version 1: parcels as bytes, their exact size without encoding, and back without trust.

    magic, version, schema hash, body length | one section a leaf, one for the notes | crc32

`docs/wire.md` is the format in full. Three laws hold it together: a parcel and its size agree to the byte, what
arrives is what was sent, and accepted bytes encode to themselves, so nothing can be written in two ways.

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

import numpy as np
import torch
from torch import Tensor

from sparing.core import index
from sparing.core.errors import WireError
from sparing.core.index import Buffer, Reader, pack, packed_size, unpack, varint, varint_size
from sparing.core.parcel import Leaf, Parcel, Schema, Spec, clients, row

MAGIC, VERSION = b"SPAR", 1
HASH, CRC = 8, 4
SHORTEST = len(MAGIC) + 1 + HASH + 1 + CRC
POSITIONS = 1 << 25
"""Mask entries whose index sizes are worked out together."""

RAW = {
    torch.float32: "<f4",
    torch.float16: "<f2",
    torch.bfloat16: "<i2",  # NumPy has none: its bits
    torch.float64: "<f8",
    torch.int64: "<i8",
    torch.int32: "<i4",
    torch.uint8: "|u1",
    torch.bool: "|u1",
}
CODES = torch.int8


def schema_of(parcel: Parcel, about: str = "") -> Schema:
    """The schema a receiver of this parcel's first row must hold.

    >>> schema_of(Parcel({"w": Leaf(torch.zeros(3, 2))}, {"n": torch.zeros(3)})).leaves["w"].shape
    (2,)
    """
    leaves = {name: spec_of(leaf) for name, leaf in parcel.leaves.items()}
    return Schema(leaves, {name: math.prod(x.shape[1:]) for name, x in parcel.notes.items()}, about)


def spec_of(leaf: Leaf) -> Spec:
    return Spec(
        tuple(leaf.value.shape[1:]),
        leaf.value.dtype,
        None if leaf.told or leaf.scope is None else leaf.scope[:1],
        leaf.told,
        tuple(tuple(keep.shape[1:]) for keep in leaf.keep),
        0 if leaf.scale is None else leaf.scale.shape[1],
    )


def fingerprint(schema: Schema) -> bytes:
    """Eight bytes by which two ends know that they mean the same layout; what a mask holds is not part of it."""
    leaves = [
        [name, spec.shape, str(spec.dtype).removeprefix("torch."), spec.told, spec.grains, spec.scales]
        for name, spec in schema.leaves.items()
    ]
    text = json.dumps([schema.about, leaves, sorted(schema.notes.items())], separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=HASH).digest()


def dense(schema: Schema) -> int:
    """Bytes of a decoded parcel in memory, all positions present, a packed code counted as four.

    `from_bytes` never holds more than twice this and a constant.

    >>> dense(Schema({"w": Spec((10,), grains=((10,),))}, {"n": 1}))
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
    if not 0 <= k < clients(parcel):
        raise WireError(f"client {k} of a parcel of {clients(parcel)}: count from 0")
    one = row(parcel, k)
    body = [piece for name, leaf in one.leaves.items() for piece in section(write_leaf(name, leaf))]
    body += section([write_note(name, one.notes[name]) for name in sorted(one.notes)])
    head = MAGIC + bytes([VERSION]) + fingerprint(schema_of(one, about)) + varint(sum(map(len, body)))
    crc = 0
    for piece in (head, *body):
        crc = zlib.crc32(piece, crc)
    return b"".join((head, *body, crc.to_bytes(CRC, "little")))


def section(pieces: list[Buffer]) -> list[Buffer]:
    return [varint(sum(map(len, pieces))), *pieces]


def write_note(name: str, note: Tensor) -> bytes:
    if note.dtype != torch.float32:
        raise WireError(f"note {name!r} is {note.dtype}: notes travel as float32, call .float()")
    return array(note).astype("<f4", copy=False).tobytes()


def write_leaf(name: str, leaf: Leaf) -> list[Buffer]:
    """Masks, width of packed codes, scales, values: the pieces of one section (K = 1)."""
    check(name, leaf)
    pieces, alive = write_masks(leaf)
    sent = plain(leaf.value) if alive is None else plain(leaf.value)[alive]
    scale = [] if leaf.scale is None else [array(leaf.scale).astype("<f4", copy=False).tobytes()]
    if leaf.value.dtype == CODES:
        width = int(leaf.bits)
        return [*pieces, bytes([width]), *scale, pack(to_codes(name, sent, width), width)]
    return [*pieces, *scale, sent.astype(stored(leaf.value.dtype, name), copy=False).view(np.uint8).data]


def write_masks(leaf: Leaf) -> tuple[list[Buffer], np.ndarray | None]:
    """The indices of a leaf, and which of its positions are sent: bool `[n]`, None for all."""
    shape = leaf.value.shape[1:]
    pieces: list[Buffer] = []
    alive = None if leaf.scope is None else flat(array(leaf.scope), shape)
    if leaf.told:
        pieces += index.encode(np.ones(math.prod(shape), bool) if alive is None else alive)
    for keep in leaf.keep:
        mask = array(keep).reshape(-1)
        counts_alive = keep.shape[1:] == shape and alive is not None
        pieces += index.encode(mask[alive] if counts_alive else mask)
        wide = flat(array(keep), shape)
        alive = wide if alive is None else alive & wide
    return pieces, alive


def stored(dtype: torch.dtype, where: str) -> np.dtype:
    """How values of a dtype lie in memory and on the wire; codes are packed on their way."""
    if dtype == CODES:
        return np.dtype(np.int8)
    if dtype not in RAW:
        known = ", ".join(sorted(str(d).removeprefix("torch.") for d in (*RAW, CODES)))
        raise WireError(f"{where} is {dtype}; convert it, the wire knows {known}")
    return np.dtype(RAW[dtype])


def check(name: str, leaf: Leaf) -> None:
    """What a sender may get wrong about a leaf, said before any byte is written."""
    shape = leaf.value.shape
    stored(leaf.value.dtype, f"leaf {name!r}")
    for mask in (*leaf.keep, *([] if leaf.scope is None else [leaf.scope])):
        fits = mask.ndim == len(shape) and all(m in (1, s) for m, s in zip(mask.shape[1:], shape[1:], strict=True))
        if mask.dtype != torch.bool or not fits:
            raise WireError(
                f"leaf {name!r}: a {mask.dtype} mask of shape {tuple(mask.shape)} for a value {tuple(shape)}; "
                "masks are bool, have every axis, and an axis is 1 or the value's"
            )
    if leaf.scale is not None and (leaf.scale.dtype != torch.float32 or leaf.scale.ndim != 2):
        raise WireError(f"leaf {name!r}: scale is {leaf.scale.dtype} {tuple(leaf.scale.shape)}, must be float32 [K, s]")
    if leaf.value.dtype == CODES and not 1 <= int(leaf.bits) <= 8:
        raise WireError(f"leaf {name!r}: codes of {int(leaf.bits)} bits; set bits to 1 .. 8")


def array(x: Tensor) -> np.ndarray:
    return x.detach().cpu().contiguous().numpy()


def plain(value: Tensor) -> np.ndarray:
    """The value as a flat NumPy array, bfloat16 as its bits, bool as bytes."""
    same = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}.get(value.dtype, value.dtype)
    return array(value.detach().contiguous().view(same)).reshape(-1)


def flat(mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A mask that broadcasts to the shape as one row of it; a view where it is that already."""
    return np.broadcast_to(mask.reshape(mask.shape[-len(shape) :] if shape else ()), shape).reshape(-1)


def to_codes(name: str, values: np.ndarray, width: int) -> np.ndarray:
    """Signed codes as unsigned ones from 0."""
    if not len(values):
        return values.view(np.uint8)
    low, high = (-1, 1) if width == 1 else (-(1 << width - 1), (1 << width - 1) - 1)
    if values.min() < low or values.max() > high or (width == 1 and not values.all()):
        raise WireError(
            f"leaf {name!r}: codes from {values.min()} to {values.max()} do not fit {width} bits; clamp them"
        )
    return (values > 0).view(np.uint8) if width == 1 else (values.view(np.uint8) + np.uint8(1 << width - 1))


def from_codes(codes: np.ndarray, width: int) -> np.ndarray:
    """`to_codes` undone, in place."""
    if width == 1:
        codes *= 2
        codes -= 1
    else:
        codes -= np.uint8(1 << width - 1)
    return codes.view(np.int8)


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
    data = reader.data
    if len(data) < SHORTEST:
        raise WireError(f"truncated: {len(data)} bytes, no parcel has less than {SHORTEST}; send it again")
    if (magic := bytes(reader.take(len(MAGIC), "magic"))) != MAGIC:
        raise WireError(f"not a parcel: it begins with {magic.hex()}, not {MAGIC.hex()}; pass what to_bytes wrote")
    if (version := reader.byte("version")) != VERSION:
        raise WireError(f"wire version {version}, this side reads {VERSION}; install the same sparing on both sides")
    seen, mine = bytes(reader.take(HASH, "schema hash")), fingerprint(schema)
    body = reader.varint("body length")
    if body > reader.left - CRC:
        raise WireError(f"truncated: {body} bytes of body promised, {max(reader.left - CRC, 0)} came; send it again")
    if body < reader.left - CRC:
        raise WireError(f"{reader.left - CRC - body} bytes behind the parcel; pass exactly one parcel")
    reader.end -= CRC
    crc, told = zlib.crc32(data[: reader.end]), int.from_bytes(data[reader.end :], "little")
    if crc != told:
        raise WireError(f"checksum {crc:08x}, the parcel says {told:08x}: damaged on the way; send it again")
    if seen != mine:
        raise WireError(
            f"schema hash {seen.hex()}, expected {mine.hex()}: the two sides differ in layout, method or round "
            f"({schema.about or 'no about'}); start both from the same config and answer the same round"
        )


def read_leaf(reader: Reader, spec: Spec) -> Leaf:
    scope, keep = spec.scope, []
    alive = None if scope is None or spec.told else flat(array(scope), spec.shape)
    if spec.told:
        alive = index.decode(reader, math.prod(spec.shape))
        scope = tensor(alive, spec.shape)
    for grain in spec.grains:
        if grain == spec.shape:
            alive = mask = read_among(reader, alive, math.prod(grain))
        else:
            mask = index.decode(reader, math.prod(grain))
            alive = narrowed(alive, mask.reshape(grain), spec.shape)
        keep.append(tensor(mask, grain))
    width = 32
    if spec.dtype == CODES and not 1 <= (width := reader.byte("width")) <= 8:
        reader.refuse(f"codes of {width} bits, must be 1 to 8", reader.at - 1)
    scale = read_floats(reader, spec.scales, "scale") if spec.scales else None
    return Leaf(read_value(reader, spec, alive, width), scope, tuple(keep), scale, width, spec.told)


def read_among(reader: Reader, alive: np.ndarray | None, n: int) -> np.ndarray:
    """A mask over all n positions whose index counts only those still alive."""
    if alive is None:
        return index.decode(reader, n)
    bits = index.decode(reader, int(np.count_nonzero(alive)))
    mask = np.zeros(n, bool)
    mask[alive] = bits
    return mask


def narrowed(alive: np.ndarray | None, mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if alive is None:
        return flat(mask, shape)
    return (alive.reshape(shape) & mask).reshape(-1)


def read_value(reader: Reader, spec: Spec, alive: np.ndarray | None, width: int) -> Tensor:
    """Zeros, and the rest of the section where values were sent."""
    n, kind = math.prod(spec.shape), stored(spec.dtype, reader.where)
    count = n if alive is None else int(np.count_nonzero(alive))
    size = packed_size(count, width) if spec.dtype == CODES else count * kind.itemsize
    if reader.left != size:
        reader.refuse(f"{reader.left} bytes of values, {count} of them need {size}")
    if spec.dtype == CODES:
        sent = from_codes(unpack(reader.packed(count, width, "codes"), width, count), width)
    else:
        sent = np.frombuffer(reader.take(size, "values"), kind)
    if spec.dtype == torch.bool and count and sent.max() > 1:
        reader.refuse(f"a bool of {sent.max()}, must be 0 or 1", reader.at - size)
    value = np.zeros(n, kind.newbyteorder("="))
    value[slice(None) if alive is None else alive] = sent
    return tensor(value, spec.shape).view(spec.dtype)


def read_floats(reader: Reader, count: int, what: str) -> Tensor:
    raw = np.frombuffer(reader.take(4 * count, what), "<f4")
    return tensor(raw.astype(np.float32), (count,))


def tensor(x: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(x).reshape(1, *shape)


# --------------------------------------------------------------------------------------------------------- counting


def nbytes(parcel: Parcel) -> Tensor:
    """`[K]` int64: the length of every client's `to_bytes`, without encoding.

    >>> nbytes(Parcel({"w": Leaf(torch.zeros(2, 10))}, {}))
    tensor([60, 60])
    """
    return torch.stack(list(sizes(parcel).values())).sum(0)


def sizes(parcel: Parcel) -> dict[str, Tensor]:
    """What the bytes are spent on: value, index, scale, header, notes, each `[K]` int64."""
    value = indices = scale = body = torch.zeros(clients(parcel), dtype=torch.int64, device=device_of(parcel))
    for leaf in parcel.leaves.values():
        a, b = leaf_sizes(leaf)
        c = 0 if leaf.scale is None else 4 * leaf.scale.shape[1]
        one = a + b + c + len(leaf.keep) + leaf.told + (leaf.value.dtype == CODES)
        value, indices, scale, body = value + a, indices + b, scale + c, body + varint_size(one) + one
    notes = torch.full_like(value, 4 * sum(math.prod(x.shape[1:]) for x in parcel.notes.values()))
    body = body + varint_size(notes) + notes
    header = SHORTEST - 1 + varint_size(body) + body - value - indices - scale - notes
    return {"value": value, "index": indices, "scale": scale, "header": header, "notes": notes}


def device_of(parcel: Parcel) -> torch.device:
    first = next(iter(parcel.leaves.values()), None)
    return torch.device("cpu") if first is None else first.value.device


def leaf_sizes(leaf: Leaf) -> tuple[Tensor, Tensor]:
    """Bytes of one leaf's values and of its indices, `[1]` or `[K]` each."""
    shape = leaf.value.shape[1:]
    n = math.prod(shape)
    indices = torch.zeros(1, dtype=torch.int64, device=leaf.value.device)
    alive, count = leaf.scope, torch.full_like(indices, n)
    if alive is not None:
        alive = alive.expand(-1, *shape).reshape(len(alive), n)
        count = alive.sum(1)
        if leaf.told:
            indices = indices + index_sizes(alive).size
    for keep in leaf.keep:
        if keep.shape[1:] == shape:
            one, count = index_sizes(keep.reshape(len(keep), n), alive, count)
        else:
            one, count = index_sizes(keep.flatten(1)).size, None
        indices = indices + one
        wide = keep.expand(-1, *shape).reshape(len(keep), n)
        alive = wide if alive is None else alive & wide
        count = alive.sum(1) if count is None else count
    if leaf.value.dtype != CODES:
        return count * leaf.value.element_size(), indices
    width = leaf.bits.to(count.device).reshape(-1).long() if isinstance(leaf.bits, Tensor) else leaf.bits
    return packed_size(count, width), indices


def index_sizes(mask: Tensor, alive: Tensor | None = None, universe: Tensor | None = None) -> index.Sizes:
    """Of bool `[R, n]`, counting only positions alive, `universe` `[R]` of them; a stretch of rows at a time."""
    rows, n = max(len(mask), 1 if alive is None else len(alive)), mask.shape[1]
    if alive is None or universe is None:
        universe = torch.full((rows,), n, device=mask.device)
    else:
        mask, alive, universe = mask.expand(rows, n), alive.expand(rows, n), universe.expand(rows)
    step = max(1, POSITIONS // max(n, 1))
    parts = []
    for start in range(0, rows, step):
        some = mask[start : start + step]
        bits = some.reshape(-1) if alive is None else some.masked_select(alive[start : start + step])
        parts.append(index.sizes(bits, universe[start : start + step]))
    return index.Sizes(*map(torch.cat, zip(*parts, strict=True)))
