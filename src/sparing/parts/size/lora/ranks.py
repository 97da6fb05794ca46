"""Which ranks adapters have, what they are scaled by, and how the server's factors become a client's and back.

The server holds the factors of its largest rank and scale s. Factors of a client of scale s_k are its own times
sqrt(s_k / s), so that s B A and s_k B_k A_k say the same; under `scale: shared` all scales are one.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor, nn

from sparing.core.context import Ctx
from sparing.core.errors import MethodError, check_range
from sparing.core.method import Fit, Remembered, Resize
from sparing.core.tree import Layout, Masks, Tree
from sparing.parts.size.capacity import by_capacity
from sparing.parts.size.lora.adapted import A, B, Shape, model_of_rank

Scale = Literal["shared", "rank", "root"]


class Ranks(NamedTuple):
    """What is offered, and how far each is scaled."""

    offered: tuple[int, ...]
    alpha: float
    scale: Scale

    @property
    def most(self) -> int:
        return max(self.offered)

    @property
    def differ(self) -> bool:
        return len(self.offered) > 1

    def scale_at(self, rank: int) -> float:
        """Of an adapter of this rank.

        >>> Ranks((16, 4), 8.0, "shared").scale_at(4), Ranks((16, 4), 8.0, "rank").scale_at(4)
        (0.5, 2.0)
        """
        if self.scale == "root":
            return self.alpha / math.sqrt(rank) if rank else 0.0
        rank = self.most if self.scale == "shared" else rank
        return self.alpha / rank if rank else 0.0

    def ratio(self, rank: int) -> float:
        """The client's scale by the server's."""
        return self.scale_at(rank) / self.scale_at(self.most) if rank else 1.0


def ranks_of_options(rank: int, ranks: Sequence[int], alpha: float, scale: Scale | None) -> Ranks:
    offered = tuple(ranks) or (rank,)
    if len(set(offered)) < len(offered):
        raise MethodError(f"lora.ranks is {list(offered)}; offer each rank once")
    for one in offered:
        check_range("lora.ranks" if ranks else "lora.rank", one, 0, math.inf)
    if max(offered) < 1:
        raise MethodError("lora offers no rank above 0, so nothing would train; offer one of at least 1")
    check_range("lora.alpha", alpha, 0, math.inf, open_low=True)
    return Ranks(offered, alpha, scale or ("shared" if len(offered) > 1 else "rank"))


def adapter_layers(layout: Layout) -> list[str]:
    """Paths of the layers with an adapter."""
    return [name.removesuffix(f".{B}") for name in layout.shapes if name.endswith(f".{B}")]


def factor_side(name: str) -> str:
    """Whether a tensor is the A or the B of an adapter, or belongs to it as NAME.second does; empty for all others.

    >>> factor_side("q.lora_a.weight"), factor_side("q.lora_b.weight.second"), factor_side("q.bias")
    ('a', 'b', '')
    """
    for end, side in ((A, "a"), (B, "b")):
        if name.endswith(f".{end}") or name.rpartition(".")[0].endswith(f".{end}"):
            return side
    return ""


def shape_at_rank(name: str, shape: Shape, rank: int) -> Shape:
    side = factor_side(name)
    return (rank, *shape[1:]) if side == "a" else (shape[0], rank, *shape[2:]) if side == "b" else shape


def layout_at_rank(layout: Layout, rank: int) -> Layout:
    """The layout with adapters of this rank, without what methods put beside it: they will do so again."""
    shapes = {n: shape_at_rank(n, shape, rank) for n, shape in layout.shapes.items() if n not in layout.extra}
    dtypes = {name: layout.dtypes[name] for name in shapes}
    return Layout(shapes, dtypes, layout.buffers - layout.extra, layout.kinds)


def leading_columns(name: str, x: Tensor, rank: int) -> Tensor:
    """The first rows of A, or columns of B: `[K, *full]` -> `[K, *shape]`."""
    side = factor_side(name)
    short = x[:, :rank] if side == "a" else x[:, :, :rank] if side == "b" else x
    return x if short.shape == x.shape else short.contiguous()


def padded_columns(name: str, x: Tensor, rank: int) -> Tensor:
    """With zeros up to this rank."""
    axis = {"a": 1, "b": 2}.get(factor_side(name))
    if axis is None or x.shape[axis] == rank:
        return x
    full = x.new_zeros(*x.shape[:axis], rank, *x.shape[axis + 1 :])
    full.narrow(axis, 0, x.shape[axis]).copy_(x)
    return full


def ranks_fit(layout: Layout, ranks: Ranks, resize: Resize, within: bool) -> Fit:
    """Client models with adapters of every rank offered."""

    def module(model: nn.Module, size: int) -> nn.Module:
        rank = ranks.offered[size]
        return model_of_rank(model, rank, ranks.scale_at(rank))

    layouts = tuple(layout_at_rank(layout, rank) for rank in ranks.offered)
    names = tuple(f"rank {rank}" for rank in ranks.offered)
    return Fit(by_capacity(ranks.offered, "adapter"), layouts, resize, module, names, within)


def leading_resize(ranks: Ranks, both: bool, votes_for_all: bool) -> Resize:
    """A client has the first columns of the server's factors.

    `both`: both factors take half of a difference in scale, not B all of it. `votes_for_all`: what a client does not
    have counts as zeros; else it has no vote there.
    """

    def factor(name: str, rank: int) -> float:
        ratio, side = ranks.ratio(rank), factor_side(name)
        return (math.sqrt(ratio) if both else ratio if side == "b" else 1.0) if side else 1.0

    def shrink(state: Remembered, model: Tree, size: int, ctx: Ctx) -> Tree:
        rank, out = ranks.offered[size], {}
        for name, x in model.items():
            short = leading_columns(name, x, rank)
            out[name] = short if factor(name, rank) == 1 else short / factor(name, rank)
        return out

    def grow(resized: Tree, size: int, ctx: Ctx) -> tuple[Tree, Masks]:
        rank, full, covered = ranks.offered[size], {}, {}
        for name, x in resized.items():
            scaled = x if factor(name, rank) == 1 else x * factor(name, rank)
            full[name] = padded_columns(name, scaled, ranks.most)
            whole = votes_for_all or full[name].shape == x.shape
            covered[name] = None if whole else padded_columns(name, x[:1].new_ones(x[:1].shape).bool(), ranks.most)
        return full, covered

    return Resize(shrink, grow)
