"""Choosing what of an update travels: products of small numbers, and what a GPU leaves to its host, side by side."""

import os
from functools import cache

import torch
from torch import Tensor

from sparing.accel.compiled import code_bodies
from sparing.accel.compiled.host_rows import can_loop, rows_of
from sparing.accel.host_workers import host_workers
from sparing.core.ops import place, to_host
from sparing.core.parcel import Parcel, map_tensors, parcel_row
from sparing.core.threads import intra_op, work_side_by_side
from sparing.parts.code.budget import byte_budget, matrices, subspace

MOST_TERMS = (2**31 - 1) // 127**2
"""Products of int8 that int32 holds."""


def fast_eigen_pairs(gram: Tensor) -> tuple[Tensor, Tensor]:
    """`subspace.eigen_pairs`."""
    if not gram.is_cuda:
        return subspace.eigen_pairs.plain(gram)
    with intra_op(1):
        found = list(host_workers().map(subspace.eigen_pair, gram.cpu()))
    vectors, values = (torch.stack(some).to(gram.device) for some in zip(*found, strict=True))
    return vectors, values


def fast_whole_product(a: subspace.Planes, b: Tensor) -> Tensor:
    """`subspace.whole_product`, by the instructions that a processor has for numbers of 8 bits."""
    if a.high.is_cuda or not multiplies_bytes() or a.high.shape[2] > MOST_TERMS:
        return subspace.whole_product.plain(a, b)
    out = torch.empty(len(b), a.high.shape[1], b.shape[2], dtype=torch.float64)
    for into, high, low, codes in zip(out, a.high, a.low, b, strict=True):
        first, second = (_multiply(plane, codes).numpy() for plane in (high, low))
        code_bodies.join_planes(first, second, into.numpy())
    return out


@cache
def multiplies_bytes() -> bool:
    """Whether this processor adds up products of int8 in int32 with one instruction."""
    asked = getattr(torch.cpu, "_is_vnni_supported", None)
    return asked is not None and bool(asked()) and hasattr(torch, "_int_mm")


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Matrices of int8 -> int32."""
    return torch._int_mm(a, b)  # pyright: ignore[reportPrivateImportUsage]


def fast_add_components(value: Tensor, a: Tensor, b: Tensor, step_K: Tensor, how: matrices.Matrix) -> None:
    """`matrices.add_components`, on a CPU one client after the other, and of each only what there is."""
    if value.device.type != "cpu":
        matrices.add_components.plain(value, a, b, step_K, how)
        return
    for into, p, q, step in zip(value.split(1), a, b, step_K.expand(len(value)).split(1), strict=True):
        some = p.any(1)
        if not bool(some.any()) and bool(step.isfinite()):  # what is not must not stay hidden
            continue
        first, second = matrices.fitting_matrix(p[some][None], q[some][None], len(p))
        product = matrices.matrix_as_weight(first.mT @ second, how, tuple(into.shape[1:]))
        if can_loop(into) and into.is_contiguous() and into.dtype in code_bodies.KINDS:
            code_bodies.add_multiple(rows_of(into)[0], float(step), rows_of(product)[0])
        else:
            into += step.to(product.dtype) * product


def fast_sent_by_each(
    send: byte_budget.Send, parcel: Parcel, parts: dict[str, subspace.Components], clients: int
) -> Parcel:
    """`byte_budget.sent_by_each`: what a GPU has is brought to its host at once, whose cores take a client each."""
    device = next(iter(parcel.leaves.values())).value.device
    if device.type == "cpu":
        return byte_budget.sent_by_each.plain(send, parcel, parts, clients)
    there: list[Tensor] = []
    map_tensors(parcel, lambda x: there.append(x) or x)
    arrived = to_host([*there, *(x for some in parts.values() for x in some)])
    here = iter(arrived())
    parcel_here = map_tensors(parcel, lambda _: next(here))
    parts_here = {name: subspace.Components(*(next(here) for _ in some)) for name, some in parts.items()}
    rows: list[Parcel] = []

    def row(k: int) -> Parcel:
        return send(k, parcel_row(parcel_here, k), byte_budget.components_row(parts_here, k))

    work_side_by_side(range(clients), row, rows.append, os.cpu_count() or 1)
    sent = map_tensors(byte_budget.stacked_rows(parcel_here, rows), lambda x: place(x, device))
    return sent._replace(notes=parcel.notes)
