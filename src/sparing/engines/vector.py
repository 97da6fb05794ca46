"""The fast engine: the cohort in chunks of K clients at once, sizes counted in closed form, state in a bank."""

import torch
from torch import Tensor

from sparing.core.download import downloads
from sparing.core.parcel import pick
from sparing.core.protocols import Rows
from sparing.core.round import Server, begin, client, incoming, met, outgoing, put_back, settle
from sparing.core.wire import sizes
from sparing.engines.engine import Evaluation, Job, Outcome, Tally, bytes_in, chunks, context
from sparing.engines.evaluation import Wanted, evaluate
from sparing.engines.stale import Stale


class Vector:
    def __init__(self, job: Job, bank: Rows):
        self.job, self.bank = job, bank

    def round(self, server: Server, ids: Tensor, t: int) -> tuple[Server, Outcome]:
        method = self.job.method
        cohort = context(self.job, server, ids, t)
        fold, tally, stale = begin(method, server, cohort), Tally(), Stale(method, server.model)
        train = stale.watching(self.job.train)
        with torch.no_grad():
            for ctx in chunks(cohort, self.job.chunk, method.fit):
                down = outgoing(method, server, ctx)
                _, posted = downloads(server.past, down, ctx)
                ctx = self.job.timed(ctx, posted)
                up, state = client(method, self.bank.read(ctx.ids), down, train, ctx, self.job.fleet.claim)
                returned = sizes(up)
                gone_K = self.job.fleet.gone(ctx, bytes_in(returned))
                if bool(gone_K.any()):
                    state = put_back(method, state, up, gone_K, ctx)
                if not bool(gone_K.any()):
                    incoming(method, server, fold, down, up, ctx)
                elif not bool(gone_K.all()):
                    here = (~gone_K).nonzero()[:, 0]
                    incoming(method, server, fold, pick(down, here), pick(up, here), ctx.at(here))
                self.bank.write(ctx.ids, state)
                tally.add(ctx, posted, returned, up.notes["loss"], gone_K)
            if tally.arrivals:
                server, report = settle(method, server, fold, cohort, self.job.gradient)
            else:
                server, report = met(server, cohort), {}
        return server, tally.outcome(report | stale.report())

    def evaluate(self, server: Server, t: int, wanted: Wanted) -> Evaluation:
        return evaluate(self.job, self.bank, server, t, wanted)
