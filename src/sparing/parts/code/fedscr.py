"""Structured sparsification (FedSCR): whole filters and channels of an update are sent or left out.

With u the update of a convolution, F filters by C channels, block (i, j) is sent where

    sum |u[i, :]| > threshold  and  sum |u[:, j]| > threshold

so F + C bits say which blocks follow. Keeping what was left out is the task of error feedback, around this codec.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from sparing.core.codec import only
from sparing.core.context import Ctx
from sparing.core.errors import ConfigError, MethodError, check_range
from sparing.core.method import FIXED, SPARSIFIES, Codec, Form, Meter, Report, Summary, View
from sparing.core.operation import operation
from sparing.core.ops import constants
from sparing.core.parcel import Leaf, Parcel, Schema, client_count, sent_mask
from sparing.core.reduce import count_true, total
from sparing.core.tree import Layout, Tree, cleared, flat

MODES = ("absolute", "relative", "budget")
Bar = float | Tensor  # one threshold for all clients, or one each, [K, 1]


def structured_codec(
    layout: Layout, threshold: float, mode: str = "absolute", dense: bool = False, adaptive: bool = False
) -> Codec:
    """Thin out convolutions, and with `dense` the rows and columns of dense layers; all else passes whole.

    `relative` divides the sums by the largest of their kind. `budget` takes `threshold` for the share of a layer's
    entries to send at most. With `adaptive` each client is told its threshold and reports two numbers back.
    """
    _refuse_fedscr_settings(threshold, mode, adaptive)
    names = thinned_layers(layout, dense)

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        bar = view.notes["threshold"].double()[:, None] if adaptive else threshold
        leaves, notes = dict(parcel.leaves), dict(parcel.notes)
        here = [name for name in names if name in leaves]
        for name, (filters, channels) in zip(
            here, _chosen_structures([leaves[name] for name in here], bar, mode), strict=True
        ):
            leaf = leaves[name]
            value = keep_structures(leaf.value, filters, channels)
            leaves[name] = leaf._replace(value=value, keep=(*leaf.keep, filters, channels))
        if adaptive:
            notes |= _reported_of_itself({name: leaves[name].value for name in here}, view)
        return Parcel(leaves, notes), state

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        leaves = dict(expected.leaves)
        for name in names:
            if name in leaves:
                f, c, *kernel = leaves[name].shape
                grains = ((f, 1, *[1] * len(kernel)), (1, c, *[1] * len(kernel)))
                leaves[name] = leaves[name]._replace(grains=(*leaves[name].grains, *grains))
        numbers = {"divergence": 1, "significance": 1} if adaptive else {}
        return expected._replace(leaves=leaves, notes=expected.notes | numbers)

    effect = SPARSIFIES._replace(refuses=FIXED | Form.CODES)
    return only(Codec(encode, schema=schema, name="fedscr", effect=effect), frozenset(names))


def _refuse_fedscr_settings(threshold: float, mode: str, adaptive: bool) -> None:
    if mode not in MODES:
        raise ConfigError(f"fedscr.threshold_mode is {mode!r}; use one of {', '.join(map(repr, MODES))}")
    if mode == "budget":
        check_range("fedscr.threshold, the share to send in budget mode,", threshold, 0, 1, open_low=True)
        if adaptive:
            raise ConfigError("fedscr.adaptive moves a threshold, and budget mode has none; use absolute or relative")
    check_range("fedscr.threshold", threshold, 0, math.inf)


def thinned_layers(layout: Layout, dense: bool) -> list[str]:
    """The weights that have filters and channels, or with `dense` rows and columns."""
    if layout.bases:
        raise MethodError(
            "fedscr looks for filters, which tensors of a model split into bases do not show; drop fedscr or split-mix"
        )
    kinds = ("conv", "linear") if dense else ("conv",)
    names = [name for name in layout.params if name in layout.kinds and layout.kinds[name].name in kinds]
    if not names:
        what, fix = ("convolution or dense", "drop fedscr") if dense else ("convolution", "set dense: true or drop it")
        raise MethodError(f"fedscr would thin out nothing: the model has no {what} layer; {fix}")
    return names


def _chosen_structures(leaves: list[Leaf], bar: Bar, mode: str) -> list[tuple[Tensor, Tensor]]:
    """Which filters, bool `[K, F, 1, ...]`, and channels, `[K, 1, C, ...]`, are sent: none of one, none of the other.

    What is not a number passes, so that the server sees it and refuses it, instead of staying hidden in a residual.
    All layers are looked at in one row: filters, then channels, layer by layer.
    """
    if not leaves:
        return []
    pairs = [structure_strengths(leaf.value) for leaf in leaves]
    if mode == "relative":
        pairs = [
            (_ratio_or_value(f, f.amax(1, keepdim=True)), _ratio_or_value(c, c.amax(1, keepdim=True))) for f, c in pairs
        ]
    sizes = tuple(x.shape[1] for pair in pairs for x in pair)
    if mode == "budget":
        cuts = [
            _budget_threshold(*pair, _entries_by_block(leaf), float(bar))
            for pair, leaf in zip(pairs, leaves, strict=True)
        ]
        bar = torch.cat([cut.expand(-1, f.shape[1] + c.shape[1]) for cut, (f, c) in zip(cuts, pairs, strict=True)], 1)
    passes = ~(torch.cat([x for pair in pairs for x in pair], 1) <= bar)
    members, layer_of = _structure_stretches(sizes, passes.device)
    some = (passes.double() @ members > 0).view(-1, len(leaves), 2).all(2)
    parts = iter((passes & some[:, layer_of]).split(sizes, 1))
    shapes = [leaf.value.shape for leaf in leaves]
    return [
        (next(parts).reshape(k, f, 1, *[1] * len(kernel)), next(parts).reshape(k, 1, c, *[1] * len(kernel)))
        for k, f, c, *kernel in shapes
    ]


@operation
def keep_structures(value: Tensor, filters: Tensor, channels: Tensor) -> Tensor:
    """The value with zeros in every filter and every channel that is not sent."""
    return cleared(value, filters & channels)


@operation
def structure_strengths(u: Tensor) -> tuple[Tensor, Tensor]:
    """sum |u| of every filter, `[K, F]`, and of every channel, `[K, C]`."""
    k, f, c = u.shape[:3]
    block = block_strengths(u)
    return total(block.reshape(k * f, c)).reshape(k, f), total(block.mT.reshape(k * c, f)).reshape(k, c)


def block_strengths(u: Tensor) -> Tensor:
    """sum |u| of every block, `[K, F, C]` float64."""
    return total(u.abs().reshape(math.prod(u.shape[:3]), -1)).reshape(u.shape[:3])


@lru_cache(maxsize=16)
def _structure_stretches(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Of a row in stretches of these sizes, two a layer: which number is in which, float64 `[numbers, stretches]` of 0
    and 1, and in which layer each is."""
    which = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return torch.nn.functional.one_hot(which, len(sizes)).double().to(device), (which // 2).to(device)


def _entries_by_block(leaf: Leaf) -> Tensor:
    """How many entries of every block are shared: float64 `[K or 1, F, C]`."""
    f, c, *kernel = leaf.value.shape[1:]
    if leaf.scope is None:
        return torch.full((1, f, c), float(math.prod(kernel)), dtype=torch.float64, device=leaf.value.device)
    return flat(leaf.scope.expand(-1, *leaf.value.shape[1:]).flatten(0, 2)).sum(1).double().reshape(-1, f, c)


def _budget_threshold(filt: Tensor, chan: Tensor, size: Tensor, share: float) -> Tensor:
    """The lowest threshold among 0 and the sums themselves that sends at most `share` of the entries, `[K, 1]`.

    Where this would send nothing, the next lower one: the strongest structures, however large. A layer whose
    structures are all too large for its share would otherwise never be heard of again.
    """
    size = size.expand(len(filt), -1, -1)
    steps = torch.cat([torch.zeros_like(filt[:, :1]), filt, chan], dim=1).sort(dim=1).values

    def sends(bar: Tensor) -> Tensor:
        """How many entries, `[K, 1]`: whole numbers, so exact in any order."""
        rows = (~(filt <= bar)).double()[:, None] @ size
        return (rows @ (~(chan <= bar)).double()[:, :, None])[:, 0]

    most = share * (1 + 2.0**-50) * size.sum((1, 2))[:, None]  # 0.29 * 100 is 29, not less
    low = torch.zeros_like(most, dtype=torch.int64)
    high = torch.full_like(low, steps.shape[1] - 1)
    for _ in range(steps.shape[1].bit_length()):
        middle = (low + high) // 2
        fits = sends(steps.gather(1, middle)) <= most
        low, high = torch.where(fits, low, middle + 1).minimum(high), torch.where(fits, middle, high)
    bar = steps.gather(1, high)
    below = torch.where(steps < bar, steps, 0.0).amax(dim=1, keepdim=True)
    return torch.where(sends(bar) == 0, below, bar)


def _reported_of_itself(out: Tree, view: View) -> dict[str, Tensor]:
    """What a client says of itself: how far it moved, and how much it sends, against the size of its weights."""
    moved = spent = weight = torch.zeros(len(view.ctx.ids), dtype=torch.float64, device=view.ctx.device)
    for name, value in out.items():
        after = view.after[name]
        size = total(after.abs())
        moved = moved + _ratio_or_value(total((after - view.start[name]).abs()), size)
        spent, weight = spent + total(value.abs()), weight + size
    return {"divergence": moved.sqrt().float(), "significance": _ratio_or_value(spent, weight).sqrt().float()}


def _ratio_or_value(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and a where b is zero."""
    return a / b.masked_fill(b == 0, 1.0)


def _pruned_shares(parcel: Parcel, names: list[str]) -> Tensor:
    """Which share of the shared entries did not come, `[K, L + 1]`: by layer, then of all; NaN where none is shared."""
    device = next((leaf.value.device for leaf in parcel.leaves.values()), torch.device("cpu"))
    leaves, k = [parcel.leaves.get(name) for name in names], client_count(parcel)
    shared, came = (
        torch.stack([count(leaf, device).expand(k) for leaf in leaves], dim=1).double()
        for count in (_count_shared, _count_sent)
    )
    return 1 - torch.cat([came, came.sum(1, keepdim=True)], 1) / torch.cat([shared, shared.sum(1, keepdim=True)], 1)


def _count_shared(leaf: Leaf | None, device: torch.device) -> Tensor:
    """How many entries could come, `[K or 1]` int64; of a leaf that is not there, 0."""
    return constants((0,), device) if leaf is None else _count_where(leaf.scope, leaf, device)


def _count_sent(leaf: Leaf | None, device: torch.device) -> Tensor:
    """How many came; where nothing but filters and channels was chosen, one count times the other."""
    if leaf is None or leaf.scope is not None or len(leaf.keep) != 2:
        return constants((0,), device) if leaf is None else _count_where(sent_mask(leaf), leaf, device)
    blocks = math.prod(leaf.value.shape[1:3])
    filters, channels = (count_true(keep) for keep in leaf.keep)
    return filters * channels * (math.prod(leaf.value.shape[1:]) // max(blocks, 1))


def _count_where(mask: Tensor | None, leaf: Leaf, device: torch.device) -> Tensor:
    """True entries of a mask that broadcasts to the value."""
    n = math.prod(leaf.value.shape[1:])
    return constants((n,), device) if mask is None else count_true(mask) * (n // math.prod(mask.shape[1:]))


def pruned_share(layout: Layout, dense: bool) -> Meter:
    """Reports pruned_share, the mean over clients, of all layers and of each."""
    names = thinned_layers(layout, dense)

    def watch(parcel: Parcel, ctx: Ctx) -> dict[str, Tensor]:
        return {"pruned": _pruned_shares(parcel, names)}

    def report(seen: dict[str, Tensor]) -> Report:
        labels = [*(f"pruned_share/{name}" for name in names), "pruned_share"]
        return Summary([seen["pruned"]], lambda x: dict(zip(labels, x.nanmean(dim=0).tolist(), strict=True)))

    return Meter(watch, report)
