"""How models do on one client's own test samples, by letter: the model goes down, sums and counts come back.

A letter's body is a byte for whose model is looked at, then one parcel. Nothing of the client's state changes.
"""

import math
import struct
from enum import IntEnum
from typing import NamedTuple

from sparing.core.context import Ctx
from sparing.core.download import parcel_about
from sparing.core.errors import DataError, WireError
from sparing.core.parcel import Leaf, Parcel, Schema, Spec
from sparing.core.round import Server, outgoing, schema_down, starting_model, train_locally
from sparing.core.tree import Tree, under
from sparing.engines.engine import Job
from sparing.engines.evaluation import is_static, tuned_job
from sparing.net.letter import MOST_SAMPLES
from sparing.train.evaluate import evaluate_rows
from sparing.wire import from_bytes, to_bytes

_SCORES = struct.Struct("<Qdd")
SCORE_BYTES = _SCORES.size


class Whose(IntEnum):
    """Whose model: the server's, or the client's before or after a round of local training."""

    GLOBAL, BEFORE, AFTER = 0, 1, 2


class ClientScores(NamedTuple):
    """Sums over a client's test samples."""

    samples: int
    hits: float
    loss: float


def are_secret(job: Job) -> bool:
    """Whether clients give no scores, which get no noise, because they promise that all that leaves them has some."""
    return job.method.privacy is not None and job.method.privacy.mode != "central"


def write_model(job: Job, server: Server, whose: Whose, ctx: Ctx) -> bytes:
    """The body of a letter to one client (K = 1)."""
    if whose == Whose.GLOBAL:
        down = Parcel({name: Leaf(server.model[name]) for name in _global_names(job)}, {})
    else:
        down = outgoing(job.method, server, ctx)
    return bytes([whose]) + to_bytes(down, 0, _about(ctx))


def _global_names(job: Job) -> list[str]:
    """What the server has of the model: not what a method has put beside it that stays with the clients."""
    method = job.method
    return [name for name in method.layout.shapes if name not in method.layout.extra & method.share.private]


def scores_of_client(job: Job, state: Tree, body: bytes, ctx: Ctx) -> bytes:
    """What goes back."""
    if not body or body[0] not in Whose._value2member_map_:
        raise WireError("this letter asks for no model that can be evaluated; install the same sparing on both sides")
    if job.task.test is None:
        raise DataError(f"client {int(ctx.ids[0])} has no test samples; give it some, or evaluate on the server alone")
    whose = Whose(body[0])
    if whose == Whose.GLOBAL:
        layout = job.method.layout
        leaves = {name: Spec(layout.shapes[name], layout.dtypes[name]) for name in _global_names(job)}
        got = from_bytes(memoryview(body)[1:], Schema(leaves, {}, _about(ctx)))
        model, whole = job.model, job.network({name: leaf.value for name, leaf in got.leaves.items()})
    else:
        expected = schema_down(job.method, job.initial, ctx)._replace(about=_about(ctx))
        start = starting_model(job.method, state, from_bytes(memoryview(body)[1:], expected), ctx)
        if whose == Whose.AFTER:
            how = tuned_job(job)
            start = dict(train_locally(how.method.local, how.train, start, under("local", state), ctx).after)
        model, whole = job.model_for(ctx), job.used(start)
    got = evaluate_rows(
        model, job.task.loss, whole, job.task.test, ctx.ids, is_static(job), job.training.runner, job.task.metrics
    )
    count = int(got["count"][0])
    return _SCORES.pack(count, count * float(got["accuracy"][0]), count * float(got["loss"][0]))


def read_scores(body: bytes, hits_told: bool) -> ClientScores:
    """What a client says; a WireError where it cannot be. `hits_told`: the task has an accuracy, else hits are NaN."""
    if len(body) != SCORE_BYTES:
        raise WireError(f"scores of {len(body)} bytes, where {SCORE_BYTES} are sent")
    scores = ClientScores(*_SCORES.unpack(body))
    no_hits = scores.hits != scores.hits and not hits_told
    sound = no_hits or 0 <= scores.hits <= scores.samples * (1 + 1e-9)
    if not sound or scores.samples > MOST_SAMPLES or not math.isfinite(scores.loss):
        raise WireError(f"scores that cannot be: {scores.hits:g} hits of {scores.samples}, loss {scores.loss:g}")
    return scores


def _about(ctx: Ctx) -> str:
    return f"{parcel_about(ctx)}/evaluate"
