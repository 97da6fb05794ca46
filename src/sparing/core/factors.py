"""A convolution or dense layer as two thin ones: W ~ A B.

The weight of a convolution (m, n, kh, kw) is the matrix M of shape (m kh, n kw) whose row is (filter, height) and whose
column is (channel, width). Of M ~ A B, B is a convolution along the width, (r, n, 1, kw), and A one along the height,
(m, r, kh, 1); nothing stands between them and the bias comes after. A dense layer's factors are (m, r) and (r, n).

    >>> w = torch.arange(16.0).reshape(1, 2, 2, 2, 2)
    >>> bool((weight_of(matrix_of(w), (2, 2, 2, 2)) == w).all())
    True
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparing.core.gpu import ready
from sparing.core.parcel import cleared
from sparing.core.product import Product
from sparing.core.threads import intra_op

Shape = tuple[int, ...]
LONG, PARTS = 4096, 16
"""Rows of so many numbers are cut into so many parts on a GPU: few sums come of them, and most of it would idle."""


def matrix_of(weight_K: Tensor) -> Tensor:
    """`[K, m, n, kh, kw]` or `[K, m, n]` -> `[K, rows, columns]`."""
    return weight_K.transpose(2, 3).flatten(3).flatten(1, 2) if weight_K.ndim == 5 else weight_K


def weight_of(matrix_K: Tensor, shape: Shape) -> Tensor:
    """Back to `[K, *shape]`."""
    if len(shape) == 2:
        return matrix_K
    m, n, kh, kw = shape
    return matrix_K.unflatten(2, (n, kw)).unflatten(1, (m, kh)).transpose(2, 3)


def sides(shape: Shape) -> tuple[int, int]:
    """Rows and columns of the matrix of a weight."""
    m, n, kh, kw = (*shape, 1, 1)[:4]
    return m * kh, n * kw


def factor_shapes(shape: Shape, rank: int) -> tuple[Shape, Shape]:
    if len(shape) == 2:
        return (shape[0], rank), (rank, shape[1])
    m, n, kh, kw = shape
    return (m, rank, kh, 1), (rank, n, 1, kw)


def factors_of(u: Tensor, s: Tensor, v: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Spectral initialisation: A = U sqrt(S) and B = sqrt(S) V^T, in the shapes their layers want, `[K, ...]`."""
    root = s.sqrt()[:, None]
    a, b = u * root, (v * root).mT
    if len(shape) == 4:
        m, n, kh, kw = shape
        a, b = a.unflatten(1, (m, kh)).transpose(2, 3)[..., None], b.unflatten(2, (n, kw))[:, :, :, None]
    return a.contiguous(), b.contiguous()


def product(a_K: Tensor, b_K: Tensor) -> Tensor:
    """`[K, m, r(, kh, 1)]` and `[K, r, n(, 1, kw)]` -> the weights `[K, m, n(, kh, kw)]`.

    Row by row on one thread, in memory of its own, since a library's batched product depends on who is in the batch;
    on a GPU in a kernel of ours, which does not.
    """
    if ready(a_K) and a_K.dtype == torch.float32:
        from sparing.core.gpu.factors import products

        return products(a_K, b_K)
    shape = (a_K.shape[1], b_K.shape[2], *((a_K.shape[3], b_K.shape[4]) if a_K.ndim == 5 else ()))
    tall = a_K.transpose(2, 3).flatten(1, 2).squeeze(3) if a_K.ndim == 5 else a_K
    with intra_op(1):
        rows = [a.clone() @ b.flatten(1).clone() for a, b in zip(tall, b_K, strict=True)]
    return weight_of(torch.stack(rows), shape)


def padded(a: Tensor, b: Tensor, rank_K: Tensor) -> tuple[Tensor, Tensor]:
    """Factors `[1, m, r(, kh, 1)]` and `[1, r, n(, 1, kw)]` that all share, for K clients: zero beyond their ranks.

    Training leaves these zeros as they are: the gradient of either factor is a product with the other one.

    >>> padded(torch.ones(1, 1, 2), torch.ones(1, 2, 1), torch.tensor([1, 2]))[0]
    tensor([[[1., 0.]],
    <BLANKLINE>
            [[1., 1.]]])
    """
    within, ones = torch.arange(b.shape[1], device=b.device) < rank_K[:, None], [1] * (b.ndim - 3)
    return cleared(a, within.view(len(within), 1, -1, *ones)), cleared(b, within.view(len(within), -1, 1, *ones))


def summable(a_K: Tensor, b_K: Tensor) -> Tensor:
    """The same weights, those of a dense layer as a `Product`, where the last bits may depend on who is in the call."""
    return product(a_K, b_K) if a_K.ndim == 5 else Product(a_K.mT, b_K)


def squared(rows: Tensor) -> Tensor:
    """`rows rows^T`: `[..., r, n]` -> `[..., r, r]`."""
    parts = math.gcd(rows.shape[-1], PARTS) if rows.is_cuda and rows.shape[-1] >= LONG else 1
    if parts == 1:
        return rows @ rows.mT
    cut = rows.unflatten(-1, (parts, -1)).movedim(-2, -3).contiguous()
    return (cut @ cut.mT).sum(-3)


class FactoredLinear(nn.Module):
    def __init__(self, layer: nn.Linear, rank: int):
        super().__init__()
        a, b = factor_shapes(tuple(layer.weight.shape), rank)
        self.a, self.b = nn.Parameter(layer.weight.new_zeros(a)), nn.Parameter(layer.weight.new_zeros(b))
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:
        return self.a @ self.b

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.b), self.a, self.bias)


class FactoredConv(nn.Module):
    def __init__(self, layer: nn.Conv2d, rank: int):
        super().__init__()
        a, b = factor_shapes(tuple(layer.weight.shape), rank)
        self.a, self.b = nn.Parameter(layer.weight.new_zeros(a)), nn.Parameter(layer.weight.new_zeros(b))
        self.bias = layer.bias
        (high, wide), (tall, broad) = layer.stride, layer.dilation
        along: Any = (layer.padding, layer.padding)  # "same" and "valid" mean along one axis what they mean along both
        if not isinstance(layer.padding, str):
            along = ((0, layer.padding[1]), (layer.padding[0], 0))
        self.across = {"stride": (1, wide), "padding": along[0], "dilation": (1, broad)}
        self.down = {"stride": (high, 1), "padding": along[1], "dilation": (tall, 1)}

    @property
    def weight(self) -> Tensor:
        return torch.einsum("mrh,rnw->mnhw", self.a[..., 0], self.b[:, :, 0])

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, self.b, **self.across), self.a, self.bias, **self.down)
