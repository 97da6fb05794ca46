"""What a GPU leaves to its host in choosing what of an update travels: the clients' turns, side by side."""

import os
from collections.abc import Callable

import torch
from torch import Tensor

from sparing.accel.host_workers import host_workers
from sparing.core.parcel import Parcel
from sparing.core.threads import intra_op, work_side_by_side
from sparing.parts.code.budget import byte_budget, matrices, subspace


def fast_eigen_pairs(gram: Tensor) -> tuple[Tensor, Tensor]:
    """`subspace.eigen_pairs`."""
    if not gram.is_cuda:
        return subspace.eigen_pairs.plain(gram)
    with intra_op(1):
        found = list(host_workers().map(subspace.eigen_pair, gram.cpu()))
    vectors, values = (torch.stack(some).to(gram.device) for some in zip(*found, strict=True))
    return vectors, values


def fast_add_components(value: Tensor, a: Tensor, b: Tensor, step_K: Tensor, how: matrices.Matrix) -> None:
    """`matrices.add_components`, on a CPU one client after the other, and of each only what there is."""
    if value.device.type != "cpu":
        matrices.add_components.plain(value, a, b, step_K, how)
        return
    for into, p, q, step in zip(value.split(1), a, b, step_K.expand(len(value)).split(1), strict=True):
        some = p.any(1)
        if bool(some.any()) or not bool(step.isfinite()):  # which must not stay hidden
            product = matrices.component_product(p[some][None], q[some][None], step, len(p))
            into += matrices.matrix_as_weight(product, how, tuple(into.shape[1:]))


def fast_for_each_client(send: Callable[[int], Parcel], clients: int, device: torch.device) -> list[Parcel]:
    """`byte_budget.for_each_client`; its threads wait for the host's workers, so they are others."""
    if device.type == "cpu":
        return byte_budget.for_each_client.plain(send, clients, device)
    sent: list[Parcel] = []
    work_side_by_side(range(clients), send, sent.append, os.cpu_count() or 1)
    return sent
