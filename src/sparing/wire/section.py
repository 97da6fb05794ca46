"""One leaf as the pieces of its section, and back without trust: masks, width of packed codes, scales, values.

The masks and codes of a tight leaf are written with the smallest of several codes, each of them tried; those of the
others with codes whose size has a closed form.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparing.core.errors import WireError
from sparing.core.parcel import Leaf, Spec
from sparing.wire import index, tight_index, tight_values
from sparing.wire.index import Buffer, Reader, pack, packed_size, unpack

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


class WrittenLeaf(NamedTuple):
    """The pieces of one section, in the order in which they stand."""

    masks: list[Buffer]
    width: list[Buffer]  # of packed codes
    scale: list[Buffer]
    values: list[Buffer]
    index_codes: int  # bytes that say in which code each mask is written
    value_codes: int  # and the values, where they say so

    @property
    def pieces(self) -> list[Buffer]:
        return [*self.masks, *self.width, *self.scale, *self.values]

    @property
    def size(self) -> tuple[int, int]:
        """Bytes of the values and of the indices, without those that say their codes."""
        return sum(map(len, self.values)) - self.value_codes, sum(map(len, self.masks)) - self.index_codes


def write_leaf(name: str, leaf: Leaf) -> WrittenLeaf:
    """One client's leaf (K = 1)."""
    _check_leaf(name, leaf)
    (masks, alive), coded = _write_masks(leaf), leaf.value.dtype == CODES
    scale: list[Buffer] = [] if leaf.scale is None else [numpy_array(leaf.scale).astype("<f4", copy=False).tobytes()]
    width: list[Buffer] = [bytes([int(leaf.bits)])] if coded and not leaf.tight else []
    values = _write_values(name, leaf, alive)
    return WrittenLeaf(masks, width, scale, values, len(leaf.keep) + leaf.told, int(coded and leaf.tight))


def _write_values(name: str, leaf: Leaf, alive: np.ndarray | None) -> list[Buffer]:
    """What is alive of the values (K = 1)."""
    sent = _plain_array(leaf.value) if alive is None else _plain_array(leaf.value)[alive]
    if leaf.value.dtype != CODES:
        return [sent.astype(_stored_dtype(leaf.value.dtype, name), copy=False).view(np.uint8).data]
    if leaf.tight:
        return [*tight_values.encode_tight_values(sent, matrix_columns(leaf.value.shape[1:]), alive)]
    return [pack(to_codes(name, sent, int(leaf.bits)), int(leaf.bits))]


def _write_masks(leaf: Leaf) -> tuple[list[Buffer], np.ndarray | None]:
    """The indices of a leaf, and which of its positions are sent: bool `[n]`, None for all."""
    shape = leaf.value.shape[1:]
    pieces: list[Buffer] = []
    alive = None if leaf.scope is None else _flat_mask(numpy_array(leaf.scope), shape)
    write = tight_index.encode_tight_index if leaf.tight else lambda bits, columns: index.encode_index(bits)
    if leaf.told:
        alive = np.ones(math.prod(shape), bool) if alive is None else alive
        pieces += write(alive, matrix_columns(shape))
    for keep in leaf.keep:
        mask = numpy_array(keep).reshape(-1)
        counts_alive = keep.shape[1:] == shape and alive is not None
        pieces += write(mask[alive], None) if counts_alive else write(mask, matrix_columns(keep.shape[1:]))
        wide = _flat_mask(numpy_array(keep), shape)
        alive = wide if alive is None else alive & wide
    return pieces, alive


def matrix_columns(shape: tuple[int, ...]) -> int | None:
    """How many positions a row has, where a tensor has rows."""
    return math.prod(shape[1:]) if len(shape) > 1 else None


def _stored_dtype(dtype: torch.dtype, where: str) -> np.dtype:
    """How values of a dtype lie in memory and on the wire; codes are packed on their way."""
    if dtype == CODES:
        return np.dtype(np.int8)
    if dtype not in RAW:
        known = ", ".join(sorted(str(d).removeprefix("torch.") for d in (*RAW, CODES)))
        raise WireError(f"{where} is {dtype}; convert it, the wire knows {known}")
    return np.dtype(RAW[dtype])


def _check_leaf(name: str, leaf: Leaf) -> None:
    """What a sender may get wrong about a leaf, said before any byte is written."""
    shape = leaf.value.shape
    _stored_dtype(leaf.value.dtype, f"leaf {name!r}")
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


def numpy_array(x: Tensor) -> np.ndarray:
    return x.detach().cpu().contiguous().numpy()


def _plain_array(value: Tensor) -> np.ndarray:
    """The value as a flat NumPy array, bfloat16 as its bits, bool as bytes."""
    same = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}.get(value.dtype, value.dtype)
    return numpy_array(value.detach().contiguous().view(same)).reshape(-1)


def _flat_mask(mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
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


def read_leaf(reader: Reader, spec: Spec) -> Leaf:
    scope, keep = spec.scope, []
    alive = None if scope is None or spec.told else _flat_mask(numpy_array(scope), spec.shape)
    read = tight_index.decode_tight_index if spec.tight else lambda reader, u, columns: index.decode_index(reader, u)
    if spec.told:
        alive = read(reader, math.prod(spec.shape), matrix_columns(spec.shape))
        scope = _tensor_of_shape(alive, spec.shape)
    for grain in spec.grains:
        if grain == spec.shape and alive is not None:
            alive = mask = _among_alive(alive, read(reader, int(np.count_nonzero(alive)), None))
        else:
            mask = read(reader, math.prod(grain), matrix_columns(grain))
            alive = _narrowed_mask(alive, mask.reshape(grain), spec.shape)
        keep.append(_tensor_of_shape(mask, grain))
    bits = 32 if spec.dtype != CODES else 8 if spec.tight else reader.byte("width")
    if not (spec.dtype != CODES or 1 <= bits <= 8):
        reader.refuse(f"codes of {bits} bits, must be 1 to 8", reader.at - 1)
    scale = read_floats(reader, spec.scales, "scale") if spec.scales else None
    return Leaf(read_value(reader, spec, alive, bits), scope, tuple(keep), scale, bits, spec.told, spec.tight)


def _among_alive(alive: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """A mask over all positions of which `bits` says which of those alive it keeps."""
    mask = np.zeros(len(alive), bool)
    mask[alive] = bits
    return mask


def _narrowed_mask(alive: np.ndarray | None, mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if alive is None:
        return _flat_mask(mask, shape)
    return (alive.reshape(shape) & mask).reshape(-1)


def read_value(reader: Reader, spec: Spec, alive: np.ndarray | None, bits: int) -> Tensor:
    """Zeros, and the rest of the section where values were sent."""
    n = math.prod(spec.shape)
    count = n if alive is None else int(np.count_nonzero(alive))
    if spec.dtype == CODES and spec.tight:
        sent = tight_values.decode_tight_values(reader, count, matrix_columns(spec.shape), alive)
    else:
        sent = read_plain(reader, spec, count, bits)
    value = np.zeros(n, sent.dtype.newbyteorder("="))
    value[slice(None) if alive is None else alive] = sent
    return _tensor_of_shape(value, spec.shape).view(spec.dtype)


def read_plain(reader: Reader, spec: Spec, count: int, bits: int) -> np.ndarray:
    """So many values as they are, or codes of so many bits."""
    kind = _stored_dtype(spec.dtype, reader.where)
    size = packed_size(count, bits) if spec.dtype == CODES else count * kind.itemsize
    if reader.left != size:
        reader.refuse(f"{reader.left} bytes of values, {count} of them need {size}")
    if spec.dtype == CODES:
        return from_codes(unpack(reader.packed(count, bits, "codes"), bits, count), bits)
    sent = np.frombuffer(reader.take(size, "values"), kind)
    if spec.dtype == torch.bool and count and sent.max() > 1:
        reader.refuse(f"a bool of {sent.max()}, must be 0 or 1", reader.at - size)
    return sent


def read_floats(reader: Reader, count: int, what: str) -> Tensor:
    raw = np.frombuffer(reader.take(4 * count, what), "<f4")
    return _tensor_of_shape(raw.astype(np.float32), (count,))


def _tensor_of_shape(x: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(x).reshape(1, *shape)
