"""The library's rounds with training replaced by given moves, so that a reference can make the same ones."""

from typing import NamedTuple

import numpy as np
import torch

from sparing.core.context import Ctx, context
from sparing.core.method import Trained
from sparing.core.parcel import Parcel, pick_clients
from sparing.core.round import Server, begin, client, first_client, first_server, incoming, outgoing, put_back, settle
from sparing.core.tree import cat_trees, expand_rows, take_rows
from support import numbers


class Round(NamedTuple):
    ctx: Ctx
    down: Parcel
    up: Parcel
    server: Server  # afterwards
    report: dict


def play(method, model, moves, counts, samples=None, lost=(), losses=None):
    """One call a round for the whole cohort. `moves[t]` is {client: {name: array}}; the upload of (t, k) in `lost` is.

    Gives (rounds, states): the state of a client, leaves [1, ...], by id.
    """
    server = first_server(method, model, len(counts))
    states, played = {}, []
    for t, cohort in enumerate(moves):
        ids = sorted(cohort)
        n = torch.tensor([counts[k] for k in ids])
        everyone = samples or sum(counts)
        first = ~server.seen[torch.tensor(ids)]
        ctx = context(7, t + 1, len(moves), ids, n, len(counts), everyone, len(ids), first)

        def train(lesson, ctx, t=t, cohort=cohort):
            who = ctx.ids.tolist()
            added = {x: torch.tensor(np.stack([cohort[k][x] for k in who]), dtype=torch.float32) for x in lesson.start}
            loss = torch.tensor([losses[t][k] if losses else 0.0 for k in who], dtype=torch.float32)
            after = {x: old + added[x] for x, old in lesson.start.items()}
            return Trained(after, lesson.memory, {"loss": loss})

        state = cat_trees([states.get(k, expand_rows(first_client(method, model), 1)) for k in ids])
        down = outgoing(method, server, ctx)
        up, state = client(method, state, down, train, ctx)
        gone = torch.tensor([(t, k) in lost for k in ids])
        state = put_back(method, state, up, gone, ctx)
        fold, here = begin(method, server, ctx), (~gone).nonzero()[:, 0]
        incoming(method, server, fold, pick_clients(down, here), pick_clients(up, here), ctx.at(here))
        server, report = settle(method, server, fold, ctx)
        states |= {k: take_rows(state, slice(i, i + 1)) if len(ids) > 1 else state for i, k in enumerate(ids)}
        played.append(Round(ctx, down, up, server, numbers(report)))
    return played, states
