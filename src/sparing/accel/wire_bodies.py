"""Sizes of parcels: many masks on a GPU side by side; tight leaves by compiled loops, while a GPU goes on."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from sparing.accel.compiled.host_rows import deal_rows
from sparing.accel.compiled.tight_bodies import Measured, Measuring, measuring
from sparing.accel.cuda import takes_kernels
from sparing.accel.host_workers import host_workers
from sparing.accel.rows import in_one_row
from sparing.core import versions
from sparing.core.context import Ctx
from sparing.core.ops import to_host
from sparing.core.parcel import Leaf, Parcel, Schema, client_count, map_tensors
from sparing.engines.upload_check import EVERY
from sparing.wire import count, index
from sparing.wire.count import Mask
from sparing.wire.index import Number

WORTH = 1 << 19
"""Numbers from which a task of its own is worth it."""


def fast_index_sizes(masks: list[Mask]) -> Callable[[], list[index.IndexSizes]]:
    """`count.index_sizes`."""
    if not masks or not all(takes_kernels(mask.bits) for mask in masks):
        return count.index_sizes.plain(masks)
    from sparing.accel.cuda.gaps import gaps_of

    rows = max(x.shape[0] for mask in masks for x in (mask.bits, mask.alive) if x is not None)
    alive = None
    if any(mask.alive is not None for mask in masks):
        everywhere = torch.ones(1, 1, dtype=torch.bool, device=masks[0].bits.device)
        some = [everywhere if mask.alive is None else mask.alive for mask in masks]
        alive = torch.cat([x.expand(rows, mask.bits.shape[1]) for x, mask in zip(some, masks, strict=True)], dim=1)
    bits = in_one_row([mask.bits if mask.bits.shape[0] == rows else mask.bits.expand(rows, -1) for mask in masks])
    paid = any(mask.travels for mask in masks)
    later = to_host([gaps_of(bits, alive, tuple(mask.bits.shape[1] for mask in masks), paid)])

    def found() -> list[index.IndexSizes]:
        table = later()[0].numpy().T  # [4, masks, R]
        size = index.sizes_from(*table).size if paid else np.zeros_like(table[1])
        each = zip(masks, size, table[1], strict=True)
        return [index.IndexSizes(bytes_ if mask.travels else 0 * bytes_, kept) for mask, bytes_, kept in each]

    return found


def fast_places_of(bits: torch.Tensor) -> torch.Tensor:
    """`index.places_of`, which NumPy finds several times as fast."""
    return index.places_of.plain(bits) if bits.is_cuda else torch.from_numpy(np.flatnonzero(bits.numpy()))


def fast_written_sizes(leaves: dict[str, Leaf]) -> Callable[[], dict[str, tuple[Number, Number]]]:
    """`count.written_sizes`: a stretch of clients in one compiled call, the largest leaves first.

    On a CPU by the threads of the operation; of what lies on a GPU by all of the host's while the GPU goes on.
    """
    clients = {name: client_count(Parcel({name: leaf}, {})) for name, leaf in leaves.items()}
    found = {name: Measured(np.empty(k, np.int64), np.empty(k, np.int64)) for name, k in clients.items()}
    if not any(leaf.value.is_cuda for leaf in leaves.values()):
        for name, leaf in leaves.items():
            _measure_here(measuring(name, leaf), found[name], leaf.value.numel())
        return lambda: dict(found)
    there: list[torch.Tensor] = []
    map_tensors(Parcel(leaves, {}), lambda x: there.append(x) or x)
    coming, workers = to_host(there), host_workers()

    def brought() -> dict[str, Measuring]:
        here = iter(coming())
        host = map_tensors(Parcel(leaves, {}), lambda x: next(here)).leaves
        return {name: measuring(name, leaf) for name, leaf in host.items()}

    arrived = workers.submit(brought)
    underway = [
        workers.submit(lambda name=name, first=first, last=last: arrived.result()[name](first, last, found[name]))
        for name in sorted(leaves, key=lambda name: -leaves[name].value.numel())
        for first, last in stretches(clients[name], leaves[name].value.numel())
    ]

    def every() -> dict[str, tuple[Number, Number]]:
        for one in underway:
            one.result()
        return dict(found)

    return every


def _measure_here(measure: Measuring, into: Measured, numbers: int) -> None:
    deal_rows(lambda first, last: measure(first, last, into), len(into.values), numbers)


def stretches(rows: int, numbers: int) -> list[tuple[int, int]]:
    """Rows cut where a stretch has as many numbers as are worth a task.

    >>> stretches(4, 100), stretches(2, 10_000_000)
    ([(0, 4)], [(0, 1), (1, 2)])
    """
    parts = min(rows, max(1, numbers // WORTH))
    return list(pairwise([rows * i // parts for i in range(parts + 1)]))


def fast_read_back(parcel: Parcel, data: bytes, schema: Schema, here: Ctx) -> Parcel:
    """`versions.read_back`; what lies on a GPU is read every hundredth round, as one upload is written then."""
    if here.device.type == "cpu" or here.round % EVERY == 1 % EVERY:
        return versions.read_back.plain(parcel, data, schema, here)
    return parcel
