"""Small things that many tests need: layouts, contexts, random parcels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparing.accel.install import install
from sparing.core.context import Ctx, Members, context
from sparing.core.method import Report, View
from sparing.core.operation import plain_again
from sparing.core.parcel import Leaf, Parcel
from sparing.core.tree import Layout, Tree, layout_of
from sparing.engines.outcome import read_later
from sparing.runs.results import Record


def accelerated(*values: Any) -> list[Any]:
    """Cases of a parametrised test that need accelerators."""
    return [pytest.param(value, marks=pytest.mark.accel) for value in values]


class Stop(Exception):
    """Ends a run as a crash would."""


def stop_after(t: int) -> Callable[[Record], None]:
    def log(record: Record) -> None:
        if record.round == t:
            raise Stop

    return log


def make_ctx(ids: list[int], n: list[int] | None = None, seed: int = 0, t: int = 1, clients: int = 50) -> Ctx:
    counts = torch.tensor(n if n is not None else [10 + i for i in ids])
    return context(
        seed=seed, round=t, rounds=20, ids=torch.tensor(ids), n=counts, clients=clients, samples=1000, cohort=len(ids)
    )


def changed(ctx: Ctx, device: str | None = None, **fields: object) -> Ctx:
    """The same round in which something is known otherwise of its members or its federation, or on another device."""
    members = {name: x for name, x in fields.items() if name in Members._fields}
    federation = {name: x for name, x in fields.items() if name not in members}
    workspace = ctx.workspace if device is None else ctx.workspace._replace(device=torch.device(device))
    return ctx._replace(
        members=ctx.members._replace(**members),
        federation=ctx.federation._replace(**federation),
        workspace=workspace._replace(memo={}),
    )


@contextmanager
def plain_bodies() -> Iterator[None]:
    """Every operation runs its plain body."""
    plain_again()
    try:
        yield
    finally:
        install()


def numbers(report: Report) -> dict[str, float]:
    """What a round's report comes to, once it is over."""
    return read_later([], [], report)()[1]


def small_net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))


def small_layout() -> Layout:
    return layout_of(small_net())


def random_tree(layout: Layout, k: int, seed: int = 0) -> Tree:
    g = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(k, *shape, generator=g)
        if layout.dtypes[name].is_floating_point
        else torch.randint(0, 9, (k, *shape), generator=g)
        for name, shape in layout.shapes.items()
    }


def update_parcel(layout: Layout, k: int, seed: int = 0, scope: dict[str, Tensor] | None = None) -> Parcel:
    leaves = {}
    for name, value in random_tree(layout, k, seed).items():
        mask = (scope or {}).get(name)
        leaves[name] = Leaf(value if mask is None else value * mask, scope=mask)
    return Parcel(leaves, {"n": torch.ones(k), "loss": torch.zeros(k)})


FALLING = Layout(
    {"conv": (16, 8, 3, 3), "dense": (60, 40), "bias": (60,), "tiny": (2, 3), "steps": (), "head": (10, 60)},
    dict.fromkeys(("conv", "dense", "bias", "tiny", "head"), torch.float32) | {"steps": torch.int64},
    frozenset({"steps"}),
)


def falling(k: int, m: int, n: int, g: torch.Generator, rate: float) -> Tensor:
    """Matrices `[k, m, n]` each of whose components is weaker by a factor than the one before."""
    u, v = (torch.linalg.qr(torch.randn(k, side, min(m, n), generator=g)).Q for side in (m, n))
    return (u * rate ** torch.arange(min(m, n))) @ v.mT


def falling_update(k: int = 1, seed: int = 0, rate: float = 0.7, **changed: Tensor) -> Parcel:
    """Such matrices in the layout FALLING, the convolution's as [filters * height, channels * width]."""
    g = torch.Generator().manual_seed(seed)
    conv = falling(k, 48, 24, g, rate).reshape(k, 16, 3, 8, 3).transpose(2, 3).contiguous()
    values = {"conv": conv, "dense": falling(k, 60, 40, g, rate), "bias": 0.05 * torch.randn(k, 60, generator=g)}
    values |= {"tiny": 0.1 * torch.randn(k, 2, 3, generator=g), "steps": torch.full((k,), 7)}
    values |= {"head": falling(k, 10, 60, g, rate)} | changed
    return Parcel({name: Leaf(x) for name, x in values.items()}, {"n": torch.ones(k), "loss": torch.zeros(k)})


def view_of(ctx: Ctx) -> View:
    return View(ctx, {}, {}, {})


def declared(path: Path, what: str) -> str:
    """A file in which clients 0 to 11 declare what they can afford, in no order."""
    shares = [1, 0.13, 0.3, 0.5, 0.01, 1, 0.25, 0.6, 0.125, 0.9, 0.5, 0.2]
    path.write_text(f"client,{what}\n" + "".join(f"{i},{share}\n" for i, share in enumerate(shares)))
    return str(path)
