"""Rounding in one pass or two: bodies of `dead_zone` on a CPU."""

import math

import numpy as np
import torch
from torch import Tensor

from sparing.accel.compiled.compile import compiled
from sparing.accel.compiled.host_rows import deal_rows, on_host, rows_of
from sparing.accel.compiled.tree_loops import multiply_codes
from sparing.parts.code import dead_zone
from sparing.parts.code.dead_zone import DEAD, TOP

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
    if not round_to_grid(rows, bits, out):
        return dead_zone.rounded.plain(x, bits)
    return torch.from_numpy(out).reshape(x.shape)


@compiled
def round_to_grid(rows: np.ndarray, bits: int, out: np.ndarray) -> bool:
    """Whether all numbers are finite, and so were rounded. Halves go to even: what is added has no room for them."""
    whole = 1.5 * 2.0**52
    for k in range(len(rows)):
        peak = 0.0
        for i in range(rows.shape[1]):
            size = abs(rows[k, i])
            peak = peak if size <= peak else size
        if not math.isfinite(peak):
            return False
        step = math.ldexp(1.0, (math.frexp(peak)[1] if peak > 0 else 1) - bits)
        for i in range(rows.shape[1]):
            out[k, i] = ((rows[k, i] / step + whole) - whole) * step
    return True
