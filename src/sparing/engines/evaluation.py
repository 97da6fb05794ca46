"""Evaluation, the same for every engine. It reads the bank and changes nothing."""

import torch
from torch import Tensor

from sparing.core.round import Server
from sparing.core.tree import Tree, under
from sparing.engines.engine import Evaluation, Job, Rows, context
from sparing.task.evaluate import evaluate as evaluate_rows
from sparing.task.evaluate import evaluate_all


def evaluate(job: Job, bank: Rows, server: Server, ids: Tensor) -> Evaluation:
    """The global model on the global test set; the own models of clients `ids` on their own test samples."""
    task, static = job.task, job.method.local.buffers == "static"
    accuracy, loss, nobody = float("nan"), float("nan"), torch.zeros(0)
    if task.test_all is not None:
        whole = evaluate_all(job.model, task.loss, server.model, *task.test_all, static=static)
        accuracy, loss = whole["accuracy"], whole["loss"]
    if task.test is None:
        return Evaluation(accuracy, loss, ids[:0], nobody)
    ids = ids[task.test.count[ids] > 0]
    own = [
        evaluate_rows(job.model, task.loss, own_models(job, bank, server, part), task.test, part, static=static)
        for part in ids.split(job.chunk)
    ]
    return Evaluation(accuracy, loss, ids, torch.cat([r["accuracy"].cpu() for r in own]) if own else nobody)


def own_models(job: Job, bank: Rows, server: Server, ids: Tensor) -> Tree:
    """What each client holds now: its own tensors, the server's for the rest.

    A client never met would first be sent whatever is shared, so it is given the server's values there.
    """
    ctx = context(job, server, ids, t=0)
    shared = job.method.share.down(server.share, server.model, ctx)
    models = dict(server.model)
    for name, own in under("own", bank.read(ctx.ids)).items():
        new = ctx.first.reshape(-1, *[1] * (own.dim() - 1)) if ctx.first is not None else None
        models[name] = torch.where(new, server.model[name], own) if name in shared and new is not None else own
    return models
