"""The secure sum of a simulated round: who is in it, what it costs, and where it is run whole, the sum itself."""

import math
import threading
import warnings

import numpy as np
import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import SparingError
from sparing.core.fold import Arrived, Fold
from sparing.core.grid import Grid
from sparing.core.parcel import Parcel, parcel_row
from sparing.core.round import Server, begin, outgoing
from sparing.engines.engine import Job, LaterSizes, Sizes, Tally
from sparing.secure_round.one_process import OneProcessSum, SimulatedNodes
from sparing.secure_round.planned_sum import SECURE_KINDS, plan_sum
from sparing.secure_round.sum_layout import sum_layout
from sparing.secure_round.sum_notice import notice_bytes
from sparing.secure_round.summands import RoundSum, client_vector, fold_sum, pool_fold, pooled_loss

_ROUNDING = 1e-4
"""Of sums, by the largest of them; a sum from which a mask was not removed is wrong by far more."""


class MaskedRound:
    """`whole`: every message is written and read; else their lengths are counted, and the fold adds up in the open."""

    def __init__(self, job: Job, nodes: SimulatedNodes, server: Server, cohort: Ctx, here: Ctx, whole: bool):
        assert job.secure is not None
        self.method, self.server = job.method, server
        total, first = self.method.blend.weigh.most(cohort), (here if len(here.ids) else cohort).at(slice(0, 1))
        self.sent = outgoing(self.method, server, first)
        layout = sum_layout(self.method, self.sent, total, first)
        self.sums, ids = RoundSum(layout, Grid(server.limits, total), total), cohort.ids.tolist()
        terms = job.secure.terms(nodes.run, cohort.round, 1, ids, layout.size, layout.bits)
        lost = here.ids[job.fleet.gone(here, torch.tensor(0))].tolist()
        self.plan = plan_sum(terms, notice_bytes(len(ids), len(layout.leaves)), here.ids.tolist(), lost)
        if self.plan.fails:
            warnings.warn(f"round {cohort.round} counts for nobody: {self.plan.fails}", stacklevel=2)
        self.protocol = OneProcessSum(self.plan, nodes) if whole else None
        self.losses: dict[int, float] = {}
        self.vectors: dict[int, np.ndarray] | None = None  # of clients here, where another rank runs the sum whole
        self.one_at_a_time = threading.Lock()  # chunks may be under way side by side
        self.plain = True  # whether all updates are tensors of torch's own; an accelerator rounds sums of others apart

    def gone(self, ctx: Ctx) -> Tensor:
        """Who of these K clients is not in the sum."""
        return torch.tensor([bool(self.plan.fails) or who not in self.plan.survivors for who in ctx.ids.tolist()])

    def down(self, sizes: LaterSizes, ctx: Ctx) -> LaterSizes:
        """What is sent to these K clients, with what is sent for the sum."""
        return lambda: {kind: x.expand(len(ctx.ids)) for kind, x in sizes().items()} | self.plan.down(ctx.ids.tolist())

    def up(self, ctx: Ctx) -> Sizes:
        """What these K clients send in place of their parcels."""
        return self.plan.up(ctx.ids.tolist())

    def take(self, got: Parcel, up: Parcel, ctx: Ctx) -> None:
        """What K clients, all of whom are in the sum, have got and would have sent."""
        self.plain &= all(type(leaf.value) is Tensor for leaf in up.leaves.values())
        for k, who in enumerate(ctx.ids.tolist()):
            self.losses[who] = float(up.notes["loss"][min(k, len(up.notes["loss"]) - 1)])
            if self.protocol is not None or self.vectors is not None:
                alone = ctx.at(slice(k, k + 1))
                vector = client_vector(self.method, self.sums, parcel_row(got, k), parcel_row(up, k), alone)
                self.add(who, vector)

    def add(self, who: int, vector: np.ndarray) -> None:
        with self.one_at_a_time:
            if self.protocol is not None:
                self.protocol.upload(who, vector)
            elif self.vectors is not None:
                self.vectors[who] = vector

    def unmask(self, fold: Arrived, here: Ctx) -> float:
        """Fold in the sum; gives the mean loss."""
        assert self.protocol is not None
        assert isinstance(fold, Fold)
        return fold_sum(self.method, self.sums, fold, self.protocol.unmasked(), self.sent, self.survivors(here))

    def close(self, fold: Arrived, here: Ctx) -> float:
        """Leave of a fold in the open what the sum would tell; if both are there, they must be the same."""
        assert isinstance(fold, Fold)
        loss = pooled_loss(self.losses, self.survivors(here))
        pool_fold(self.method, fold, self.survivors(here))
        if self.protocol is not None:
            summed = begin(self.method, self.server, here)
            assert isinstance(summed, Fold)
            also = self.unmask(summed, here)
            same = summed.sums.keys() == fold.sums.keys()
            if not same or not all(self.is_same(x, fold.sums[name]) for name, x in summed.sums.items()) or also != loss:
                raise SparingError(
                    f"round {here.round}: the secure sum differs from the fold; this is a bug, please report it"
                )
        return loss

    def is_same(self, masked: Tensor, summed: Tensor) -> bool:
        if self.plain:
            return torch.equal(masked, summed)
        return bool((masked - summed).abs().max() <= _ROUNDING * summed.abs().max())

    def survivors(self, here: Ctx) -> Ctx:
        return here.at((~self.gone(here)).nonzero()[:, 0])


def cohort_of_sum(job: Job, cohort: Ctx) -> Ctx:
    """The same; but nobody, where they are too few for the secure sum that is asked for."""
    n = len(cohort.ids)
    why = job.secure.why_too_few(n) if job.secure and n else ""
    if not why:
        return cohort
    warnings.warn(f"round {cohort.round} asks nobody: {why}", stacklevel=2)
    return cohort.at(slice(0, 0))


def open_masked_round(
    job: Job, nodes: SimulatedNodes | None, server: Server, cohort: Ctx, here: Ctx, tally: Tally, whole: bool
) -> MaskedRound | None:
    """The secure sum of a round, where there is one; the tally has the absent clients of the cohort so far."""
    if nodes is None or not len(cohort.ids):
        return None
    masked = MaskedRound(job, nodes, server, cohort, here, whole)
    _tell_absent_of_sum(tally, masked.plan.notice_length)
    return masked


def _tell_absent_of_sum(tally: Tally, notice_length: int) -> None:
    """Add to what absent clients were sent that they were told of the sum."""
    for i, (down, up) in enumerate(tally.sizes):
        found, back = down(), up()
        told = notice_length if sum(int(x.sum()) for x in found.values()) else 0
        extra = {kind: torch.tensor([told if kind == "keys" else 0]) for kind in SECURE_KINDS}
        zeros = {kind: torch.zeros_like(x) for kind, x in extra.items()}
        tally.sizes[i] = (lambda found=found | extra: found), (lambda back=back | zeros: back)


def hidden_losses(ctx: Ctx) -> Tensor:
    """Of K clients whose loss went into the sum."""
    return torch.full((len(ctx.ids),), math.nan)
