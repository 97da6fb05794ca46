"""Partial sharing (PSFed): a fresh random part of the parameters travels each round, the rest stays the client's own.

The mask is drawn from (seed, round), or from (seed, round, client), so both ends rebuild it and it costs no bytes.
"""

import math

from torch import Tensor

from sparing.core.errors import ConfigError, check_range
from sparing.core.keys import Ctx
from sparing.core.parcel import Cut, Cuts
from sparing.core.protocols import Share
from sparing.core.tree import Layout, Tree, column


def random(layout: Layout, fraction: float, per_client: bool = False, first: str = "download") -> Share:
    """Exactly round(fraction * d) of the d parameters; buffers travel whole, and not at all if nothing is chosen.

    A client the server never met gets the whole model once (`first="download"`), or starts from the common initial
    model (`first="seed"`).
    """
    check_range("psfed.fraction", fraction, 0, 1)
    if first not in ("download", "seed"):
        raise ConfigError(f"psfed.first is {first!r}; use 'download' (the whole model at first contact) or 'seed'")
    count = math.floor(fraction * layout.size + 0.5)
    whole: Cuts = {name: Cut() for name in layout.shapes}
    if count == layout.size:
        return Share(down=lambda state, model, ctx: whole, up=lambda got, ctx: whole)
    if count == 0:
        everything = frozenset(layout.shapes)
        return Share(down=lambda state, model, ctx: {}, up=lambda got, ctx: {}, own=everything, private=everything)

    last: list[tuple[tuple, Cuts]] = []

    def drawn(ctx: Ctx) -> Cuts:
        """This round's mask. Both directions need it, so the last draw is kept."""
        rows = ctx if per_client else ctx.common
        key = (ctx.seed, ctx.round, ctx.ids.device, *rows.ids.tolist())
        kept = last[:1]
        if not kept or kept[0][0] != key:
            kept = [(key, whole | pieces(rows.choose("psfed", layout.size, count), layout))]
            last[:] = kept
        return kept[0][1]

    def down(state: Tree, model: Tree, ctx: Ctx) -> Cuts:
        cuts = drawn(ctx)
        if first == "seed" or ctx.first is None or not bool(ctx.first.any()):
            return cuts
        all_K = ctx.first
        return {
            name: cut if cut.mask is None else Cut(cut.mask | column(all_K, cut.mask)) for name, cut in cuts.items()
        }

    return Share(down, up=lambda got, ctx: drawn(ctx), own=frozenset(layout.params))


def pieces(flat: Tensor, layout: Layout) -> Cuts:
    """A mask over all parameters, `[K, d]`, cut into one per tensor."""
    shapes = {name: layout.shapes[name] for name in layout.params}
    parts = flat.split([math.prod(shape) for shape in shapes.values()], dim=1)
    return {
        name: Cut(part.reshape(len(flat), *shape)) for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }
