"""Tensors as matrices, and matrices as codes of their strongest components.

Every matrix is a sum of s u v^T, and with a step D

    a = codes(s u / D),  b = codes(s v / D),   the receiver takes D a b^T / sqrt(|a| |b|), since |a| ~ s / D ~ |b|

so that all numbers sent are off by about as much, strong components get more bits than weak ones, and no scales
travel. A component is worth its bytes where s^2 >= SLOPE (rows + columns) D^2: there it saves more error than they
would elsewhere.

A convolution is the matrix [filters, channels * kernel] or [filters * height, channels * width], whichever has fewer
rows and columns.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.operation import operation
from sparing.core.tree import cleared, column
from sparing.parts.code.budget.subspace import Components, every_component, strongest_subspace
from sparing.parts.code.dead_zone import codes_of, digits, rounded
from sparing.parts.factors import Shape, matrix_as_layer_weight, matrix_of, matrix_sides

SLOPE = 0.25
"""Measured on updates of a CNN and a ResNet-18: anything from 0.15 to 0.35 takes about as many bytes."""
PASSES, MORE = 2, 8
"""Of the subspace iteration: its steps in whole numbers, and the columns it carries beside those asked for."""
JOIN = "\n"
"""Stands before each name of the vectors that travel as one leaf; no name holds one."""


class Matrix(NamedTuple):
    """How a tensor is seen, and how many components of it may travel."""

    rows: int
    columns: int
    split: bool  # [filters * height, channels * width]
    rank: int


def joint_name(names: Iterable[str]) -> str:
    """What the leaf of all vectors is called."""
    return "".join(JOIN + name for name in names)


def as_matrix_shape(shape: Shape, rank: int) -> Matrix | None:
    """None for a vector, and for what two components would not make smaller.

    >>> as_matrix_shape((64, 32, 5, 5), 8), as_matrix_shape((64, 3, 3, 3), 99)
    (Matrix(rows=320, columns=160, split=True, rank=8), Matrix(rows=64, columns=27, split=False, rank=27))
    """
    if len(shape) < 2:
        return None
    flat_sides = shape[0], math.prod(shape[1:])
    split = len(shape) == 4 and sum(matrix_sides(shape)) < sum(flat_sides)
    m, n = matrix_sides(shape) if split else flat_sides
    return Matrix(m, n, split, min(rank, m, n)) if 2 * (m + n) < m * n else None


def weight_as_matrix(x: Tensor, how: Matrix) -> Tensor:
    return matrix_of(x) if how.split else x.reshape(len(x), how.rows, how.columns)


def matrix_as_weight(x: Tensor, how: Matrix, shape: Shape) -> Tensor:
    """`weight_as_matrix` undone."""
    return matrix_as_layer_weight(x, shape) if how.split else x.reshape(len(x), *shape)


def strongest_components(name: str, m: Tensor, rank: int, ctx: Ctx) -> Components:
    """From a keyed guess of the vectors of the smaller side; from all of them where they are few."""
    if m.shape[1] < m.shape[2]:
        turned = strongest_components(name, m.mT, rank, ctx)
        return Components(turned.v, turned.s, turned.u)
    n, r = m.shape[2], rank + MORE
    if r >= n:
        return every_component(m, rank)
    return strongest_subspace(m, ctx.uniform(f"lowrank/{name}", n * r).reshape(-1, n, r) * 2 - 1, rank, PASSES)


def worthy_components(parts: Components, cut_K: Tensor) -> Tensor:
    """Which components have s^2 / (rows + columns) >= cut: `[K, r]`, the first few."""
    return (parts.s.square() / (parts.u.shape[1] + parts.v.shape[1]) >= cut_K[:, None]) & (parts.s > 0)


def components_by_root(parts: Components, some: Tensor) -> tuple[Tensor, Tensor]:
    """s u `[K, r, rows]` and s v `[K, r, columns]` of some components, zero for the others."""
    p, q = (cleared((x * parts.s[:, None]).mT, some[:, :, None]) for x in (parts.u, parts.v))
    return p, q


def factor_codes(p: Tensor, q: Tensor, step_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Their codes, and which components these hold anything of, `[K, r, 1]`."""
    a, b = codes_of(p, step_K), codes_of(q, step_K)
    keep = a.any(2, keepdim=True) & b.any(2, keepdim=True)
    return cleared(a, keep), cleared(b, keep), keep


def fitting_matrix(a: Tensor, b: Tensor, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """The codes as float64, a divided by sqrt(|a| |b|); `rank` where some of so many, that are zero, were left out."""
    a, b = a.double(), b.double()
    size = (a.square().sum(2) * b.square().sum(2)).sqrt().sqrt()[:, :, None]
    return rounded(a / torch.where(size > 0, size, 1.0), digits(rank or a.shape[1])), b


def component_product(a: Tensor, b: Tensor, step_K: Tensor, rank: int | None = None) -> Tensor:
    """D a b^T / sqrt(|a| |b|) added up, `[K, rows, columns]` float64; the sums are exact."""
    a, b = fitting_matrix(a, b, rank)
    return column(step_K, a) * (a.mT @ b)


@operation
def add_components(value: Tensor, a: Tensor, b: Tensor, step_K: Tensor, how: Matrix) -> None:
    """value `[K, *shape]` += what these components add up to, rounded once."""
    value += matrix_as_weight(component_product(a, b, step_K), how, tuple(value.shape[1:]))
