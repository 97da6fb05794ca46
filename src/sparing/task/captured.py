"""Local training of a chunk of clients on a GPU as a CUDA graph: one step, recorded once and replayed.

All that a step reads and writes stays at its place in memory, so a replay needs nothing from the host: which step it
is stands in a tensor, samples are gathered and dropout is drawn on the device. Dense layers in which a client visits
few samples are trained as in `task.implicit`: the weights are formed once, at the end.
"""

import threading
from importlib.util import find_spec
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from sparing.core.keys import Ctx
from sparing.core.product import Product
from sparing.core.protocols import Local, Phase
from sparing.core.tree import Grown, Tree
from sparing.task.augment import augmented
from sparing.task.clients import Clients
from sparing.task.dataset import prepared
from sparing.task.losses import Loss, each
from sparing.task.optim import Beside, Memory, factor_pairs, fresh, is_plain, update
from sparing.task.schedule import Plan, in_order, plan_of, reported
from sparing.task.stacked import refuse_unstackable
from sparing.task.working import trained, working_copy

VISITS = 256
"""Samples that the kernels of dense layers can look back on."""
KEPT = 8
"""Recordings kept for a model."""


def can_capture(local: Local, start: Tree) -> bool:
    """Whether all that a step does can be replayed: SGD in float32 on CUDA, steered by nothing from the side."""
    plain = all(p.optimiser == "sgd" and not p.prox and not p.correct and not p.holds for p in local.phases)
    here = all(x.is_cuda and x.dtype != torch.float64 for x in start.values())
    return plain and here and len(start) > 0 and find_spec("triton") is not None


def captured(
    model: nn.Module, loss: Loss, data: Clients, local: Local, start: Tree, ctx: Ctx, device: torch.device,
    precision: str,
) -> tuple[Grown, Tensor] | None:  # fmt: skip
    """The models after training and the reported losses `[K]`; None where clients differ too much to train in step."""
    plans = [plan_of(data, phase, number, ctx, device) for number, phase in enumerate(local.phases)]
    if not all(in_step(model, phase, plan) for phase, plan in zip(local.phases, plans, strict=True)):
        return None
    after, losses, state = Grown({}, {}), torch.zeros(len(ctx.ids)), start
    for number, (phase, plan) in enumerate(zip(local.phases, plans, strict=True)):
        state = state | dict(after)
        with TURN:
            record = recording(model, loss, data, local, phase, plan, state, device, precision)
            after, seen = record.play(state, plan)
        losses = reported(seen.double().cpu(), plan, phase, number, ctx)
    return after, losses


def in_step(model: nn.Module, phase: Phase, plan: Plan) -> bool:
    """Whether those who have finished early can stay in the batch: all finish together, or zeros move nobody."""
    even = all(m == len(plan.order) for m in plan.alive)
    return even or (
        is_plain(phase) and not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules())
    )


RECORDS: "WeakKeyDictionary[nn.Module, dict[Any, Recording]]" = WeakKeyDictionary()
TURN = threading.Lock()
"""A recording has one place for everything, so it plays for one caller at a time."""


def recording(
    model: nn.Module, loss: Loss, data: Clients, local: Local, phase: Phase, plan: Plan, state: Tree,
    device: torch.device, precision: str,
) -> "Recording":  # fmt: skip
    """The one that fits, made if there is none yet."""
    known = RECORDS.setdefault(model, {})
    steps = roomy(len(plan.alive))
    even = all(plan.full) and set(plan.width) == {plan.places.shape[2]} and plan.alive[-1] == len(plan.order)
    rows = tuple((name, x.shape[0]) for name, x in state.items())
    key = (loss, data, phase, local.buffers, steps, even, len(plan.order), rows, device, precision)
    if key not in known:
        while len(known) >= KEPT:
            known.pop(next(iter(known)))
        known[key] = Recording(
            model, loss, data, phase, local.buffers == "static", plan, steps, not even, state, device, precision
        )
    return known[key]


def roomy(steps: int) -> int:
    """Rounded up a little, so that a few recordings serve all clients.

    >>> [roomy(n) for n in (1, 5, 9, 17, 100)]
    [1, 5, 10, 20, 112]
    """
    unit = 1 << max(0, steps.bit_length() - 3)
    return -(-steps // unit) * unit


class Dense(NamedTuple):
    """A dense layer whose weights are not formed."""

    weight: Tensor  # [1 or K, out, in] at the start
    inputs: Tensor  # [K, visits, in]
    moves: Tensor  # [K, visits, out], zero where nothing was visited yet


class Recording:
    """One step of K clients with places of its own for everything."""

    def __init__(
        self, model: nn.Module, loss: Loss, data: Clients, phase: Phase, static: bool, plan: Plan, steps: int,
        padded: bool, state: Tree, device: torch.device, precision: str,
    ) -> None:  # fmt: skip
        from sparing.task.gpu.layers import quicken, used_once

        self.work = working_copy(model, device, stacked=True, static=static)
        refuse_unstackable(self.work.module)
        self.loss, self.data, self.phase = loss, data, phase
        self.half = torch.bfloat16 if precision == "bf16" else torch.float32
        self.names = trained(self.work, phase)
        k, width = len(plan.order), plan.places.shape[2]
        visits = steps * width
        once = used_once(self.work.module, prepared(data.x[:2]).to(device)) if is_plain(phase) else set()
        self.past = quicken(self.work.module, precision)
        self.dense = {
            name: Dense(
                torch.zeros(state[f"{name}.weight"].shape, dtype=self.half, device=device),
                torch.zeros(k, visits, layer.in_features, dtype=self.half, device=device),
                torch.zeros(k, visits, layer.out_features, dtype=self.half, device=device),
            )
            for name, layer in self.work.module.named_modules()
            if isinstance(layer, nn.Linear) and name in once and self.pays(name, layer, visits)
        }
        skipped = {f"{name}.weight" for name in self.dense}
        self.names = [name for name in self.names if name not in skipped]
        self.rows = {
            name: torch.empty(k, *x.shape, dtype=x.dtype, device=device)
            for name, x in self.work.state.items()
            if name not in skipped
        }
        self.memory: Memory = fresh(phase, [self.rows[name] for name in self.names])
        self.t = torch.zeros(1, dtype=torch.int64, device=device)
        self.places = torch.zeros(steps, k, width, dtype=torch.int64, device=device)
        self.real = torch.ones(steps, k, width, dtype=torch.bool, device=device) if padded else None
        self.keys, self.views = (torch.zeros(steps, k, dtype=torch.int64, device=device) for _ in range(2))
        self.seen = torch.zeros(steps, k, device=device)
        self.pairs = factor_pairs(self.names)
        self.probes = {
            n: torch.zeros(k, width, d.moves.shape[2], dtype=self.half, device=device) for n, d in self.dense.items()
        }
        self.slots = torch.arange(width, device=device)
        self.buffers = [name for name, x in self.work.state.items() if not isinstance(x, nn.Parameter)]
        self.shared = {name: torch.zeros_like(self.rows[name][0]) for name in self.names if state[name].shape[0] == 1}
        self.load(state, plan)
        self.first, self.later = self.record(first=True), self.record(first=False)

    def pays(self, name: str, layer: nn.Linear, visits: int) -> bool:
        whole = list(self.work.alias.values()).count(f"{name}.weight") == 1 and f"{name}.weight" in self.names
        small = visits * (layer.in_features + layer.out_features) < layer.in_features * layer.out_features
        return whole and small and visits <= VISITS

    def record(self, first: bool) -> torch.cuda.CUDAGraph:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                self.t.zero_()
                self.step(first)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        self.t.zero_()
        with torch.cuda.graph(graph):
            self.step(first)
        return graph

    def load(self, state: Tree, plan: Plan) -> None:
        order = plan.order.to(self.t.device)
        even = in_order(plan)
        for name, x in self.rows.items():
            x.copy_(state[name] if state[name].shape[0] == 1 or even else state[name][order])
        for name, x in self.shared.items():
            x.copy_(state[name][0])
        for name, dense in self.dense.items():
            weight = state[f"{name}.weight"]
            dense.weight.copy_(weight if weight.shape[0] == 1 or even else weight[order])
            dense.moves.zero_()
            dense.inputs.zero_()  # what another run left there may not be finite
        for tensors in self.memory.values():
            for x in tensors:
                x.zero_()
        steps = len(plan.alive)
        self.places[:steps].copy_(plan.places)
        self.keys[:steps].copy_(plan.keys)
        if self.data.augment:
            self.views[:steps].copy_(plan.views)
        if self.real is not None:
            self.real[:steps].copy_(plan.real)
        self.t.zero_()

    def play(self, state: Tree, plan: Plan) -> tuple[Grown, Tensor]:
        """All steps of these clients: the models after, in the order of ctx.ids; the losses `[S, K]` in the plan's."""
        self.load(state, plan)
        self.first.replay()
        for _ in plan.alive[1:]:
            self.later.replay()
        back = None if in_order(plan) else plan.order.argsort().to(self.t.device)
        added = {name: (self.rows[name] if back is None else self.rows[name][back]) - state[name] for name in self.rows}
        for name, dense in self.dense.items():
            moves, inputs = (x if back is None else x[back] for x in (dense.moves, dense.inputs))
            added[f"{name}.weight"] = Product(
                *(x.clone() if x.dtype == torch.float32 else x.float() for x in (moves, inputs))
            )
        added = {name: added[own] for name, own in self.work.alias.items()}
        start = {name: state[own] for name, own in self.work.alias.items()}
        return Grown(start, added), self.seen[: len(plan.alive)].clone()

    def step(self, first: bool) -> None:
        """One step; in the first, whoever starts from the same weights computes with them together."""
        at = self.places.index_select(0, self.t)[0]
        real = None if self.real is None else self.real.index_select(0, self.t)[0]
        keys = self.keys.index_select(0, self.t)[0]
        samples = prepared(self.data.x[at])
        if self.data.augment:
            samples = augmented(samples, self.views.index_select(0, self.t)[0], self.data.augment)
        grads, moves, values, saw, changed = self.differentiated(
            samples, self.data.y[at], real, keys, self.shared if first else {}
        )
        params = [self.rows[name] for name in self.names]
        update(self.phase, 0, params, grads, Beside([], [], []), self.memory, self.pairs, stacked=True)
        slots = self.slots + self.t * len(self.slots)
        for name, dense in self.dense.items():
            dense.moves.index_copy_(1, slots, (moves[name] * -self.phase.lr).to(self.half))
            dense.inputs.index_copy_(1, slots, saw[name])
        for name, x in changed.items():
            self.rows[name].copy_(x)
        self.seen.index_copy_(0, self.t, values[None].float())
        self.t.add_(1)

    def differentiated(self, x: Tensor, y: Tensor, real: Tensor | None, keys: Tensor, shared: Tree) -> tuple:
        work, past = self.work, self.past

        def forward(
            params: Tree,
            probes: Tree,
            rest: Tree,
            weights: Tree,
            pasts: dict,
            x: Tensor,
            y: Tensor,
            real: Any,
            key: Any,
        ) -> tuple[Tensor, tuple[Tree, Tree]]:
            work.step.begin(key, real)
            past.of = {name: (*pasts[name], probes[name]) for name in pasts}
            past.saw = {}
            state = {n: v if n in self.buffers else v.to(self.half) for n, v in {**params, **rest}.items()} | weights
            samples = x.to(self.half) if x.is_floating_point() else x
            losses = each(self.loss, functional_call(work.module, state, (samples,)).float(), y)
            total = losses.mean() if real is None else torch.where(real, losses, 0.0).sum() / real.sum().clamp(min=1)
            return total, ({n: v.detach() for n, v in past.saw.items()}, {n: state[n].detach() for n in self.buffers})

        params = {name: shared.get(name, self.rows[name]) for name in self.names}
        alike = {name: None if name in shared else 0 for name in self.names}
        rest = {name: v for name, v in self.rows.items() if name not in params}
        weights = {f"{name}.weight": d.weight for name, d in self.dense.items()}
        own = {name: w if w.shape[0] > 1 else w[0] for name, w in weights.items()}
        where = {name: 0 if w.shape[0] > 1 else None for name, w in weights.items()}
        pasts = {name: (d.inputs, d.moves) for name, d in self.dense.items()}
        axes: Any = (alike, 0, 0, where, 0, 0, 0, None if real is None else 0, 0)
        with torch.enable_grad():
            one: Any = grad_and_value(forward, argnums=(0, 1), has_aux=True)
            (grads, moves), (values, (saw, changed)) = vmap(one, in_dims=axes, randomness="error")(
                params, self.probes, rest, own, pasts, x, y, real, keys
            )
        work.step.begin(None)
        return [grads[name] for name in self.names], moves, values, saw, changed
