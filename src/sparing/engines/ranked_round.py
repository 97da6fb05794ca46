"""A round that several ranks play: each trains its part of the clients, and all of them come to the same outcome."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.fold import Arrived, Collect, Fold
from sparing.core.method import Method, Rows
from sparing.core.round import Server
from sparing.core.tree import Tree, cat_trees, prefixed, under
from sparing.engines.divergence import Divergence
from sparing.engines.engine import Marks, Tally
from sparing.engines.masked_round import MaskedRound
from sparing.ranks.group import Ranks
from sparing.ranks.rank_collect import CollectOfRanks
from sparing.ranks.rank_sums import add_up_fold
from sparing.ranks.shards import RankRows, dealt_by_load, lying_here
from sparing.train.evaluate import Score, Scores, Spread


def clients_of_rank(ranks: Ranks, bank: Rows, server: Server, ctx: Ctx) -> Ctx:
    """Who of these trains on this rank: those whose rows lie there, or where nothing is kept of them, some."""
    return lying_here(ctx, ranks) if keeps_rows(bank, server) else dealt_by_load(ctx, ranks)


def keeps_rows(bank: Rows, server: Server) -> bool:
    return server.rows is not None or (isinstance(bank, RankRows) and bool(bank.template))


def turn_at_rows(rows: Rows | None) -> AbstractContextManager[None]:
    """In which clients may be served from rows that lie on other ranks."""
    return rows.turn() if isinstance(rows, RankRows) else nullcontext()


def turns_of_others(rows: Rows | None, mine: int) -> Callable[[], None]:
    """Before this rank takes so many turns at rows; what this gives helps others in those that they take after it."""
    if not isinstance(rows, RankRows):
        return lambda: None
    left = max(rows.ranks.gather_json(mine)) - mine

    def help_others() -> None:
        for _ in range(left):
            with rows.turn():
                pass

    return help_others


class RankedRound:
    """What all ranks have to tell each other once their clients are done."""

    def __init__(self, ranks: Ranks, began: float):
        self.ranks, self.seconds = ranks, ranks.gather_json(time.perf_counter() - began)

    def join(
        self, fold: Fold | Collect, tally: Tally, stale: Divergence, masked: MaskedRound | None, method: Method
    ) -> tuple[Arrived, Tally, Divergence]:
        ranks = self.ranks
        if masked:
            join_masked(ranks, masked)
        whole = join_tallies(ranks, tally)
        joined = join_folds(ranks, fold, method) if whole.arrivals else fold
        return joined, whole, join_divergences(ranks, stale)


def join_masked(ranks: Ranks, masked: MaskedRound) -> None:
    """Losses of all clients in the sum; where the first rank runs it whole, it gets their vectors."""
    losses = [some.items() for some in ranks.gather_json(masked.losses)]
    masked.losses = {int(who): loss for some in losses for who, loss in some}

    def take(rank: int, name: str, x: Tensor) -> None:
        if rank:
            masked.add(int(name), x.numpy())

    vectors = {str(who): torch.from_numpy(vector) for who, vector in (masked.vectors or {}).items()}
    ranks.bring_to_first(vectors, take)


def join_folds(ranks: Ranks, fold: Fold | Collect, method: Method) -> Arrived:
    """What arrived on all ranks together."""
    return add_up_fold(ranks, fold, method) if isinstance(fold, Fold) else CollectOfRanks(ranks, fold, method)


def join_divergences(ranks: Ranks, stale: Divergence) -> Divergence:
    if not stale.names:
        return stale
    size = sum(stale.model[name][0].numel() for name in stale.names)
    nothing = torch.zeros(2, size, dtype=torch.float64, device=ranks.device)
    sums = ranks.add_up([nothing if stale.sums is None else stale.sums])[0]
    stale.count = sum(ranks.gather_json(stale.count))
    stale.sums = sums if stale.count else None
    return stale


def join_tallies(ranks: Ranks, tally: Tally) -> Tally:
    """The rows of all clients of the round, wherever they trained."""
    whole = Tally()
    for part in ranks.gather_trees(_tally_as_tree(tally)):
        if part:
            plain = {name: part[name] for name in ("ids", "n", "arrived")}
            down, up = under("down", part), under("up", part)
            whole.parts.append(plain)
            whole.losses.append(part["loss"])
            whole.sizes.append(((lambda down=down: down), (lambda up=up: up)))
    return whole


def _tally_as_tree(tally: Tally) -> Tree:
    rows = []
    for part, loss, (down, up) in zip(tally.parts, tally.losses, tally.sizes, strict=True):
        k = len(part["ids"])
        row = dict(part) | {"loss": loss.detach().cpu()}
        row |= prefixed("down", {kind: x.expand(k) for kind, x in down().items()})
        rows.append(row | prefixed("up", {kind: x.expand(k) for kind, x in up().items()}))
    return cat_trees(rows) if rows else {}


def join_marks(ranks: Ranks, found: list[Marks]) -> list[Marks]:
    """The marks of all ranks."""
    asked = [prefixed("asked", part.asked) | _plain_marks(part) for part in found]
    parts = ranks.gather_trees(cat_trees(asked) if asked else {})
    return [
        Marks(**{name: part[name] for name in Marks._fields if name != "asked"}, asked=under("asked", part))
        for part in parts
        if part
    ]


def _plain_marks(part: Marks) -> dict[str, Any]:
    return {name: x for name, x in part._asdict().items() if name != "asked"}


def score_on_ranks(ranks: Ranks) -> Spread:
    """Batches of one evaluation shared out over ranks."""

    def spread(batches: list[Tensor], score: Score) -> list[Scores]:
        mine = range(ranks.rank, len(batches), ranks.world)
        named = {i: score(batches[i])._asdict() for i in mine}
        tree = {f"{i}/{name}": x for i, one in named.items() for name, x in one.items()}
        all_of_them = {name: x for part in ranks.gather_trees(tree) for name, x in part.items()}
        return [
            Scores(**{name: all_of_them[f"{i}/{name}"].to(ranks.device) for name in Scores._fields})
            for i in range(len(batches))
        ]

    return spread
