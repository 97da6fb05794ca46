"""K matrices known as products of thin ones, formed only where somebody looks at their entries.

Few steps of local training on few samples add a matrix of low rank to a dense layer. A mean over clients needs one
product of all their factors and no client's matrix, so `core.fold` asks for that; to everything else a `Product` is a
tensor like any other, formed at the first operation on it.

    >>> x = Product(torch.ones(3, 1, 2), torch.ones(3, 1, 4))
    >>> x.shape, x.whole is None, float((x + 1).sum()), x.whole is None
    (torch.Size([3, 2, 4]), True, 48.0, False)
"""

import math
from typing import Any, TypeGuard

import torch
from torch import Tensor

from sparing.accel.cuda import takes_kernels


class Product(Tensor):
    """`left.mT @ right - base` for each of K clients, in float32 where the factors are in bfloat16."""

    left: Tensor  # [K, r, out]
    right: Tensor  # [K, r, in]
    base: Tensor | None  # [1, out, in], not of factors in bfloat16; None: zero
    whole: Tensor | None  # [K, out, in], once formed
    peak_K: Tensor | None  # [K]: no entry of a client is larger than this, if that is known
    most: Tensor | None  # a bound on all entries, once asked for

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, left: Tensor, right: Tensor, peak_K: Tensor | None = None, base: Tensor | None = None
    ) -> "Product":
        shape = (left.shape[0], left.shape[2], right.shape[2])
        dtype = torch.float32 if left.dtype == torch.bfloat16 else left.dtype
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=left.device)
        self.left, self.right, self.whole, self.peak_K, self.most = left, right, None, peak_K, None
        self.base = base
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*formed(args), **formed(kwargs or {}))

    def numpy(self, *, force: bool = False) -> Any:
        return formed(self).numpy(force=force)

    def tolist(self) -> Any:
        return formed(self).tolist()

    def at_most(self) -> Tensor:
        """No entry is larger than this; NaN or infinity if a factor has one."""
        if self.most is None:
            left, right = (_largest_entry(x).double() for x in (self.left, self.right))
            self.most = left * right * self.left.shape[1] + self.base_at_most()
        return self.most

    def each_at_most(self) -> Tensor:
        """The same for each client, `[K]`."""
        if self.peak_K is not None:
            return self.peak_K
        left, right = (torch.linalg.vector_norm(x, math.inf, dim=(1, 2)).double() for x in (self.left, self.right))
        return left * right * self.left.shape[1] + self.base_at_most()

    def base_at_most(self) -> Tensor | float:
        return 0.0 if self.base is None else _largest_entry(self.base).double()

    def weighted(self, weight_K: Tensor) -> Tensor:
        """The sum over clients, each times its weight, as one product: `[1, out, in]`."""
        parts = self.weighted_parts(weight_K)
        return parts if len(parts) == 1 else parts.sum(0, keepdim=True)

    def weighted_parts(self, weight_K: Tensor) -> Tensor:
        """The same as a few terms of a sum, `[terms, out, in]`: factors in bfloat16 are multiplied as they are."""
        right = self.right.flatten(0, 1)
        if right.dtype != torch.bfloat16:
            left = (self.left * weight_K.to(self.dtype)[:, None, None]).flatten(0, 1)
            total = (left.T @ right)[None]
            return total if self.base is None else total - self.base * weight_K.sum().to(self.dtype)
        thirds = _in_thirds(self.left, weight_K)
        return multiply_factors_of(thirds.T[None], right[None]).view(3, -1, right.shape[1])


def subtract_lazily(x: Tensor, base: Tensor) -> Tensor:
    """`x - base [1, out, in]`, or a product from another one; a product of float32 factors stays one.

    >>> one, two = (Product(torch.full((3, 1, 2), i), torch.ones(3, 1, 4)) for i in (3.0, 1.0))
    >>> x = subtract_lazily(one, two)
    >>> isinstance(x, Product), x.left.shape, float(x.sum())
    (True, torch.Size([3, 2, 2]), 48.0)
    """
    if is_plain_product(x) and is_plain_product(base):
        return Product(torch.cat([x.left, -base.left], 1), torch.cat([x.right, base.right], 1))
    return Product(x.left, x.right, None, base) if is_plain_product(x) else x - base


def add_formed(start: Tensor, x: Tensor) -> Tensor:
    """`start + x`; a product that nobody has formed on a CPU is not written down by itself."""
    if not is_plain_product(x) or x.left.is_cuda or start.dtype != x.left.dtype:
        return start + x
    return torch.baddbmm(start.expand(x.shape), x.left.mT, x.right)


def is_plain_product(x: Tensor) -> TypeGuard[Product]:
    """Whether this is two factors and no more, in float32 or float64."""
    return isinstance(x, Product) and x.whole is None and x.base is None and x.left.dtype != torch.bfloat16


def _in_thirds(left: Tensor, weight_K: Tensor) -> Tensor:
    """`left [K, r, out]` times weights as three numbers in bfloat16 each, `[K r, 3 out]`: all the bits of a float32."""
    if takes_kernels(left):
        from sparing.accel.cuda.fold import left_in_thirds as at_once

        return at_once(left, weight_K)
    rest, thirds = (left.float() * weight_K.float()[:, None, None]).flatten(0, 1), []
    for _ in range(3):
        thirds.append(rest.bfloat16())
        rest = rest - thirds[-1].float()
    return torch.cat(thirds, 1)


def _largest_entry(x: Tensor) -> Tensor:
    """The largest magnitude, NaN if there is one."""
    if x.is_cuda:
        return torch.linalg.vector_norm(x, math.inf)
    return torch.stack(torch.aminmax(x)).abs().amax()


def formed(x: Any) -> Any:
    """The same with every product in it formed."""
    if isinstance(x, Product):
        if x.whole is None:
            x.whole = multiply_factors_of(x.left.mT, x.right)
            x.whole = x.whole if x.base is None else x.whole - x.base
        return x.whole
    if isinstance(x, dict):
        return {name: formed(part) for name, part in x.items()}
    return type(x)(map(formed, x)) if type(x) in (list, tuple) else x


def multiply_factors_of(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype != torch.bfloat16:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())
