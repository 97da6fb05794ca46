"""Blends that need everyone at once, over the clients of all ranks.

The first rank works them out for all. Updates stay where they arrived; it asks for one tensor of them at a time, when
the blend looks at it, so it never holds more of the others than that.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.fold import Collect, refuse_misfits
from sparing.core.method import Blended, Method
from sparing.core.tree import Tree, prefixed, under
from sparing.ranks.group import Ranks
from sparing.ranks.rank_sums import join_rosters

_UPDATE, _SCOPE = "update", "scope"


class CollectOfRanks:
    def __init__(self, ranks: Ranks, collect: Collect, method: Method):
        self.ranks, self.collect, self.roster = ranks, collect, collect.roster
        join_rosters(ranks, collect.roster, method)

    def mean(self, ctx: Ctx) -> Blended:
        """As `Collect.mean`, on every rank."""
        ids, weight, seen = self.roster.in_order(ctx)
        shapes, masked = self.shapes_and_masks()
        said: Tree = {}
        if self.ranks.is_first:
            order = ids.tolist()
            values = AskedTensors(shapes, lambda name: self.rows(_UPDATE, name, order))
            votes = AskedTensors(
                shapes,
                lambda name: (
                    self.rows(_SCOPE, name, order) if name in masked else self.everywhere(len(order), shapes[name])
                ),
            )
            update, covered = self.collect.reduce(values, votes, ctx.placed(weight))
            refuse_misfits(shapes, update, covered)
            self.ranks.agreed(None)
            said = prefixed(_UPDATE, update) | prefixed(_SCOPE, covered)
        else:
            while (asked := self.ranks.agreed(None)) is not None:
                self.ranks.bring_to_first(self.own_rows(*asked), lambda rank, who, x: None)
        self.collect.update, self.collect.scope = {}, {}
        said = {name: x.to(self.ranks.device) for name, x in self.ranks.said_by_first(said).items()}
        return Blended(under(_UPDATE, said), dict(under(_SCOPE, said)), ids, ctx.placed(weight), seen)

    def shapes_and_masks(self) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        """Every tensor's shape, and of which some client votes on a part only; as all ranks know it."""
        mine: dict[str, Any] = {}
        for who, tree in self.collect.update.items():
            for name, x in tree.items():
                masked = self.collect.scope[who].get(name) is not None
                mine[name] = [list(x.shape), masked or (name in mine and mine[name][1])]
        known = self.ranks.gather_json(mine)
        shapes = {name: tuple(shape) for one in known for name, (shape, _) in one.items()}
        return shapes, {name for one in known for name, (_, masked) in one.items() if masked}

    def rows(self, kind: str, name: str, order: list[int]) -> Tensor:
        """One tensor of everybody, `[n, *shape]`; the first rank asks, all others answer."""
        self.ranks.agreed([kind, name])
        found: dict[int, Tensor] = {}
        self.ranks.bring_to_first(self.own_rows(kind, name), lambda rank, who, x: found.update({int(who): x}))
        return torch.stack([found.pop(who).to(self.ranks.device) for who in order])

    def own_rows(self, kind: str, name: str) -> Tree:
        """What this rank's clients have of it, by client."""
        if kind == _UPDATE:
            return {str(who): tree[name] for who, tree in self.collect.update.items()}
        full = torch.ones((), dtype=torch.bool, device=self.ranks.device)
        return {
            str(who): (full if (mask := self.collect.scope[who].get(name)) is None else mask)
            .expand_as(tree[name])
            .contiguous()
            for who, tree in self.collect.update.items()
        }

    def everywhere(self, clients: int, shape: tuple[int, ...]) -> Tensor:
        return torch.ones((), dtype=torch.bool, device=self.ranks.device).expand(clients, *shape)


class AskedTensors(Mapping[str, Tensor]):
    """Tensors that are asked for when they are looked at; the last one is kept."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], ask: Callable[[str], Tensor]):
        self.shapes, self.ask = shapes, ask
        self.last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        if self.last is None or self.last[0] != name:
            self.last = None  # before the next one comes
            self.last = name, self.ask(name)
        return self.last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)
