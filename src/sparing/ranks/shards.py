"""Whose clients are whose, and rows of clients that lie with their rank: client i with rank i % world."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import SparingError
from sparing.core.threads import deal_by_load
from sparing.core.tree import Tree, cat_trees, take_rows
from sparing.ranks.group import PIECE_BYTES, Ranks
from sparing.storage.bank import ALL_CLIENTS, Bank, Shard


def shard_of(ranks: Ranks) -> Shard:
    return Shard(ranks.rank, ranks.world)


def dealt_by_load(ctx: Ctx, ranks: Ranks) -> Ctx:
    """This rank's part of clients that keep nothing: those with much data are dealt out first, back and forth."""
    return ctx.at(deal_by_load(ctx.n, ranks.world)[ranks.rank].sort().values)


def lying_here(ctx: Ctx, ranks: Ranks) -> Ctx:
    """Those of these clients whose rows lie with this rank."""
    return ctx.at(shard_of(ranks).holds(ctx.ids).nonzero()[:, 0])


class RankRows:
    """A bank, of which every rank has its own clients' rows."""

    def __init__(self, bank: Bank, ranks: Ranks):
        self.bank, self.ranks, self.shard, self.template = bank, ranks, shard_of(ranks), bank.template
        self.mixed = False  # in this turn

    def read(self, ids: Tensor) -> Tree:
        if self.template and not bool(self.shard.holds(ids.cpu()).all()):
            raise SparingError(f"rank {self.ranks.rank} reads rows of other ranks; this is a bug, please report it")
        return self.bank.read(ids)

    def write(self, ids: Tensor, rows: Tree) -> None:
        """Those that lie here; others may be given."""
        here = self.shard.holds(ids.cpu())
        if bool(here.all()):
            self.bank.write(ids, rows)
        elif bool(here.any()):
            index = here.nonzero()[:, 0]
            some = {name: x if x.shape[0] == 1 else x[index.to(x.device)] for name, x in rows.items()}
            self.bank.write(ids[index.to(ids.device)], some)

    def fetch(self, ids: Tensor) -> Tree:
        """Rows of any clients; every rank asks for the same ones."""
        if not self.template:
            return {}
        ids, world = ids.cpu(), self.ranks.world
        rows = cat_trees(self.ranks.gather_trees(self.bank.read(ids[self.shard.holds(ids)])))
        by_rank = torch.cat([Shard(rank, world).holds(ids).nonzero()[:, 0] for rank in range(world)])
        return {name: x.to(self.ranks.device) for name, x in take_rows(rows, by_rank.argsort()).items()}

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Every rank takes as many; in each it may ask for one mix, and helps others to theirs."""
        self.mixed = False
        yield
        if not self.mixed:
            self._stream(torch.empty(0, dtype=torch.int64), torch.empty(0, 0))

    def mix(self, ids: Tensor, weight: Tensor) -> Tree:
        """Rows are added up in the order of clients, as they are where one bank has them all: to the bit."""
        self.mixed = True
        return self._stream(ids.cpu(), weight.double().cpu())

    def _stream(self, ids: Tensor, weight: Tensor) -> Tree:
        """All rows that some rank needs pass, a few at a time."""
        used = ids[(weight != 0).any(0)] if len(ids) else ids
        wanted = torch.tensor(sorted({i for some in self.ranks.gather_json(used.tolist()) for i in some}))
        place = {int(who): m for m, who in enumerate(ids.tolist())}
        size = sum(x.nbytes for x in self.template.values())
        out = {name: torch.zeros(len(weight), *x.shape[1:], dtype=x.dtype) for name, x in self.template.items()}
        for some in wanted.split(max(1, PIECE_BYTES // max(1, size))):
            if not len(some):
                break
            rows = {name: x.cpu() for name, x in self.fetch(some).items()}
            for m, who in enumerate(some.tolist()):
                column = weight[:, place[who]] if who in place else weight.new_zeros(0)
                for k in column.nonzero()[:, 0].tolist():
                    for name, x in out.items():
                        x[k].add_(rows[name][m], alpha=float(column[k]))
        return {name: x.to(self.ranks.device) for name, x in out.items()}

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def state(self) -> Tree:
        """Everybody's rows, or where they stand, at the first rank; nothing at the others."""
        parts: list[Tree] = [{} for _ in range(self.ranks.world)]

        def take(rank: int, name: str, x: Tensor) -> None:
            parts[rank][name] = x

        self.ranks.bring_to_first(self.bank.state(), take)
        if not self.ranks.is_first or not parts[0]:
            return {}
        layout = {"layout": parts[0]["layout"]} if "layout" in parts[0] else {}
        files = [torch.full_like(part["ids"], rank) for rank, part in enumerate(parts)]
        whole = {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0] if name != "layout"}
        return whole | layout | ({"files": torch.cat(files)} if layout else {})

    def committed(self) -> None:
        self.ranks.wait_for_all()
        self.bank.committed()

    def restore(self, saved: Tree, shard: Shard = ALL_CLIENTS) -> None:
        """Of everybody's rows those that lie here."""
        self.bank.restore(saved, self.shard)

    def close(self) -> None:
        self.bank.close()


class FetchedRows:
    """All rows, for whoever asks on every rank alike."""

    def __init__(self, rows: RankRows):
        self.rows = rows

    def read(self, ids: Tensor) -> Tree:
        return self.rows.fetch(ids)

    def write(self, ids: Tensor, rows: Tree) -> None:
        raise SparingError("rows that were fetched cannot be written; this is a bug, please report it")

    def mix(self, ids: Tensor, weight: Tensor) -> Tree:
        with self.rows.turn():
            return self.rows.mix(ids, weight)
