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

_UPDATE, _SCOPE, _REPORT = "update", "scope", "report"


class CollectOfRanks:
    def __init__(self, ranks: Ranks, collect: Collect, method: Method):
        self.ranks, self.collect, self.roster = ranks, collect, collect.roster
        join_rosters(ranks, collect.roster, method)

    def mean(self, ctx: Ctx) -> Blended:
        """As `Collect.mean`, on every rank."""
        ids, weight, seen = self.roster.in_order(ctx)
        weight, said = ctx.placed(weight), {}
        known = self.shapes_and_masks()
        came = self.gathered_values(ids.tolist())
        if self.ranks.is_first:
            said = self.blended(*known, came, ids.tolist(), weight, ctx)
            self.ranks.agreed(None)
        else:
            while (asked := self.ranks.agreed(None)) is not None:
                self.ranks.bring_to_first(self.own_rows(*asked), lambda rank, who, x: None)
        self.collect.update, self.collect.scope = {}, {}
        said = {name: x.to(self.ranks.device) for name, x in self.ranks.said_by_first(said).items()}
        update, report = under(_UPDATE, said), under(_REPORT, said)
        masks = dict.fromkeys(update) | dict(under(_SCOPE, said))
        return Blended(update, masks, ids, weight, seen, report=report)

    def blended(
        self,
        shapes: dict[str, tuple[int, ...]],
        masked: set[str],
        came: list[Tree],
        order: list[int],
        weight: Tensor,
        ctx: Ctx,
    ) -> Tree:
        """What the first rank says to all: the update, where there is one, and a report."""

        def ask_votes(name: str) -> Tensor:
            return self.rows(_SCOPE, name, order) if name in masked else self.everywhere(len(order), shapes[name])

        values = AskedTensors(shapes, lambda name: self.rows(_UPDATE, name, order))
        update, covered = self.collect.reduce(values, AskedTensors(shapes, ask_votes), weight)
        refuse_misfits(shapes, update, covered)
        gathered, report = self.collect.gathered(came, weight, ctx)
        numbers = {name: torch.as_tensor(x, dtype=torch.float64) for name, x in report.items()}
        return prefixed(_UPDATE, update | gathered) | prefixed(_SCOPE, covered) | prefixed(_REPORT, numbers)

    def shapes_and_masks(self) -> tuple[dict[str, tuple[int, ...]], set[str]]:
        """Every tensor's shape, and of which some client votes on a part only; as all ranks know it."""
        mine: dict[str, Any] = {}
        for who, tree in self.collect.update.items():
            for name in tree.keys() - self.collect.gathered_names:
                masked = self.collect.scope[who].get(name) is not None
                mine[name] = [list(tree[name].shape), masked or (name in mine and mine[name][1])]
        known = self.ranks.gather_json(dict(sorted(mine.items())))
        shapes = {name: tuple(shape) for one in known for name, (shape, _) in one.items()}
        return shapes, {name for one in known for name, (_, masked) in one.items() if masked}

    def gathered_values(self, order: list[int]) -> list[Tree]:
        """What every client made of the tensors that are gathered, at the first rank."""
        names, held = sorted(self.collect.gathered_names), self.collect.update
        if not names:
            return []
        found: dict[int, Tree] = {who: {} for who in order}

        def take(rank: int, name: str, x: Tensor) -> None:
            who, leaf = name.split("/", 1)
            found[int(who)][leaf] = x.to(self.ranks.device)

        mine = {f"{who}/{name}": tree[name] for who, tree in held.items() for name in names}
        self.ranks.bring_to_first(mine, take)
        return [found[who] for who in order]

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
