"""Rounding in one pass or two: bodies of `dead_zone` on a CPU."""

import math

import numpy as np
import torch
from torch import Tensor

from sparing.accel.compiled.compile import compiled
from sparing.accel.compiled.host_rows import deal_rows, on_host, rows_of
from sparing.accel.compiled.tree_loops import BLOCK, multiply_codes
from sparing.parts.code import dead_zone
from sparing.parts.code.budget import subspace
from sparing.parts.code.budget.subspace import FINER
from sparing.parts.code.dead_zone import DEAD, TOP

TINIEST = 2.0**-1000
"""Steps whose inverses are numbers."""
KINDS = (torch.float32, torch.float64)


def compiled_codes_of(values: Tensor, step_K: Tensor) -> Tensor:
    """`dead_zone.codes_of`."""
    kind = torch.promote_types(values.dtype, step_K.dtype)
    if values.device.type != "cpu" or values.dtype != kind or kind not in KINDS:
        return dead_zone.codes_of.plain(values, step_K)
    rows = values.reshape(len(values), -1).contiguous().detach().numpy()
    steps = step_K.expand(len(rows)).to(kind).contiguous().numpy()
    out = np.empty(rows.shape, np.int8)
    round_rows(rows, steps, rows.dtype.type(0.5 - DEAD), out)
    return torch.from_numpy(out).reshape(values.shape)


@compiled
def round_rows(rows: np.ndarray, steps: np.ndarray, up: float, out: np.ndarray) -> None:
    """In the precision of the rows."""
    for k in range(len(rows)):
        step = steps[k] if steps[k] > 0 else steps.dtype.type(1)
        for i in range(rows.shape[1]):
            size = math.floor(abs(rows[k, i]) / step + up)
            code = np.int8(size) if size < TOP else np.int8(TOP)
            out[k, i] = -code if rows[k, i] < 0 else code


def compiled_values_of_codes(codes: Tensor, step_K: Tensor) -> Tensor:
    """`dead_zone.values_of_codes`."""
    if codes.device.type != "cpu" or codes.dtype != torch.int8 or not on_host(step_K) or len(step_K) > len(codes):
        return dead_zone.values_of_codes.plain(codes, step_K)
    codes = codes if codes.is_contiguous() else codes.contiguous()
    out = step_K.new_empty(codes.shape)
    given = rows_of(codes), step_K.expand(len(codes)).contiguous().numpy(), rows_of(out)
    deal_rows(lambda first, last: multiply_codes(*given, first, last), len(given[0]), codes.numel())
    return out


def compiled_rounded(x: Tensor, bits: int) -> Tensor:
    """`dead_zone.rounded`."""
    if x.device.type != "cpu" or x.dtype != torch.float64 or x.numel() == 0:
        return dead_zone.rounded.plain(x, bits)
    if not x.is_contiguous() and x.mT.is_contiguous():
        return compiled_rounded(x.mT, bits).mT
    rows = x.detach().reshape(len(x), -1).contiguous().numpy()
    out = np.empty_like(rows)
    if not round_to_grid(rows, rows.view(np.int64), bits, out):
        return dead_zone.rounded.plain(x, bits)
    return torch.from_numpy(out).reshape(x.shape)


@compiled
def round_to_grid(rows: np.ndarray, bits_of_rows: np.ndarray, bits: int, out: np.ndarray) -> bool:
    """Whether all numbers are finite, and so were rounded. Halves go to even: what is added has no room for them."""
    whole = 1.5 * 2.0**52
    for k in range(len(rows)):
        peak = largest_of(bits_of_rows[k])
        step = math.ldexp(1.0, (math.frexp(peak)[1] if peak > 0 else 1) - bits)
        if not math.isfinite(peak) or step < TINIEST:
            return False
        row, into, inverse = rows[k], out[k], 1 / step
        for i in range(len(into)):
            into[i] = ((row[i] * inverse + whole) - whole) * step
    return True


@compiled
def largest_of(bits: np.ndarray) -> float:
    """The largest magnitude of float64 numbers seen as int64, NaN above all."""
    largest, size = np.zeros(BLOCK, np.int64), np.int64(0x7FFFFFFFFFFFFFFF)
    for start in range(0, len(bits), BLOCK):
        some = bits[start : min(start + BLOCK, len(bits))]
        for i in range(len(some)):
            largest[i] = max(largest[i], some[i] & size)
    largest[0] = largest.max()
    return largest.view(np.float64)[0]


def compiled_in_two_planes(m: Tensor) -> subspace.Planes:
    """`subspace.in_two_planes`."""
    if m.device.type != "cpu" or m.dtype != torch.float64 or m.numel() == 0:
        return subspace.in_two_planes.plain(m)
    if not m.is_contiguous() and m.mT.is_contiguous():
        high, low, step = compiled_in_two_planes(m.mT)
        return subspace.Planes(high.mT, low.mT, step)
    rows = m.detach().reshape(len(m), -1).contiguous().numpy()
    high, low, steps = np.empty(rows.shape, np.int8), np.empty(rows.shape, np.int8), np.empty(len(rows))
    if not split_rows(rows, rows.view(np.int64), high, low, steps):
        return subspace.in_two_planes.plain(m)
    first, second = (torch.from_numpy(plane).reshape(m.shape) for plane in (high, low))
    return subspace.Planes(first, second, torch.from_numpy(steps * (1 / FINER))[:, None, None])


@compiled
def split_rows(
    rows: np.ndarray, bits_of_rows: np.ndarray, high: np.ndarray, low: np.ndarray, steps: np.ndarray
) -> bool:
    """Whether all numbers are finite, and so were split."""
    for k in range(len(rows)):
        peak = largest_of(bits_of_rows[k])
        if not math.isfinite(peak):
            return False
        steps[k] = step = peak * (1 / TOP) if peak > 0 else 1.0
        row, first, second = rows[k], high[k], low[k]
        for i in range(len(row)):
            x = row[i] / step
            near = np.rint(x)
            first[i] = np.int8(near)
            second[i] = np.int8(np.rint((x - near) * FINER))
    return True


@compiled
def add_multiple(into: np.ndarray, step: float, x: np.ndarray) -> None:
    """into += step x, in float64, each rounded."""
    for i in range(len(into)):
        into[i] = np.float64(into[i]) + step * x[i]


@compiled
def join_planes(high: np.ndarray, low: np.ndarray, out: np.ndarray) -> None:
    for i in range(len(out)):
        first, second, into = high[i], low[i], out[i]
        for j in range(len(into)):
            into[j] = float(FINER) * first[j] + second[j]


def compiled_whole_numbers(x: Tensor) -> tuple[Tensor, Tensor]:
    """`subspace.whole_numbers`."""
    if x.device.type != "cpu" or x.dtype != torch.float64 or x.numel() == 0 or not x.is_contiguous():
        return subspace.whole_numbers.plain(x)
    codes, step = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x), 1, x.shape[2], dtype=torch.float64)
    if not round_columns(x.detach().numpy(), codes.numpy(), step.numpy()):
        return subspace.whole_numbers.plain(x)
    return codes, step


@compiled
def round_columns(x: np.ndarray, codes: np.ndarray, step: np.ndarray) -> bool:
    """Whether all numbers are finite, and so were rounded."""
    for k in range(len(x)):
        own = step[k, 0]
        own[:] = 0.0
        for i in range(x.shape[1]):
            row = x[k, i]
            for j in range(len(own)):
                size = abs(row[j])
                own[j] = own[j] if own[j] >= size else size
        for j in range(len(own)):
            if not math.isfinite(own[j]):
                return False
            own[j] = own[j] * (1 / TOP) if own[j] > 0 else 1.0
        for i in range(x.shape[1]):
            row, into = x[k, i], codes[k, i]
            for j in range(len(own)):
                into[j] = np.int8(np.rint(row[j] / own[j]))
    return True
