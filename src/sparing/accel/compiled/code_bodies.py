"""Rounding to codes in one pass: the body of `dead_zone.codes_of` on a CPU."""

import math

import numpy as np
import torch
from torch import Tensor

from sparing.accel.compiled.compile import compiled
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
