"""Adapters whose width grows with a client's data: each client opens the first places of its gate.

width_k = base + growth * log(n_k), rounded, from 1 to the width the model was built with. Both ends know n_k, so the
gate never travels.
"""

import math
from collections.abc import Callable

import torch

from sparing.core.context import Ctx
from sparing.core.errors import MethodError, check_range
from sparing.core.tree import Layout, Tree

GATE = "adapter.gate"


def adapter_gates(layout: Layout, home: frozenset[str], base: float, growth: float) -> Callable[[Tree, Ctx], Tree]:
    """Fills in the gates among a client's own tensors: a `Share.given`."""
    check_range("adapter.base", base, 0, math.inf)
    check_range("adapter.growth", growth, 0, math.inf)
    names = [name for name in layout.buffers if f".{name}".endswith(f".{GATE}")]
    if not names:
        raise MethodError(
            "there is no adapter with a gate in this model; build it in, as in task.model: {cnn: {adapter: 16}}, and "
            "do not set local.buffers to static"
        )
    for name in names:
        if name not in home:
            raise MethodError(f"{name!r} is shared, but its width differs between clients; make the adapter personal")

    def given(own: Tree, ctx: Ctx) -> Tree:
        wide = [max(1, math.floor(base + growth * math.log(n) + 0.5)) for n in ctx.n.tolist()]
        filled = dict(own)
        for name in names:
            gate = own[name]
            place = torch.arange(gate.shape[1], device=gate.device)
            filled[name] = (place < torch.tensor(wide, device=gate.device)[:, None]).to(gate.dtype)
        return filled

    return given
