"""How fast clients' links and devices are, where no file says: as one figure, spread around it, or by kind of link."""

import math

import torch
from torch import Tensor

from sparing.core.context import Ctx, context
from sparing.core.gaussian import keyed_words, normals_from_words

_LINK_KINDS = {"3g": (1.0, 4.0), "4g": (8.0, 25.0), "wifi": (15.0, 60.0), "fibre": (100.0, 300.0)}
"""Mbit/s up and down: round figures we assume, not measurements."""

_MIXED_LINKS = "mixed"
_RATE_DIGITS = 4  # of a drawn rate, so that no library's last bit decides a byte


def link_rates(
    seed: int,
    clients: int,
    kind: str | None = None,
    up: float | None = None,
    down: float | None = None,
    speed: float | None = None,
    spread: float = 0.0,
) -> dict[str, Tensor]:
    """What each client declares of up and down (Mbit/s) and speed (samples a second), each `[N]` float64.

    `spread` is the standard deviation of a rate's natural logarithm; the figure given is the median.

    >>> link_rates(seed=0, clients=3, up=2.0, spread=0.5)
    {'up': tensor([5.9810, 3.3210, 2.2870], dtype=torch.float64)}
    """
    ids = torch.arange(clients)
    ctx = context(seed, 0, 0, ids, ids, clients, 0)
    middle: dict[str, Tensor] = {}
    if kind is not None:
        names = list(_LINK_KINDS)
        which = (
            (ctx.uniform("links", 1)[:, 0] * len(names)).long() if kind == _MIXED_LINKS else ids * 0 + names.index(kind)
        )
        middle["up"], middle["down"] = torch.tensor(list(_LINK_KINDS.values()), dtype=torch.float64)[which].unbind(1)
    for name, value in (("up", up), ("down", down), ("speed", speed)):
        if value is not None:
            middle[name] = torch.full((clients,), value, dtype=torch.float64)
    return {name: _spread_rates(x, spread, ctx, name) for name, x in middle.items()} if spread else middle


def _spread_rates(middle: Tensor, spread: float, ctx: Ctx, name: str) -> Tensor:
    steps = (spread * normals_from_words(keyed_words(ctx, f"links/{name}", 2), 1)[:, 0]).tolist()
    drawn = [float(f"{x * math.exp(step):.{_RATE_DIGITS}g}") for x, step in zip(middle.tolist(), steps, strict=True)]
    return torch.tensor(drawn, dtype=torch.float64)
