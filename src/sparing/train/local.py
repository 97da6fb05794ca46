"""Local training of any nn.Module: one function for every path."""

import torch
from torch import Tensor, nn

from sparing.core.context import Ctx
from sparing.core.errors import ConfigError, nearest_name
from sparing.core.method import Local, Phase
from sparing.core.reduce import total
from sparing.core.tree import Models, Tree
from sparing.data.clients import Clients
from sparing.parts.size.mixture import Mix
from sparing.train.call import PathCall
from sparing.train.losses import Loss
from sparing.train.optim import factor_pairs
from sparing.train.paths import path_called
from sparing.train.pieces import WHOLE, StepPieces
from sparing.train.torch_optimisers import check_optimiser
from sparing.train.working_copy import check_names

BUFFERS = ("shared", "own", "static")


def train(
    model: nn.Module,
    loss: Loss,
    data: Clients,
    local: Local,
    start: Tree,
    ctx: Ctx,
    path: str = "loop",
    memory: Tree | None = None,
    anchor: Tree | None = None,
    pull: Tree | None = None,
    precision: str = "float32",
    graph: bool = False,
    threads: int = 1,
    pieces: StepPieces = WHOLE,
) -> tuple[Models, dict[str, Tensor]]:
    """Train clients ctx.ids, each on its own samples, from `start` (leaves `[K, *shape]` or `[1, *shape]`).

    Gives every state_dict tensor after training, `[K, *shape]` on the device of `start`, and `{"loss": [K] float32}`:
    the mean over the samples visited in the last epoch of the last phase (in all its steps, where it counts steps).
    Neither the model handed in nor any global random state changes. `memory` holds velocities to go on from,
    `velocity/NAME` `[K, *shape]`, and is overwritten; without it they start at zero and are forgotten. `anchor` is what
    FedProx's term draws to, where it is not the start; `pull` is added to every gradient of phases that `correct`.

    "loop" trains one client after the other and is row-exact; calls from several threads at once give the same bits.
    Other paths are registered (`train.paths`) and agree with it within rounding. `threads` work on one operation; with
    `graph`, a path may replay a recorded step; paths that train one client after the other may take a step in `pieces`.
    A parameter that the loss does not depend on has gradient zero, so
    weight decay still shrinks it.

    >>> data = Clients.of([(torch.ones(3, 2), torch.tensor([0, 1, 1])), (torch.ones(1, 2), torch.tensor([1]))])
    >>> from sparing.core.context import context
    >>> ctx = context(seed=0, round=1, rounds=1, ids=torch.tensor([1]), n=torch.tensor([1]), clients=2, samples=4)
    >>> start, local = {"weight": torch.zeros(1, 2, 2), "bias": torch.zeros(1, 2)}, Local((Phase(epochs=1),))
    >>> after, notes = train(nn.Linear(2, 2), nn.CrossEntropyLoss(reduction="none"), data, local, start, ctx)
    >>> after["bias"], notes["loss"]
    (tensor([[-0.0500,  0.0500]]), tensor([0.6931]))
    """
    if isinstance(model, Mix):
        return _train_bases(PathCall(model, loss, data, local, start, ctx, memory or {}, anchor, pull, precision), path)
    chosen = path_called(path)
    check_local(local)
    check_names(model, start)
    _check_clients(data, ctx)
    if not factor_pairs(list(start)):
        local = local._replace(phases=tuple(phase._replace(frobenius=0.0) for phase in local.phases))
    local = local._replace(phases=tuple(phase.at(ctx) for phase in local.phases))
    memory = memory if memory is not None else {}
    lesson = PathCall(model, loss, data, local, start, ctx, memory, anchor, pull, precision, graph, threads, pieces)
    after, losses = chosen.train(lesson)
    return after, {"loss": losses.to(lesson.device, torch.float32)}


def _train_bases(lesson: PathCall, path: str) -> tuple[Tree, dict[str, Tensor]]:
    """Each base of each client as if it were a client of its own, with the same batches; the loss is their mean.

    Dropout is drawn for each base apart.
    """
    model, ctx, memory = lesson.model, lesson.ctx, lesson.memory
    assert isinstance(model, Mix)
    k, bases = len(ctx.ids), model.bases

    def rows(tree: Tree) -> Tree:
        return {name: x.expand(k, *x.shape[1:]).flatten(0, 1) for name, x in tree.items()}

    apart = ctx.at(torch.arange(k, device=ctx.device).repeat_interleave(bases))
    remembered = rows(memory)
    after, notes = train(
        model.alone(), lesson.loss, lesson.data, lesson.local, rows(lesson.start), apart, path,
        remembered, rows(lesson.aside.anchor), rows(lesson.aside.pull), lesson.precision,
    )  # fmt: skip
    for name, x in remembered.items():
        memory[name].copy_(x.unflatten(0, (k, bases)))
    losses = total(notes["loss"].unflatten(0, (k, bases))) / bases
    return {name: x.unflatten(0, (k, bases)) for name, x in after.items()}, {"loss": losses.float()}


def _check_clients(data: Clients, ctx: Ctx) -> None:
    who = ctx.ids
    if not len(who) or int(who.min()) < 0 or int(who.max()) >= len(data):
        raise ConfigError(f"clients to train must be among 0 .. {len(data) - 1}, seen {who.tolist()[:8]}")


def check_local(local: Local) -> None:
    if local.buffers not in BUFFERS:
        raise ConfigError(f"no policy for buffers is called {local.buffers!r}: {nearest_name(local.buffers, BUFFERS)}")
    if not local.phases:
        raise ConfigError("local training has no phases: give it one, such as Phase(epochs=1)")
    for i, phase in enumerate(local.phases, 1):
        _check_phase(i, phase)


def _check_phase(i: int, phase: Phase) -> None:
    how = phase.optimiser
    check_optimiser(how, f"phase {i}: ")
    for name in ("epochs", "steps", "batch"):
        if getattr(phase, name) is not None and getattr(phase, name) < 1:
            raise ConfigError(f"phase {i}: {name} must be 1 or more, seen {getattr(phase, name)}")
    rates = {"lr": how.lr, "momentum": how.momentum, "weight_decay": how.weight_decay}
    for name, value in {**rates, "prox": phase.prox, "frobenius": phase.frobenius}.items():
        if not 0 <= value < float("inf"):
            raise ConfigError(f"phase {i}: {name} must be 0 or more, seen {value}")
    if how.clip is not None and not how.clip > 0:
        raise ConfigError(f"phase {i}: clip must be above 0, seen {how.clip}: leave it out not to clip")
