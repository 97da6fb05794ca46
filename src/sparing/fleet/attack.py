"""Simulated attackers: a fixed share of the clients, to test blends against.

label-flip    they train on wrong labels, y -> classes - 1 - y
sign-flip     they send -scale times their update
scaled        they send scale times their update, as if to replace the model
nan           they send no numbers at all

They train, remember and are evaluated like everybody else; only what they train on, or what they say, is wrong.
"""

import copy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.context import EVERYONE, Ctx, context
from sparing.core.errors import ConfigError, TrainingError
from sparing.core.keys import hashes
from sparing.core.parcel import Parcel
from sparing.core.tree import Models, Tree, column
from sparing.data.dataset import IGNORED
from sparing.tasks.task import Task


class Attack(NamedTuple):
    kind: str
    who: Tensor  # bool [N]
    scale: float = 10.0

    def claim(self, start: Tree, after: Models, ctx: Ctx) -> Models:
        """What these K clients say they have learned; counters are left alone."""
        bad_K = self.who[ctx.ids]
        if self.kind == "label-flip" or not bool(bad_K.any()):
            return after
        floats = {name: x for name, x in after.items() if x.is_floating_point()}
        bad_K = ctx.placed(bad_K)
        said = {name: torch.where(column(bad_K, x), self.said(start[name], x), x) for name, x in floats.items()}
        return {**after, **said}

    def lies(self, client: int) -> bool:
        """Whether what this client sends is made up."""
        return self.kind != "label-flip" and bool(self.who[client])

    def refuse_nan(self, parcel: Parcel, gone_K: Tensor, ctx: Ctx) -> None:
        """Stop at an attacker whose upload holds something that is no number, unless it is gone."""
        if self.kind != "nan":
            return
        who = self.who[ctx.ids] & ~gone_K.cpu()
        for k in who.nonzero()[:, 0].tolist():
            sent = [x for leaf in parcel.leaves.values() for x in (leaf.value, leaf.scale) if x is not None]
            rows = [x[min(k, x.shape[0] - 1)] for x in sent if x.is_floating_point()]
            if not all(bool(x.isfinite().all()) for x in rows):
                client = int(ctx.ids[k])
                raise self.stopped(f"round {ctx.round}: client {client} sent no numbers")

    def stopped(self, what: str) -> TrainingError:
        return TrainingError(
            f"{what}; it is a simulated attacker (fleet.attack.kind: {self.kind}), and this blend takes every upload: "
            "use one that leaves such out (median, trimmed-mean, geomed, krum, norm-bound), or drop fleet.attack"
        )

    def said(self, start: Tensor, after: Tensor) -> Tensor:
        if self.kind == "nan":
            return torch.full_like(after, torch.nan)
        factor = self.scale if self.kind == "scaled" else -self.scale
        return start + factor * (after - start)


def choose_attackers(seed: int, clients: int, share: float, held_out: Tensor) -> Tensor:
    """Who attacks, the whole run through: bool `[N]`, a share of the clients that train, chosen by key.

    >>> choose_attackers(seed=0, clients=10, share=0.2, held_out=torch.tensor([3])).nonzero()[:, 0]
    tensor([0, 9])
    """
    who, trains = torch.zeros(clients, dtype=torch.bool), torch.ones(clients, dtype=torch.bool)
    trains[held_out] = False
    ids = trains.nonzero()[:, 0]
    count = int(share * len(ids) + 0.5)
    if count < 1:
        raise ConfigError(f"fleet.attack.share is {share} of {len(ids)} clients, which is nobody; raise it")
    words = hashes(context(seed, 0, 0, [EVERYONE], [EVERYONE], clients, 0).keys("attackers"), clients)[0]
    who[ids[words[ids].argsort()[:count]]] = True
    return who


def with_flipped_labels(task: Task, who: Tensor) -> Task:
    """The same task, in which these clients train on labels turned around; nobody's test samples change."""
    data = task.train
    if data.y.is_floating_point():
        raise ConfigError("fleet.attack.kind is label-flip, but the targets are no classes; use another kind")
    seen = [data.y, *(x.y for x in (task.test, task.validation) if x is not None)]
    seen += [task.test_all[1]] if task.test_all is not None else []
    last, y = max(int(labels.max()) for labels in seen if labels.numel()), data.y.clone()
    for i in who.nonzero()[:, 0].tolist():
        span = slice(int(data.start[i]), int(data.start[i]) + int(data.count[i]))
        y[span] = torch.where(y[span] == IGNORED, y[span], last - y[span])
    other = copy.copy(task)
    other.train = replace(data, y=y)
    return other
