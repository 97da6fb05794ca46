"""Tight leaves written, or only measured, in one compiled call a client: bodies of `tight_values`, `tight_index`."""

import math
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from sparing.accel.compiled import tight_index_loops, tight_value_loops
from sparing.accel.compiled.host_rows import rows_of
from sparing.core.parcel import Leaf
from sparing.wire import tight_values
from sparing.wire.count import written_size
from sparing.wire.section import CODES, matrix_columns


def compiled_tight_index(bits: np.ndarray, columns: int | None) -> list[bytes]:
    """`tight_index.encode_tight_index`."""
    places = tight_value_loops.true_places(_bytes_of(bits))
    return [tight_index_loops.index_way(places, len(bits), columns or 0)[1].tobytes()]


def compiled_tight_values(codes: np.ndarray, columns: int | None, kept: np.ndarray | None = None) -> list[bytes]:
    """`tight_values.encode_tight_values`; loops for many codes of which few are zero are the plain body's own."""
    if 2 * np.count_nonzero(codes) > len(codes) > tight_values.SMALL:
        return tight_values.encode_tight_values.plain(codes, columns, kept)
    if kept is None:
        return [tight_value_loops.written_whole(codes, columns or 0).tobytes()]
    places = tight_value_loops.true_places(_bytes_of(kept))
    assert len(places) == len(codes), "a code for every kept position"
    return [tight_value_loops.written_kept(codes, places, len(kept), columns or 0).tobytes()]


def _bytes_of(mask: np.ndarray) -> np.ndarray:
    """Also of one that is the same everywhere and lies in memory once."""
    return np.ascontiguousarray(mask).view(np.int8)


class Measured(NamedTuple):
    """Bytes of the values and of the indices, `[K]` int64, to be filled in."""

    values: np.ndarray
    indices: np.ndarray


class Measuring(Protocol):
    def __call__(self, first: int, last: int, into: Measured) -> object:
        """Clients first .. last."""


def measuring(name: str, leaf: Leaf) -> Measuring:
    """How clients' tight leaves on the host are measured."""
    keep = leaf.keep[0] if leaf.keep else None
    whole = keep is None or keep.shape[1:] == leaf.value.shape[1:]
    untold = leaf.scope is not None or not leaf.told
    if leaf.value.dtype != CODES or len(leaf.keep) > 1 or not (whole and untold) or 0 in leaf.value.shape:
        return lambda first, last, into: _measure_each(name, leaf, first, last, into)
    codes, columns = rows_of(leaf.value), matrix_columns(leaf.value.shape[1:]) or 0
    scope, keep = _mask_rows(leaf.scope, leaf.value), _mask_rows(keep, leaf.value)
    return lambda first, last, into: tight_value_loops.sizes_of_rows(
        codes, scope, keep, leaf.told, columns, first, last, into.values, into.indices
    )


def _measure_each(name: str, leaf: Leaf, first: int, last: int, into: Measured) -> None:
    for k in range(first, last):
        into.values[k], into.indices[k] = written_size(name, leaf, k)


def _mask_rows(mask: Tensor | None, value: Tensor) -> np.ndarray:
    if mask is None:
        return np.zeros((0, math.prod(value.shape[1:])), np.int8)
    return rows_of(mask.expand(-1, *value.shape[1:])).view(np.int8)
