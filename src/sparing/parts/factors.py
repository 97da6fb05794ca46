"""A weight of a convolution or dense layer as two thin ones: W ~ A B.

The weight of a convolution (m, n, kh, kw) is the matrix M of shape (m kh, n kw) whose row is (filter, height) and whose
column is (channel, width). Of M ~ A B, B is a convolution along the width, (r, n, 1, kw), and A one along the height,
(m, r, kh, 1); nothing stands between them and the bias comes after. A dense layer's factors are (m, r) and (r, n).

A convolution along one axis is one of height 1, so B has all of its kernel; of three axes the first is the height and
the other two together the width. Their factors have the four axes above.

    >>> w = torch.arange(16.0).reshape(1, 2, 2, 2, 2)
    >>> bool((matrix_as_layer_weight(matrix_of(w), (2, 2, 2, 2)) == w).all())
    True
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparing.core.operation import operation
from sparing.core.threads import intra_op

Shape = tuple[int, ...]
ADAPTER_ENDS = "lora_b.weight", "lora_a.weight"
"""What the factors B and A of an adapter are called, behind the path of their layer."""
FARTHEST = 4.0
"""How many times as far as a step on the weight itself one on its two factors may move their product."""


def in_plane(shape: Shape) -> Shape:
    """The shape of a convolution's weight, over however many axes, as one over two; a dense layer's as it is.

    >>> in_plane((8, 4, 5)), in_plane((8, 4, 5, 3)), in_plane((8, 4, 5, 3, 2)), in_plane((8, 4))
    ((8, 4, 1, 5), (8, 4, 5, 3), (8, 4, 5, 6), (8, 4))
    """
    if len(shape) == 2:
        return shape
    high, wide = kernel_sides(shape[2:])
    return *shape[:2], math.prod(high), math.prod(wide)


def kernel_sides(axes: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Those of a convolution's axes that A has, and those that B has."""
    return axes[: len(axes) // 2], axes[len(axes) // 2 :]


def matrix_of(weight_K: Tensor) -> Tensor:
    """`[K, m, n, *kernel]` or `[K, m, n]` -> `[K, rows, columns]`."""
    if weight_K.ndim == 3:
        return weight_K
    flat = weight_K.reshape(len(weight_K), *in_plane(tuple(weight_K.shape[1:])))
    return flat.transpose(2, 3).flatten(3).flatten(1, 2)


def matrix_as_layer_weight(matrix_K: Tensor, shape: Shape) -> Tensor:
    """Back to `[K, *shape]`."""
    if len(shape) == 2:
        return matrix_K
    m, n, kh, kw = in_plane(shape)
    return in_shape(matrix_K.unflatten(2, (n, kw)).unflatten(1, (m, kh)).transpose(2, 3), shape)


def in_shape(weight_K: Tensor, shape: Shape) -> Tensor:
    """Weights in the plane over the axes that their convolution has."""
    return weight_K if len(shape) in (2, 4) else weight_K.reshape(len(weight_K), *shape)


def matrix_sides(shape: Shape) -> tuple[int, int]:
    """Rows and columns of the matrix of a weight."""
    m, n, kh, kw = (*in_plane(shape), 1, 1)[:4]
    return m * kh, n * kw


def factor_names(name: str) -> tuple[str, str]:
    """What the two factors of a weight are called.

    >>> factor_names("conv.weight")
    ('conv.a', 'conv.b')
    """
    layer = name.removesuffix("weight")
    return f"{layer}a", f"{layer}b"


def adapter_pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    """B and A of every adapter that has both among these names.

    >>> adapter_pairs(["q.lora_a.weight", "v.lora_b.weight", "v.lora_a.weight"])
    [('v.lora_b.weight', 'v.lora_a.weight')]
    """
    known, (b, a) = set(names), ADAPTER_ENDS
    paths = [name.removesuffix(b) for name in sorted(known) if name.endswith(f".{b}")]
    return [(f"{path}{b}", f"{path}{a}") for path in paths if f"{path}{a}" in known]


def factor_shapes(shape: Shape, rank: int) -> tuple[Shape, Shape]:
    if len(shape) == 2:
        return (shape[0], rank), (rank, shape[1])
    m, n, kh, kw = in_plane(shape)
    return (m, rank, kh, 1), (rank, n, 1, kw)


def factors_of(u: Tensor, s: Tensor, v: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Spectral initialisation: A = U sqrt(S) and B = sqrt(S) V^T, in the shapes their layers want, `[K, ...]`."""
    root = s.sqrt()[:, None]
    a, b = u * root, (v * root).mT
    if len(shape) > 2:
        m, n, kh, kw = in_plane(shape)
        a, b = a.unflatten(1, (m, kh)).transpose(2, 3)[..., None], b.unflatten(2, (n, kw))[:, :, :, None]
    return a.contiguous(), b.contiguous()


@operation
def factor_product(a_K: Tensor, b_K: Tensor) -> Tensor:
    """`[K, m, r(, kh, 1)]` and `[K, r, n(, 1, kw)]` -> the weights `[K, m, n(, kh, kw)]`, those of a convolution in the
    plane.

    Row by row on one thread, in memory of its own, since a library's batched product depends on who is in the batch.
    """
    shape = (a_K.shape[1], b_K.shape[2], *((a_K.shape[3], b_K.shape[4]) if a_K.ndim == 5 else ()))
    tall = a_K.transpose(2, 3).flatten(1, 2).squeeze(3) if a_K.ndim == 5 else a_K
    with intra_op(1):
        rows = [a.clone() @ b.flatten(1).clone() for a, b in zip(tall, b_K, strict=True)]
    return matrix_as_layer_weight(torch.stack(rows), shape)


@operation
def gram_of_rows(rows: Tensor) -> Tensor:
    """`rows rows^T`: `[..., r, n]` -> `[..., r, r]`."""
    return rows @ rows.mT


def factor_pace(a: Tensor, b: Tensor) -> Tensor:
    """What to multiply the gradients of A's columns and B's rows with, `[r]`, so that training them does not overshoot.

    A step of SGD on both moves their product by lr (A A^T G + G B^T B) where one on W = A B itself moves it by lr G: by
    singular values s up to 2 s times as far. Column i of A and row i of B take F / max(F, |a_i|^2 + |b_i|^2) of their
    step, so that, as long as columns and rows are orthogonal, which they are when a client gets them, A B moves at most
    F times as far as W would. A client axis may come first.

    >>> factor_pace(torch.tensor([[4.0, 0.0], [0.0, 0.5]]), 2 * torch.eye(2))
    tensor([0.2000, 0.9412])
    """
    wide = axes_of(a)
    columns, rows = a.detach().transpose(-wide, 1 - wide).flatten(1 - wide), b.detach().flatten(1 - wide)
    return FARTHEST / (columns.square().sum(-1) + rows.square().sum(-1)).clamp(min=FARTHEST)


def axes_of(factor: Tensor) -> int:
    """How many axes it has, the client axis not counted."""
    return 4 if factor.ndim > 3 else 2


def along_factors(scale: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of the r columns of A and rows of B, broadcastable to A and to B."""
    more = [1] * (axes_of(a) - 2)
    return scale.unsqueeze(-2).unflatten(-1, (-1, *more)), scale.unflatten(-1, (-1, 1, *more))


def paced_factors(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The same factors, whose gradients come out in that pace."""
    if not torch.is_grad_enabled():
        return a, b
    first, second = along_factors(factor_pace(a, b), a)
    return a.detach() + (a - a.detach()) * first, b.detach() + (b - b.detach()) * second  # exactly a and b


class FactoredLinear(nn.Module):
    def __init__(self, layer: nn.Linear, rank: int):
        super().__init__()
        a, b = factor_shapes(tuple(layer.weight.shape), rank)
        self.a, self.b = nn.Parameter(layer.weight.new_zeros(a)), nn.Parameter(layer.weight.new_zeros(b))
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:
        a, b = paced_factors(self.a, self.b)
        return a @ b

    def forward(self, x: Tensor) -> Tensor:
        a, b = paced_factors(self.a, self.b)
        return F.linear(F.linear(x, b), a, self.bias)


class FactoredConv(nn.Module):
    def __init__(self, layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, rank: int):
        super().__init__()
        a, b = factor_shapes(tuple(layer.weight.shape), rank)
        self.a, self.b = nn.Parameter(layer.weight.new_zeros(a)), nn.Parameter(layer.weight.new_zeros(b))
        self.bias = layer.bias
        self.kernel = tuple(layer.kernel_size)
        beside: Any = (layer.padding, layer.padding)  # "same" and "valid" mean along one axis what they mean along all
        if not isinstance(layer.padding, str):
            beside = (inner(layer.padding, 0), outer(layer.padding, 0))
        self.across = {"stride": inner(layer.stride, 1), "padding": beside[0], "dilation": inner(layer.dilation, 1)}
        self.down = {"stride": outer(layer.stride, 1), "padding": beside[1], "dilation": outer(layer.dilation, 1)}

    @property
    def weight(self) -> Tensor:
        a, b = paced_factors(self.a, self.b)
        flat = torch.einsum("mrh,rnw->mnhw", a[..., 0], b[:, :, 0])
        return flat.reshape(*flat.shape[:2], *self.kernel)

    def forward(self, x: Tensor) -> Tensor:
        a, b = paced_factors(self.a, self.b)
        convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel) - 1]
        a, b = a.reshape(*a.shape[:2], *outer(self.kernel, 1)), b.reshape(*b.shape[:2], *inner(self.kernel, 1))
        return convolve(convolve(x, b, **self.across), a, self.bias, **self.down)


def outer(axes: tuple[int, ...], none: int) -> tuple[int, ...]:
    """What a convolution has along its axes, for A: `none` along those that B has."""
    high, wide = kernel_sides(axes)
    return *high, *[none] * len(wide)


def inner(axes: tuple[int, ...], none: int) -> tuple[int, ...]:
    high, wide = kernel_sides(axes)
    return *[none] * len(high), *wide
