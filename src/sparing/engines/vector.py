"""The fast engine: the cohort in chunks of K clients at once, sizes counted in closed form, state in a bank.

Several chunks may be under way side by side, each folded into a partial sum of its thread, and several ranks may share
the cohort, each with a sum of its own: the fold is exact, so the result has the same bits. The banks are read and
written by one thread only, chunk by chunk in order.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.context import Ctx, Requirement
from sparing.core.fold import Collect, Fold
from sparing.core.method import Rows
from sparing.core.parcel import Parcel, pick_clients
from sparing.core.round import Server, begin, client_claiming, incoming, mark_met, outgoing, put_back, settle
from sparing.core.threads import intra_op, work_side_by_side
from sparing.core.tree import Tree
from sparing.engines.divergence import Divergence
from sparing.engines.engine import (
    TRAIN_LOSS,
    Evaluation,
    Job,
    LaterSizes,
    Outcome,
    Tally,
    chunks_by_thread,
    cohort_context,
    sizes_of_arrived,
    without_absent,
)
from sparing.engines.evaluation import Wanted, evaluate
from sparing.engines.masked_round import MaskedRound, cohort_of_sum, hidden_losses, open_masked_round
from sparing.engines.outcome import read_later
from sparing.engines.parcel_sizes import download_sizes, join_sizes, upload_sizes
from sparing.engines.ranked_round import RankedRound, clients_of_rank, turn_at_rows, turns_of_others
from sparing.engines.upload_check import check_request, client_to_check
from sparing.ranks.group import Ranks
from sparing.secure_round.one_process import SimulatedNodes

_WHOLE_EVERY = 100
"""Rounds from one in which a secure sum is run whole to the next."""


class SentChunk(NamedTuple):
    """A chunk of clients, and what they have to start with."""

    ctx: Ctx
    down: Parcel
    posted: LaterSizes
    state: Tree
    weigh: int | None  # whose upload is really written
    masked: MaskedRound | None = None


class ReturnedChunk(NamedTuple):
    """What came of it."""

    ctx: Ctx
    posted: LaterSizes
    state: Tree
    returned: LaterSizes
    loss_K: Tensor
    gone_K: Tensor
    stale: Divergence


class Vector:
    def __init__(self, job: Job, bank: Rows, ranks: Ranks | None = None):
        self.job, self.bank, self.ranks = job, bank, ranks
        self.joined = join_sizes(job)
        self.nodes = SimulatedNodes(job.secure.policy, job.seed) if job.secure else None
        self.pace: list[float] = []  # seconds that each rank took for its clients of the last round

    def round(self, server: Server, ids: Tensor, t: int) -> tuple[Server, Outcome]:
        server, outcome = self.start(server, ids, t)
        return server, outcome()

    def start(self, server: Server, ids: Tensor, t: int) -> tuple[Server, Callable[[], Outcome]]:
        """A round, of which the host may know later than its device how it went: that is what is called then."""
        requirements: list[Requirement] | None = None if server.device.type == "cpu" else []
        cohort = cohort_of_sum(self.job, cohort_context(self.job, server, ids, t, requirements))
        with self.job.fleet.blamed():
            try:
                return self.play(server, cohort)
            except Exception:
                read_later(requirements or [], [])()  # what does not hold may be the cause
                raise

    def play(self, server: Server, cohort: Ctx) -> tuple[Server, Callable[[], Outcome]]:
        job, aside = self.joined, self.job.aside
        tally, stale, who = Tally(), Divergence(job.method, server.model), client_to_check(cohort)
        began = time.perf_counter()
        with torch.no_grad(), intra_op(job.within) if job.within > 1 else nullcontext():
            folds = [begin(job.method, server, cohort) for _ in range(aside)]
            free = list(folds)
            taking_part = without_absent(self.job, server, cohort, tally)
            whole = cohort.round % _WHOLE_EVERY == 1
            first = self.ranks is None or self.ranks.is_first
            masked = open_masked_round(job, self.nodes, server, cohort, taking_part, tally, whole and first)
            here = taking_part
            if masked and whole and not first:
                masked.vectors = {}
            if self.ranks:
                here = clients_of_rank(self.ranks, self.bank, server, taking_part)
                tally = tally if first else Tally()  # the first tells of those that are absent
            chunks = list(chunks_by_thread(job, here)) if len(here.ids) else []
            help_others = turns_of_others(server.rows, len(chunks))

            def send(ctx: Ctx) -> SentChunk:
                with turn_at_rows(server.rows):
                    down = outgoing(job.method, server, ctx)
                posted = download_sizes(job.method, server.past, down, ctx)
                if masked:
                    posted = masked.down(posted, ctx)
                return SentChunk(job.timed(ctx, posted), down, posted, self.bank.read(ctx.ids), who, masked)

            def work(sent: SentChunk) -> ReturnedChunk:
                fold = free.pop()
                try:
                    return self.clients(server, fold, sent)
                finally:
                    free.append(fold)

            def take(back: ReturnedChunk) -> None:
                self.bank.write(back.ctx.ids, back.state)
                tally.add(back.ctx, back.posted, back.returned, back.loss_K, back.gone_K)
                stale.merge(back.stale)

            work_side_by_side(map(send, chunks), work, take, aside)
            help_others()
            fold, said = _merge_folds(folds), {}
            if self.ranks:
                ranked = RankedRound(self.ranks, began)
                fold, tally, stale = ranked.join(fold, tally, stale, masked, job.method)
                self.pace = ranked.seconds
            if tally.arrivals:
                if masked:
                    said = {TRAIN_LOSS: masked.close(fold, taking_part)}
                server, report = settle(job.method, server, fold, taking_part, self.job.gradient)
            else:
                server, report = mark_met(server, taking_part), {}
            read = read_later(cohort.workspace.requirements or [], tally.losses, report, stale.report(), said)

        def outcome() -> Outcome:
            with self.job.fleet.blamed():
                return tally.outcome(*read())

        return server, outcome

    def clients(self, server: Server, fold: Fold | Collect, sent: SentChunk) -> ReturnedChunk:
        """They train and write; what arrives is folded in."""
        method, (ctx, down, posted, state, who, masked) = self.joined.method, sent
        stale = Divergence(method, server.model)
        fleet = self.job.fleet
        up, honest, state = client_claiming(stale.watching(method), state, down, self.joined.train, ctx, fleet.claim)
        check_request(method, down, who, ctx)
        returned = upload_sizes(method, up, who, ctx)
        gone_K = masked.gone(ctx) if masked else self.job.gone(ctx, returned)
        if bool(gone_K.any()):
            state = put_back(method, state, honest, gone_K, ctx)
        if not method.blend.lenient:
            fleet.refuse_nan(up, gone_K, ctx)
        if not bool(gone_K.all()):
            got, back, here = down, up, ctx
            if bool(gone_K.any()):
                index = (~gone_K).nonzero()[:, 0]
                got, back, here = pick_clients(down, index), pick_clients(up, index), ctx.at(index)
            incoming(method, server, fold, got, back, here)
            if masked:
                masked.take(got, back, here)
        if masked:
            return ReturnedChunk(ctx, posted, state, partial(masked.up, ctx), hidden_losses(ctx), gone_K, stale)
        return ReturnedChunk(ctx, posted, state, sizes_of_arrived(returned, gone_K), up.notes["loss"], gone_K, stale)

    def evaluate(self, server: Server, t: int, wanted: Wanted) -> Evaluation:
        return evaluate(self.job, self.bank, server, t, wanted, self.ranks)


def _merge_folds(folds: list[Fold | Collect]) -> Fold | Collect:
    first, *others = folds
    for other in others:
        first.merge(other)  # pyright: ignore[reportArgumentType]  they are all of one kind
    return first
