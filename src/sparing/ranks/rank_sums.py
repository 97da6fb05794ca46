"""What a round's clients came to on every rank, made the whole round's on each of them.

Sums of the fold lie on one grid, so adding them over ranks is exact. Blends that need everyone at once are worked out
by the first rank, to which updates are brought one tensor at a time.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.fold import Collect, Fold
from sparing.core.method import Blended, Method
from sparing.core.roster import Roster
from sparing.core.tree import Tree, prefixed, under
from sparing.core.votes import Votes
from sparing.ranks.group import Ranks

_UPDATE, _SCOPE, _REPORT = "update", "scope", "report"


def add_up_fold(ranks: Ranks, fold: Fold, method: Method) -> Fold:
    """The fold of all ranks' arrivals, in the place of this one's."""
    known = ranks.gather_json({name: _described(x, fold.votes[name]) for name, x in fold.sums.items()})
    shapes: dict[str, list[int]] = {}
    for one in known:
        shapes |= {name: said["shape"] for name, said in one.items() if name not in shapes}
    zeros = {name: torch.zeros(shape, dtype=torch.float64, device=ranks.device) for name, shape in shapes.items()}
    fold.sums = dict(zip(shapes, ranks.add_up([fold.sums.get(name, x) for name, x in zeros.items()]), strict=True))
    _add_up_votes(ranks, fold, known)
    join_rosters(ranks, fold.roster, method)
    if fold.uniform is not None:
        add_up_fold(ranks, fold.uniform, method)
    return fold


def _described(x: Tensor, votes: Votes) -> dict[str, Any]:
    mask = "" if votes.mask is None else hashlib.sha256(votes.mask.cpu().contiguous().numpy().tobytes()).hexdigest()
    return {"shape": list(x.shape), "mask": mask, "dense": votes.dense is not None}


def _add_up_votes(ranks: Ranks, fold: Fold, known: list[dict[str, Any]]) -> None:
    """Names on which all voters share one mask keep a number; of the others, the weight behind each coordinate."""
    votes = {name: fold.votes.setdefault(name, Votes()) for name in fold.sums}
    said = {name: [one[name] for one in known if name in one] for name in votes}
    plain = [name for name, some in said.items() if not any(s["dense"] for s in some)]
    alike = [name for name in plain if len({s["mask"] for s in said[name]}) == 1]
    apart = [name for name in votes if name not in alike]
    nothing = torch.zeros((), dtype=torch.float64)
    totals = [nothing if votes[name].total is None else votes[name].total.cpu().double() for name in alike]  # type: ignore[union-attr]
    for name, total in zip(alike, ranks.add_up(totals), strict=True):
        held = votes[name].total
        votes[name].total = total.to(ranks.device if held is None else held.device)
    lacked = [name for name in alike if said[name][0]["mask"] and len(said[name]) < ranks.world]
    holds = {name: next(rank for rank, one in enumerate(known) if name in one) == ranks.rank for name in lacked}
    masks = [
        votes[name].mask.int() if holds[name] else torch.zeros_like(fold.sums[name], dtype=torch.int32)  # type: ignore[union-attr]
        for name in lacked
    ]
    for name, mask in zip(lacked, ranks.add_up(masks), strict=True):
        votes[name].mask = mask.bool()
    for name, dense in zip(apart, ranks.add_up([votes[n].spread(fold.sums[n]) for n in apart]), strict=True):
        votes[name].dense = dense


def join_rosters(ranks: Ranks, roster: Roster, method: Method) -> None:
    """Everybody's arrivals, of which what goes into rows of clients stays with their rank."""
    kept = tuple(f"{i}/{s.serving.keep}/" for i, s in enumerate(method.blend.steps) if s.serving and s.serving.keep)
    mine: Tree = {"ids": torch.tensor(roster.ids, dtype=torch.int64)}
    if roster.parts:
        mine["share"] = torch.cat([share_K.cpu() for share_K, _ in roster.parts])
        mine |= prefixed("seen", {n: torch.cat([seen[n] for _, seen in roster.parts]) for n in roster.parts[0][1]})
    small = {name: x for name, x in mine.items() if not kept or not name.removeprefix("seen/").startswith(kept)}
    own = {name.removeprefix("seen/"): x for name, x in mine.items() if name not in small}
    refused, parts = ranks.gather_json(roster.refused), ranks.gather_trees(small)
    shapes = ranks.gather_json({name: [str(x.dtype).removeprefix("torch."), *x.shape[1:]] for name, x in own.items()})
    elsewhere = {name: said for one in shapes for name, said in one.items()}
    roster.ids, roster.parts, roster.refused = [], [], sum(refused)
    on_host = not method.blend.weigh.looks
    for rank, part in enumerate(parts):
        if not len(part["ids"]):
            continue
        roster.ids += part["ids"].tolist()
        seen = {name: x.to(ranks.device) for name, x in under("seen", part).items()}
        for name, (dtype, *shape) in elsewhere.items():
            empty = torch.zeros(len(part["ids"]), *shape, dtype=getattr(torch, dtype), device=ranks.device)
            seen[name] = own[name] if rank == ranks.rank else empty
        roster.parts.append((part["share"] if on_host else part["share"].to(ranks.device), seen))


class CollectOfRanks:
    """Updates of all ranks' arrivals, at the first rank, which works out the blend for all."""

    def __init__(self, ranks: Ranks, collect: Collect, method: Method):
        self.ranks, self.collect, self.roster = ranks, collect, collect.roster
        ranks.bring_to_first(_updates_as_tree(collect), _taken_into(collect))
        join_rosters(ranks, collect.roster, method)

    def mean(self, ctx: Ctx) -> Blended:
        """As `Collect.mean`, on every rank."""
        said: Tree = {}
        if self.ranks.is_first:
            found = self.collect.mean(ctx)
            covered = {name: x for name, x in found.covered.items() if x is not None}
            report = {name: torch.as_tensor(x, dtype=torch.float64) for name, x in found.report.items()}
            said = prefixed(_UPDATE, found.update) | prefixed(_SCOPE, covered) | prefixed(_REPORT, report)
        said = {name: x.to(self.ranks.device) for name, x in self.ranks.said_by_first(said).items()}
        ids, weight, seen = self.roster.in_order(ctx)
        update, report = under(_UPDATE, said), under(_REPORT, said)
        masks = dict.fromkeys(update) | dict(under(_SCOPE, said))
        return Blended(update, masks, ids, ctx.placed(weight), seen, report=report)


def _updates_as_tree(collect: Collect) -> Tree:
    updates = {f"{who}/{_UPDATE}/{name}": x for who, tree in collect.update.items() for name, x in tree.items()}
    masks = {f"{who}/{_SCOPE}/{name}": m for who, tree in collect.scope.items() for name, m in tree.items()}
    return updates | {name: m for name, m in masks.items() if m is not None}


def _taken_into(collect: Collect) -> Callable[[int, str, Tensor], None]:
    def take(rank: int, name: str, x: Tensor) -> None:
        if rank == 0:
            return
        who, what, leaf = name.split("/", 2)
        place = next(iter(collect.update.values()), {}).get(leaf, x).device
        held = collect.update if what == _UPDATE else collect.scope
        held.setdefault(int(who), {})[leaf] = x.to(place)
        collect.scope.setdefault(int(who), {})

    return take
