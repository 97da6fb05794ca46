"""Low-rank client models (FedHM): the server cuts its weights into factors of each client's rank, and grows them back.

Which layers stay whole: the first few, the last, 1x1 convolutions of shortcuts, and those named.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparing.core.context import Ctx
from sparing.core.errors import MethodError, check_range, nearest_name
from sparing.core.keys import hashes, uniforms
from sparing.core.method import Fit, Remembered, Report, Resize
from sparing.core.operation import operation
from sparing.core.tree import Layout, Masks, Tree, tied_names
from sparing.parts.factors import (
    FactoredConv,
    FactoredLinear,
    Shape,
    factor_names,
    factor_product,
    factor_shapes,
    factors_of,
    in_shape,
    matrix_of,
)
from sparing.parts.factors import matrix_sides as sides_of
from sparing.parts.size.capacity import by_capacity, refuse_ratios
from sparing.parts.size.fedhm.svd import PROBES, Svd, begins_anew, exact_svds, matrix_energy, renewed_svd

FULL = {18: 3, 34: 15, 50: 10}
"""Leading layers that stay whole, by how many there are: in ResNet-18 the stem and its first block, in ResNet-34 the
stem and layers 1 and 2, in ResNet-50 the stem and layer 1. Other networks keep their first layer."""
SHORTCUTS = ("shortcut", "downsample")


class LowRank(NamedTuple):
    """Which layers are factored, and how far, for every size that is offered."""

    layout: Layout
    ranks: tuple[dict[str, int], ...]  # by size: the rank of each factored layer; none where the model is whole
    most: dict[str, int]  # the largest of these ranks
    least: dict[str, int]  # and the smallest
    sizes: Callable[[Ctx], Tensor]

    @property
    def groups(self) -> dict[tuple[int, int, int], list[str]]:
        """Layers whose matrices have one shape and one largest rank: (rows, columns, rank) -> names."""
        groups: dict[tuple[int, int, int], list[str]] = {}
        for name, rank in self.most.items():
            groups.setdefault((*sides_of(self.layout.shapes[name]), rank), []).append(name)
        return groups


def low_rank_fit(layout: Layout, ratios: Sequence[float], full: int | None = None, keep: Sequence[str] = ()) -> Fit:
    """Client models whose factored layers have rank `ratio` times their outputs; ratio 1 is the model itself."""
    refuse_ratios("fedhm", ratios)
    thin = [ratio for ratio in ratios if ratio < 1]
    layers = _factored_layers(layout, full, keep) if thin else []
    ranks = [{name: rank_of(layout.shapes[name], ratio) for name in layers} if ratio < 1 else {} for ratio in ratios]
    most, least = (ranks[ratios.index(some(thin))] if thin else {} for some in (max, min))
    plan = LowRank(layout, tuple(ranks), most, least, by_capacity(ratios, "rank"))
    resize = Resize(
        shrink=partial(cut_factors, plan),
        grow=partial(multiply_factors, plan),
        init=lambda model: decompose_weights(plan, model, {}, None)[0],
        learn=lambda state, model, ctx: decompose_weights(plan, model, state, ctx),
    )
    return Fit(
        sizes=plan.sizes,
        layouts=tuple(resized_layout(layout, rank) for rank in ranks),
        resize=resize,
        module=lambda model, size: resized_module(model, ranks[size]),
        names=tuple(f"ratio {ratio:g}" for ratio in ratios),
    )


def cut_factors(plan: LowRank, state: Remembered, model: Tree, size: int, ctx: Ctx) -> Tree:
    """The model with factors of this size's ranks in place of weights."""
    out: Tree = {}
    for name, x in model.items():
        if (rank := plan.ranks[size].get(name)) is None:
            out[name] = x
            continue
        a, b = state[f"a/{name}"][:, :, :rank], state[f"b/{name}"][:, :rank]
        out |= {part: y.contiguous().to(x.dtype) for part, y in zip(factor_names(name), (a, b), strict=True)}
    return out


def multiply_factors(plan: LowRank, resized: Tree, size: int, ctx: Ctx) -> tuple[Tree, Masks]:
    """Weights again; every client covers all of them."""
    whole = {name: factor_product(*(resized[part] for part in factor_names(name))) for name in plan.ranks[size]}
    whole = {name: in_shape(x, plan.layout.shapes[name]) for name, x in whole.items()}
    return whole, dict.fromkeys(whole)


@operation
def decompose_weights(plan: LowRank, model: Tree, old: Remembered, ctx: Ctx | None) -> tuple[Remembered, Report]:
    """The factors of every layer, of the largest rank, what the next decomposition goes on from, and their quality."""
    matrices, groups = matrices_of(plan, model), plan.groups
    fresh = [(m, rank) for m, (*_, rank) in zip(matrices, groups, strict=True) if not old or begins_anew(m, rank)]
    begun = iter(exact_svds([m for m, _ in fresh], [rank for _, rank in fresh]))
    svds, fallbacks = [], 0
    for m, ((_, columns, rank), names) in zip(matrices, groups.items(), strict=True):
        if not old or begins_anew(m, rank):
            found = next(begun)
        else:
            before = torch.cat([old[f"v/{name}"] for name in names])
            found, missed = renewed_svd(m, rank, before, partial(_random_probes, ctx, names, columns, m))
            fallbacks += missed
        svds.append(found)
    if not plan.most:
        return {}, {}
    strengths = [(matrix_energy(m), found.s.double()) for m, found in zip(matrices, svds, strict=True)]
    return factors_from(plan, svds), {**factor_quality(plan, strengths), "fallbacks": float(fallbacks)}


def matrices_of(plan: LowRank, model: Tree) -> list[Tensor]:
    """Of every group its matrices, `[layers, rows, columns]`."""
    alike = [[matrix_of(model[name]) for name in names] for names in plan.groups.values()]
    matrices = [torch.cat(some) if len(some) > 1 else some[0] for some in alike]
    return [m if m.dtype == torch.float64 else m.float() for m in matrices]


def factors_from(plan: LowRank, svds: list[Svd]) -> Tree:
    state: Tree = {}
    for names, found in zip(plan.groups.values(), svds, strict=True):
        for i, name in enumerate(names):
            u, s, v = (x[i : i + 1] for x in found)
            a, b = factors_of(u, s, v, plan.layout.shapes[name])
            state |= {f"a/{name}": a, f"b/{name}": b, f"s/{name}": s, f"v/{name}": v}
    return state


def rank_of(shape: Shape, ratio: float) -> int:
    """max(round(ratio m), 1) for m outputs, at most what a matrix of this shape has.

    >>> rank_of((512, 256, 3, 3), 0.25), rank_of((512, 64), 0.5)
    (128, 64)
    """
    return min(max(round(ratio * shape[0]), 1), *sides_of(shape))


def _factored_layers(layout: Layout, full: int | None, keep: Sequence[str]) -> list[str]:
    """Weights that become two factors; refused if there is none. Convolutions in groups stay whole."""
    weights = [name for name in layout.shapes if name in layout.kinds]
    spine = [name for name in weights if not is_shortcut(layout, name)]
    lead = FULL.get(len(spine), 1) if full is None else full
    check_range("fedhm.full", lead, 0, float("inf"))
    whole = {*spine[:lead], *spine[-1:], *_named_weights(layout, keep)}
    found = [name for name in spine if name not in whole]
    grouped = [name for name in found if layout.kinds[name].groups > 1]
    found = [name for name in found if name not in grouped]
    layers = ", ".join(name.rpartition(".")[0] for name in grouped)
    if not found:
        also = f", and convolutions in groups: {layers}" if grouped else ""
        raise MethodError(
            f"fedhm finds no layer to factor: of {len(spine)} convolutions and dense layers the first {lead} and the "
            f"last stay whole, and those in fedhm.keep{also}; take a deeper model or lower fedhm.full"
        )
    if grouped:
        warnings.warn(f"fedhm leaves convolutions in groups whole: {layers}", stacklevel=2)
    return found


def _cannot_factor(layer: str, why: str) -> MethodError:
    return MethodError(f"fedhm cannot factor {layer!r}: {why}; keep it whole with fedhm.keep: [{layer}]")


def is_shortcut(layout: Layout, name: str) -> bool:
    one = all(side == 1 for side in layout.shapes[name][2:]) and layout.kinds[name].name == "conv"
    return one and any(part in SHORTCUTS for part in name.split("."))


def _named_weights(layout: Layout, keep: Sequence[str]) -> set[str]:
    """Weights whose path holds one of these as whole components."""
    found: set[str] = set()
    for word in keep:
        hits = {name for name in layout.kinds if f".{word}." in f".{name}."}
        if not hits:
            layers = [name.rpartition(".")[0] for name in layout.kinds]
            raise MethodError(
                f"fedhm.keep: {word!r} matches no convolution or dense layer; {nearest_name(word, layers)}"
            )
        found |= hits
    return found


def resized_layout(layout: Layout, ranks: dict[str, int]) -> Layout:
    """Each factored weight gives way to its two factors, in its place."""
    shapes, dtypes, kinds = {}, {}, {}
    for name, shape in layout.shapes.items():
        forms = {name: shape}
        if name in ranks:
            forms = dict(zip(factor_names(name), factor_shapes(shape, ranks[name]), strict=True))
        shapes |= forms
        dtypes |= dict.fromkeys(forms, layout.dtypes[name])
        if name in layout.kinds:
            kinds |= dict.fromkeys(forms, layout.kinds[name])
    return Layout(shapes, dtypes, layout.buffers, kinds)


def resized_module(model: nn.Module, ranks: dict[str, int]) -> nn.Module:
    """A copy of the network with factored layers, their factors zero; with no rank given, the network itself."""
    if not ranks:
        return model
    refuse_tied(model, ranks)
    model = copy.deepcopy(model)
    for name, rank in ranks.items():
        path = name.rpartition(".")[0]
        layer = model.get_submodule(path)
        if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            if layer.padding_mode != "zeros":
                raise _cannot_factor(path, f"it pads with {layer.padding_mode!r}, not with zeros")
            thin = FactoredConv(layer, rank)
        else:
            assert isinstance(layer, nn.Linear)
            thin = FactoredLinear(layer, rank)
        owner, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(owner), leaf, thin)
    return model


def refuse_tied(model: nn.Module, ranks: dict[str, int]) -> None:
    for second, first in tied_names(model).items():
        if first in ranks:
            raise _cannot_factor(first.rpartition(".")[0], f"its weight is also {second!r}")


def _random_probes(ctx: Ctx | None, names: list[str], columns: int, like: Tensor) -> Tensor:
    """Random columns for each matrix, `[L, columns, PROBES]`, the same on every device."""
    assert ctx is not None  # nothing goes on from before the first round
    keys = torch.cat([ctx.common.keys(f"fedhm/{name}") for name in names]).to(like.device)
    return (uniforms(hashes(keys, columns * PROBES)) - 0.5).to(like.dtype).unflatten(1, (columns, PROBES))


def factor_quality(plan: LowRank, strengths: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """How far the smallest client's layers are from the server's, relative, and the norm of each of their factors.

    Of each group the energy of its matrices, `[layers]`, and their singular values, `[layers, rank]`.
    """
    report: dict[str, float] = {}
    missed, whole = 0.0, 0.0
    for names, (energies, values) in zip(plan.groups.values(), strengths, strict=True):
        for name, size, s in zip(names, energies.tolist(), values.cpu(), strict=True):
            rank, layer = plan.least[name], name.rpartition(".")[0]
            caught, root = float(s[:rank].square().sum()), float(s[:rank].sum())
            gap = max(size - caught, 0.0)
            report[f"approximation/{layer}"] = (gap / size) ** 0.5 if size else 0.0
            report[f"factor_norm/{layer}"] = root**0.5
            missed, whole = missed + gap, whole + size
    return report | {"approximation_error": (missed / whole) ** 0.5 if whole else 0.0}
