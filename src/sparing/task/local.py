"""Local training of any nn.Module: three paths behind one function."""

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from sparing.core.errors import ConfigError, TrainingError, nearest
from sparing.core.keys import Ctx
from sparing.core.later import Judge, doubt
from sparing.core.mix import Mix
from sparing.core.product import Product
from sparing.core.protocols import Local, Phase
from sparing.core.reduce import total
from sparing.core.threads import intra_op
from sparing.core.tree import Grown, Trained, Tree
from sparing.task.captured import can_capture, captured
from sparing.task.clients import Clients
from sparing.task.implicit import can_imply, implicit, most_visits
from sparing.task.loop import loop
from sparing.task.losses import Loss
from sparing.task.optim import OPTIMISERS, Aside, factor_pairs
from sparing.task.precision import precise
from sparing.task.stacked import stacked
from sparing.task.working import check_names

PATHS = ("loop", "stacked", "implicit")
BUFFERS = ("shared", "own", "static")
SMALL = 100_000
"""Parameters up to which stacking dense layers pays on a CPU."""
VISITS = 150
"""Samples that a client may visit in a phase while implicit training still pays on a CPU.

Measured in batches of 10 and 32, from 64-64-10 to 2048-512-100, clients starting from one model: faster than both other
paths up to 150 visits on one core and on two; on some of these nets slower than one of them from 200 (batches of 32) or
400 visits on (batches of 10). Clients that start from models of their own gain less: in batches of 32, the largest net
lost a tenth to the loop at 100 visits.
"""


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
) -> tuple[Trained, dict[str, Tensor]]:
    """Train clients ctx.ids, each on its own samples, from `start` (leaves `[K, *shape]` or `[1, *shape]`).

    Gives every state_dict tensor after training, `[K, *shape]` on the device of `start`, and `{"loss": [K] float32}`:
    the mean over the samples visited in the last epoch of the last phase (in all its steps, where it counts steps).
    Neither the model handed in nor any global random state changes. `memory` holds velocities to go on from,
    `velocity/NAME` `[K, *shape]`, and is overwritten; without it they start at zero and are forgotten. `anchor` is what
    FedProx's term draws to, where it is not the start; `pull` is added to every gradient of phases that `correct`.

    "loop" trains one client after the other and is row-exact; calls from several threads at once give the same bits.
    "stacked" trains all K at once and agrees with it within rounding. `threads` work on one operation. In both, a
    parameter that the loss does not depend on has gradient zero, so weight decay still shrinks it. "implicit" does the
    same as "stacked" for chains of dense layers under plain SGD (`can_imply`), without forming weights at every step.
    On CUDA, "stacked" with `graph` replays a recorded step where it can (`can_capture`), in float32, "tf32" or "bf16".
    On a CPU, "loop" and "implicit" also train in "bf16": weights stay in float32, factors of products do not.

    >>> data = Clients.of([(torch.ones(3, 2), torch.tensor([0, 1, 1])), (torch.ones(1, 2), torch.tensor([1]))])
    >>> ctx = Ctx(seed=0, round=1, rounds=1, ids=torch.tensor([1]), n=torch.tensor([1]), clients=2, samples=4)
    >>> start, local = {"weight": torch.zeros(1, 2, 2), "bias": torch.zeros(1, 2)}, Local((Phase(epochs=1, lr=0.05),))
    >>> after, notes = train(nn.Linear(2, 2), nn.CrossEntropyLoss(reduction="none"), data, local, start, ctx)
    >>> after["bias"], notes["loss"]
    (tensor([[-0.0250,  0.0250]]), tensor([0.6931]))
    """
    if isinstance(model, Mix):
        return train_apart(model, loss, data, local, start, ctx, path, memory, anchor, pull, precision)
    check(local, path)
    check_names(model, start)
    who = ctx.here[0]
    if not len(who) or int(who.min()) < 0 or int(who.max()) >= len(data):
        raise ConfigError(f"clients to train must be among 0 .. {len(data) - 1}, seen {who.tolist()[:8]}")
    device = next(iter(start.values())).device if start else torch.device("cpu")
    memory = memory if memory is not None else {}
    if not factor_pairs(list(start)):
        local = local._replace(phases=tuple(phase._replace(frobenius=0.0) for phase in local.phases))
    recorded = graph and path == "stacked" and not memory and anchor is None and pull is None
    if recorded and can_capture(local, start):
        with precise(precision):
            out = captured(model, loss, data, local, start, ctx, device, precision)
        if out is not None:
            played, losses = out
            doubt(ctx.doubts, played.peaks, unsound(played.names, local, ctx))
            return played.after, {"loss": losses.to(device, torch.float32, non_blocking=True)}
    half = precision == "bf16"
    if half and device.type == "cuda":
        raise ConfigError(
            "plan.precision is bf16, which on CUDA is for training that can be recorded: path stacked, SGD without "
            "prox, correction or kept velocities, and no BatchNorm where clients take unequal numbers of steps; use "
            "tf32 or float32"
        )
    if half and path == "stacked":
        raise ConfigError("path 'stacked' on a CPU trains in float32, but precision is bf16: use 'loop' or 'implicit'")
    aside = Aside(anchor if anchor is not None else start, pull or {})
    with torch.enable_grad(), precise(precision) if device.type == "cuda" else nullcontext(), intra_op(threads):
        if path == "loop":
            after, losses = loop(model, loss, data, local, start, ctx, device, memory, aside, half)
        elif path == "implicit":
            after, losses = implicit(model, loss, data, local, start, ctx, device, half)
        else:
            after, losses = stacked(model, loss, data, local, start, ctx, device, memory, aside)
        check_finite(after.added if isinstance(after, Grown) else after, local, ctx)
    return after, {"loss": losses.to(device, torch.float32)}


def train_apart(
    model: Mix, loss: Loss, data: Clients, local: Local, start: Tree, ctx: Ctx, path: str,
    memory: Tree | None, anchor: Tree | None, pull: Tree | None, precision: str,
) -> tuple[Tree, dict[str, Tensor]]:  # fmt: skip
    """Each base of each client as if it were a client of its own, with the same batches; the loss is their mean.

    Dropout is drawn for each base apart.
    """
    k, bases = len(ctx.ids), model.bases

    def rows(tree: Tree) -> Tree:
        return {name: x.expand(k, *x.shape[1:]).flatten(0, 1) for name, x in tree.items()}

    apart = ctx.at(torch.arange(k, device=ctx.ids.device).repeat_interleave(bases))
    memory = memory if memory is not None else {}
    remembered, beside = rows(memory), rows(start) if anchor is None else rows(anchor)
    how = (local, rows(start), apart, path, remembered, beside, rows(pull or {}))
    after, notes = train(model.alone(), loss, data, *how, precision)
    for name, x in remembered.items():
        memory[name].copy_(x.unflatten(0, (k, bases)))
    losses = total(notes["loss"].unflatten(0, (k, bases))) / bases
    return {name: x.unflatten(0, (k, bases)) for name, x in after.items()}, {"loss": losses.float()}


def default_path(model: nn.Module, device: torch.device | str, local: Local | None = None, samples: int = 0) -> str:
    """The faster path: "stacked" on CUDA and for small nets without convolutions on a CPU, else "loop".

    "implicit" on a CPU, where it can train the model so, and the client with the most samples visits `VISITS` or fewer
    in a phase.

    >>> default_path(nn.Linear(4, 2), "cpu"), default_path(nn.Conv2d(1, 4, 3), "cpu")
    ('stacked', 'loop')
    >>> default_path(nn.Linear(4, 2), "cpu", Local(), 20), default_path(nn.Linear(4, 2), "cpu", Local(), 2000)
    ('implicit', 'stacked')
    """
    layers = list(model.modules())
    if any(isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)) for layer in layers):
        return "loop"
    if torch.device(device).type == "cuda":
        return "stacked"
    if local is not None and can_imply(model, local) and most_visits(local, samples) <= VISITS:
        return "implicit"
    folds = any(isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for layer in layers)
    return "loop" if folds or sum(p.numel() for p in model.parameters()) > SMALL else "stacked"


def check(local: Local, path: str) -> None:
    if path not in PATHS:
        raise ConfigError(f"no path is called {path!r}: {nearest(path, PATHS)}")
    if local.buffers not in BUFFERS:
        raise ConfigError(f"no policy for buffers is called {local.buffers!r}: {nearest(local.buffers, BUFFERS)}")
    if not local.phases:
        raise ConfigError("local training has no phases: give it one, such as Phase(epochs=1)")
    for i, phase in enumerate(local.phases, 1):
        check_phase(i, phase)


def check_phase(i: int, phase: Phase) -> None:
    if phase.optimiser not in OPTIMISERS:
        raise ConfigError(
            f"phase {i}: no optimiser is called {phase.optimiser!r}: {nearest(phase.optimiser, OPTIMISERS)}"
        )
    for name in ("epochs", "steps", "batch"):
        if getattr(phase, name) is not None and getattr(phase, name) < 1:
            raise ConfigError(f"phase {i}: {name} must be 1 or more, seen {getattr(phase, name)}")
    for name in ("lr", "momentum", "weight_decay", "prox", "frobenius"):
        if not 0 <= getattr(phase, name) < float("inf"):
            raise ConfigError(f"phase {i}: {name} must be 0 or more, seen {getattr(phase, name)}")
    if phase.clip is not None and not phase.clip > 0:
        raise ConfigError(f"phase {i}: clip must be above 0, seen {phase.clip}: leave it out not to clip")


def check_finite(after: Mapping[str, Tensor], local: Local, ctx: Ctx) -> None:
    """The last step's update is not seen by any loss, so look at the weights themselves."""
    for name, x in after.items():
        if isinstance(x, Product) and x.at_most() <= torch.finfo(x.dtype).max:
            continue
        if not x.is_floating_point() or bool(x.sum().isfinite()):  # a sum costs little beside looking at every value
            continue
        if not bool((fine := x.isfinite().flatten(1).all(1)).all()):
            raise infinite(name, int((~fine).nonzero()[0]), local, ctx)


def unsound(names: list[str], local: Local, ctx: Ctx) -> Judge:
    def judge(values: Tensor) -> None:
        for i, k in (~values.isfinite()).nonzero().tolist():
            raise infinite(names[i], k, local, ctx)

    return judge


def infinite(name: str, k: int, local: Local, ctx: Ctx) -> TrainingError:
    lr, clip = local.phases[-1].lr, local.phases[-1].clip
    return TrainingError(
        f"client {int(ctx.here[0][k])}, round {ctx.round}: {name!r} is not finite after the last step (lr {lr:g}, "
        f"clip {clip}): lower lr or set clip"
    )
