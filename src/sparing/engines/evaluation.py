"""Evaluation, the same for every engine: who is evaluated, on what. It reads the bank and changes nothing.

global    the server's model, on everyone's test samples together and on each client's own
before    the model a client would start the next round from, on its own test samples
after     that model after a round of local training, or tuned as the method says, which is then thrown away
new       the same for clients held out of training, after a few local steps
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.method import Rows
from sparing.core.round import Server, starting_models, train_locally
from sparing.core.threads import work_side_by_side
from sparing.core.tree import Tree, cat_trees, under
from sparing.engines.engine import Evaluation, Job, Marks, chunks_by_thread, chunks_of_size, cohort_context
from sparing.engines.ranked_round import join_marks, keeps_rows, score_on_ranks, turn_at_rows, turns_of_others
from sparing.ranks.group import Ranks
from sparing.ranks.shards import lying_here
from sparing.tasks.task import Task
from sparing.train.evaluate import evaluate_all, evaluate_rows, score_here
from sparing.train.named_metrics import ACCURACY
from sparing.train.precision import multiplying_as


class Wanted(NamedTuple):
    """What an evaluation looks at."""

    ids: Tensor  # [m] clients whose models are looked at
    who: tuple[str, ...] = ("global", "before")
    steps: int = 10  # of local training for new clients


def evaluate(job: Job, bank: Rows, server: Server, t: int, wanted: Wanted, ranks: Ranks | None = None) -> Evaluation:
    """The federation after round t, as exactly as it trains; `ranks` share the work."""
    with multiplying_as(job.precision):
        return _evaluate_models(job, bank, server, t, wanted, ranks)


def _evaluate_models(job: Job, bank: Rows, server: Server, t: int, wanted: Wanted, ranks: Ranks | None) -> Evaluation:
    task = job.task
    whole = {"accuracy": float("nan"), "loss": float("nan"), "auc": float("nan")}
    if task.test_all is not None:
        model = job.network(server.model)
        how = (is_static(job), job.training.runner, task.metrics, score_on_ranks(ranks) if ranks else score_here)
        whole = evaluate_all(job.model, task.loss, model, *task.test_all, *how)
    marks: dict[str, Marks] = {}
    if task.test is not None:
        ids = wanted.ids[task.test.count[wanted.ids] > 0]
        new = task.held_out[task.test.count[task.held_out] > 0]
        for who in wanted.who:
            cohort = cohort_context(job, server, new if who == "new" else ids, t + 1)
            if len(cohort.ids):
                marks[who] = _marks_of(job, bank, server, cohort, who, wanted.steps, ranks)
    asked = {name: whole.get(name, float("nan")) for name in asked_for(task)}
    return Evaluation(whole["accuracy"], whole["loss"], whole["auc"], marks, asked)


def asked_for(task: Task) -> list[str]:
    """Names of the metrics that stand beside accuracy."""
    return [one.name for one in task.metrics if one != ACCURACY]


Start = tuple[Ctx, Tree, Tree]
"""Some clients, their models, and what they remember of their training."""


def _marks_of(job: Job, bank: Rows, server: Server, cohort: Ctx, who: str, steps: int, ranks: Ranks | None) -> Marks:
    """These clients' models: chunks train side by side, where they train."""
    trains = who in ("after", "new")
    needs_rows = trains or bool(job.method.share.own) or server.rows is not None
    found: list[Marks] = []

    def start(ctx: Ctx) -> Start:
        if who == "global":
            return ctx, server.model, {}
        state = bank.read(ctx.ids) if needs_rows else {}
        with turn_at_rows(server.rows):
            return ctx, starting_models(job.method, server, state, ctx), under("local", state)

    def train(start: Start) -> Start:
        ctx, models, memory = start
        how = tuned_job(job) if who == "after" else _job_in_steps(tuned_job(job), steps)
        return ctx, dict(train_locally(how.method.local, how.train, models, memory, ctx).after), {}

    def mark(trained: Start) -> None:
        assert job.task.test is not None
        (ctx, models, _), ids = trained, trained[0].ids
        model, whole = (job.model, job.network(models)) if who == "global" else (job.model_for(ctx), job.used(models))
        how = (is_static(job), job.training.runner, job.task.metrics)
        got = evaluate_rows(model, job.task.loss, whole, job.task.test, ids, *how)
        asked = {name: got[name] for name in asked_for(job.task)}
        found.append(Marks(ids, got["count"], got["accuracy"], got["loss"], got["auc"], server.seen[ids], asked))

    def chunked(ctx: Ctx) -> list[Ctx]:
        if not len(ctx.ids):
            return []
        return list(chunks_by_thread(job, ctx) if trains else chunks_of_size(ctx, job.chunk, job.method.fit))

    with torch.no_grad():
        if ranks is None:
            chunks = chunked(cohort)
        elif who != "global" and needs_rows and keeps_rows(bank, server):
            chunks = chunked(lying_here(cohort, ranks))
        else:
            chunks = chunked(cohort)[ranks.rank :: ranks.world]
        help_others = turns_of_others(server.rows if who != "global" else None, len(chunks))
        work_side_by_side(map(start, chunks), train if trains else _untrained, mark, job.aside if trains else 1)
        help_others()
    return _marks_in_order(found if ranks is None else join_marks(ranks, found))


def _untrained(start: Start) -> Start:
    return start


def tuned_job(job: Job) -> Job:
    """The same job, training as the method wants its models tuned."""
    local = job.method.local
    phases = local.tune(local.phases) if local.tune else local.phases
    return job._replace(method=job.method._replace(local=local._replace(phases=phases)))


def _job_in_steps(job: Job, steps: int) -> Job:
    """The same job with so many local steps in all, of its first phase: where the head comes first, of the head."""
    local = job.method.local
    phases = (local.phases[0]._replace(steps=steps),)
    wraps = tuple(w._replace(phases=tuple(p._replace(steps=steps) for p in w.phases[:1])) for w in local.wraps)
    return job._replace(method=job.method._replace(local=local._replace(phases=phases, wraps=wraps)))


def is_static(job: Job) -> bool:
    return job.method.local.buffers == "static"


def _marks_in_order(parts: list[Marks]) -> Marks:
    """All parts, in id order."""
    columns = cat_trees([{**part._asdict(), "asked": part.ids, **part.asked} for part in parts])
    order = columns["ids"].argsort()
    columns = {name: x[order] for name, x in columns.items()}
    asked = {name: columns[name] for name in parts[0].asked}
    return Marks(**{name: columns[name] for name in Marks._fields if name != "asked"}, asked=asked)
