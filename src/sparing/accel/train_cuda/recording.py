"""One step of K clients on a GPU, recorded as a CUDA graph: all that it reads and writes stays at its place in memory.

A replay needs nothing from the host: which step it is stands in a tensor, samples are gathered and dropout is drawn on
the device. What is trained stands in one row of numbers, so that it is rounded and moved by one operation. Dense layers
in which a client visits few samples are trained as in `train_cpu.implicit`: their weights are formed once, at the end.
"""

from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from sparing.accel.grown import Grown
from sparing.accel.keyed_classes import stacked_copy
from sparing.accel.lazy_product import Product
from sparing.accel.train_cuda.sheet import Played, StepSheet, as_read, names_in_place, unmoved
from sparing.accel.train_stacked.schedule import StepTable
from sparing.accel.train_stacked.stacked import lent_apart, lent_names, refuse_unstackable
from sparing.core.method import Phase
from sparing.core.ops import place
from sparing.core.tree import Tree, column
from sparing.data.dataset import to_network_input
from sparing.train.call import PathCall
from sparing.train.losses import batch_mean, cross_entropy, in_float32, sample_losses, sample_weights
from sparing.train.optim import Beside, Memory, factor_pairs, fresh_memory, is_plain_sgd, update_params
from sparing.train.working_copy import trained_names

VISITS = 256
"""Samples that the kernels of dense layers can look back on."""


SHORT = 8
"""Steps that are recorded together."""


class UnformedDense(NamedTuple):
    """A dense layer whose weights are not formed."""

    weight: Tensor  # [1 or K, out, in] at the start
    inputs: Tensor  # [K, visits, in]
    moves: Tensor  # [K, visits, out], zero where nothing was visited yet
    probe: Tensor  # [K, B, out] zeros, whose gradient is that of the output


class Recording:
    """Room for K clients and so many steps; the table and the state only say what they look like."""

    def __init__(
        self, lesson: PathCall, phase: Phase, table: StepTable, k: int, steps: int, padded: bool, state: Tree
    ) -> None:
        from sparing.accel.train_cuda.kernels.decay import MOST
        from sparing.accel.train_cuda.kernels.layers import kernel_weights, quicken, used_once

        data, device, precision = lesson.data, lesson.device, lesson.precision
        assert isinstance(data.x, Tensor)
        self.work = stacked_copy(lesson.model, device, lesson.static)
        refuse_unstackable(self.work.module)
        self.loss, self.phase, self.k, self.steps, self.padded = lesson.loss, phase, k, steps, padded
        self.half = torch.bfloat16 if precision == "bf16" else torch.float32
        self.width = table.places.shape[2]
        self.plain = is_plain_sgd(phase._replace(frobenius=0.0))
        once = used_once(self.work.module, to_network_input(data.x[:2]).to(device)) if self.plain else set()
        self.past = quicken(self.work.module, precision)
        names, visits = trained_names(self.work, phase), steps * self.width
        self.dense = {
            name: UnformedDense(
                torch.zeros(_room_for(state[f"{name}.weight"], k), dtype=self.half, device=device),
                torch.zeros(k, visits, layer.in_features, dtype=self.half, device=device),
                torch.zeros(k, visits, layer.out_features, dtype=self.half, device=device),
                torch.zeros(k, self.width, layer.out_features, dtype=self.half, device=device),
            )
            for name, layer in self.work.module.named_modules()
            if isinstance(layer, nn.Linear) and name in once and self.pays(name, layer, visits, names)
        }
        skipped = [f"{name}.weight" for name in self.dense]
        kept = {name: x for name, x in self.work.state.items() if name not in skipped}
        names = [name for name in names if name not in skipped]
        right = {names[b] for _, b in factor_pairs(names)} if phase.frobenius else set()
        odd = {name: kept[name].numel() * k % 8 > 0 for name in names}
        names.sort(key=lambda name: (name not in right, odd[name]))  # so that most begin at a multiple of 16 bytes
        self.plain &= not right or (not padded and all(len(kept[name]) <= MOST for name in right))
        self.shapes = {name: kept[name].shape for name in names}
        self.moved = [*names, *skipped]
        lent = lent_names(self.work, lesson.local.phases, state) - kernel_weights(self.work.module)
        self.lent = lent & {name for name in kept if name not in names}
        self.in_place = self.lent & names_in_place(lesson.model, state)
        self.others = {
            name: state[name]
            if name in self.in_place
            else torch.zeros(1 if name in lent else k, *x.shape, dtype=x.dtype, device=device)
            for name, x in kept.items()
            if name not in names
        }
        self.buffers = [name for name in self.others if not isinstance(kept[name], nn.Parameter)]
        total = sum(shape.numel() for shape in self.shapes.values())
        self.flat, self.added = (torch.zeros(k * total, device=device) for _ in range(2))
        self.near = self.flat if self.half == torch.float32 else torch.zeros_like(self.flat, dtype=self.half)
        self.base = {name: torch.zeros(_room_for(state[name], k), device=device) for name in names}
        rows = list(self.rows(self.flat).values())
        self.memory: Memory = fresh_memory(phase, rows)
        self.pairs = factor_pairs(names) if phase.frobenius else []
        self.sheet = StepSheet(data, self.width, k, steps, padded, device)
        self.t = self.past.step = self.sheet.t
        self.given: list[Any] = []
        self.peaks = torch.zeros(len(self.shapes) + len(self.dense), k, dtype=torch.float64, device=device)
        self.load(state, table)
        self.whole: dict[int, torch.cuda.CUDAGraph] = {}
        self.first = self.sheet.record(self.begin)
        self.later = self.sheet.record(self.step)
        self.last = self.sheet.record(self.end)

    def pays(self, name: str, layer: nn.Linear, visits: int, names: list[str]) -> bool:
        whole = list(self.work.alias.values()).count(f"{name}.weight") == 1 and f"{name}.weight" in names
        small = visits * (layer.in_features + layer.out_features) < layer.in_features * layer.out_features
        return whole and small and visits <= VISITS

    def rows(self, flat: Tensor) -> Tree:
        """What is trained, `[K, *shape]` each, as it stands in such a row; channels of convolutions stand last."""
        parts = flat.split([self.k * shape.numel() for shape in self.shapes.values()])
        return {
            name: part.view(self.k, shape[0], *shape[2:], shape[1]).movedim(-1, 2)
            if len(shape) == 4
            else part.view(self.k, *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def differences(self, flat: Tensor) -> Tree:
        """The same for what was added, in the usual order of axes."""
        parts = flat.split([self.k * shape.numel() for shape in self.shapes.values()])
        return {name: part.view(self.k, *shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def load(self, state: Tree, table: StepTable) -> None:
        """Everything that the host brings for these clients."""
        k = table.order.shape[0]
        order = None if table.ordered else place(table.order, self.t.device)

        def fill(rooms: Tree) -> None:
            into = [x if x.shape[0] in (1, k) else x[:k] for x in rooms.values()]
            given = [state[name] for name in rooms]
            if order is not None:
                given = [x if x.shape[0] == 1 else x[order] for x in given]
            if into:
                torch._foreach_copy_(into, given)  # pyright: ignore[reportPrivateImportUsage]

        fill(self.base | {name: x for name, x in self.others.items() if name not in self.in_place})
        fill({f"{name}.weight": dense.weight for name, dense in self.dense.items()})
        self.sheet.load(table)

    def play(self, state: Tree, table: StepTable) -> Played:
        """All steps of these clients."""
        for product in (product() for product in self.given):
            if product is not None:  # somebody still has what is overwritten now
                product.left, product.right = product.left.clone(), product.right.clone()
        graphs = self.graphs(len(table.alive))
        self.load(state, table)
        for graph in graphs:
            graph.replay()
        steps, k = len(table.alive), table.order.shape[0]
        visits = steps * self.width
        back = slice(k) if table.ordered else place(table.order.argsort(), self.t.device)
        added = self.differences(self.added.clone())
        if k < self.k or not table.ordered:
            added = {name: x[back] for name, x in added.items()}
        added |= {name: x[back] - state[name] for name, x in self.others.items() if name not in self.lent}
        added |= {name: unmoved(k, state[name], name in self.work.params) for name in self.lent}
        peaks = self.peaks[:, back].clone()
        for (name, dense), peak_K in zip(self.dense.items(), peaks[len(self.shapes) :], strict=True):
            added[f"{name}.weight"] = Product(dense.moves[back, :visits], dense.inputs[back, :visits], peak_K)
        self.given = [ref(added[f"{name}.weight"]) for name in self.dense]
        added = {name: added[own] for name, own in self.work.alias.items()}
        start = {name: state[own] for name, own in self.work.alias.items()}
        return Played(Grown(start, added), *self.sheet.told(table), self.moved, peaks)

    def graphs(self, steps: int) -> list[torch.cuda.CUDAGraph]:
        """All of it, in one graph where steps are few: starting a graph takes time too. Recording changes the rows."""
        if steps > SHORT:
            return [self.first, *[self.later] * steps, self.last]
        if steps not in self.whole:
            self.whole[steps] = self.sheet.record(lambda: self.go(steps))
        return [self.whole[steps]]

    def go(self, steps: int) -> None:
        self.begin()
        for _ in range(steps):
            self.step()
        self.end()

    def begin(self) -> None:
        for name, x in self.rows(self.flat).items():
            x.copy_(self.base[name])
        self.near.copy_(self.flat)
        remembered = [x for tensors in self.memory.values() for x in tensors]
        visited = [x for dense in self.dense.values() for x in (dense.moves, dense.inputs)]
        for x in remembered + visited:  # what another run left there may not be finite
            x.zero_()
        self.t.zero_()

    def end(self) -> None:
        into = self.differences(self.added)
        for name, x in self.rows(self.flat).items():
            torch.sub(x, self.base[name], out=into[name])
        peaks = [x.flatten(1).sum(1).double() for x in into.values()]
        peaks += [Product(dense.moves, dense.inputs).each_at_most() for dense in self.dense.values()]
        torch.stack(peaks, out=self.peaks)

    def step(self) -> None:
        from sparing.accel.train_cuda.kernels.dense import put_rows

        batch = self.sheet.draw()
        real, x = batch.real, as_read(batch.x, self.half)
        grads, moves, values, saw, changed = self.differentiated(x, batch.y, real, batch.keys)
        self.move(grads, real)
        for name, dense in self.dense.items():
            put_rows(moves[name], dense.moves, self.t, -self.phase.optimiser.lr)
            put_rows(saw[name], dense.inputs, self.t, 1.0)
        for name, x in changed.items():
            self.others[name].copy_(x)
        self.sheet.note(values)

    def move(self, grads: Tree, real: Tensor | None) -> None:
        from sparing.accel.train_cuda.kernels.decay import step_together

        if self.plain:
            moves, long = [_in_memory(grads[name]) for name in self.shapes], len(self.pairs)
            sizes = [len(x) for x in moves]
            flat, near = self.flat.split(sizes), self.near.split(sizes)
            for a, b in self.pairs:  # matrices, as they lie there
                rank = list(self.shapes.values())[b][0]
                x, y, move = (x[b].view(self.k, rank, -1) for x in (flat, near, moves))
                step_together(flat[a].view(self.k, -1, rank), x, y, move, self.phase.optimiser.lr, self.phase.frobenius)
            if moves[long:]:  # else weights of dense layers are all that is trained
                rest = self.flat[sum(sizes[:long]) :].add_(torch.cat(moves[long:]), alpha=-self.phase.optimiser.lr)
                if self.near is not self.flat:
                    self.near[-len(rest) :].copy_(rest)
            return
        rows = list(self.rows(self.flat).values())
        moves = [grads[name].float() for name in self.shapes]
        before = None if real is None else self.rows(self.flat.clone())
        update_params(self.phase, 0, rows, moves, Beside([], [], []), self.memory, self.pairs, stacked=True)
        if real is not None and before is not None:  # those who have finished stay where they are
            for x, old in zip(rows, before.values(), strict=True):
                x.copy_(torch.where(column(real[:, 0], x), x, old))
        self.near.copy_(self.flat)

    def differentiated(self, x: Tensor, y: Tensor, real: Tensor | None, keys: Tensor) -> tuple:
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
            wide = {n for n, v in rest.items() if v.dtype == torch.float32 and n not in self.buffers}
            beside = {n: v.to(self.half) if n in wide else v for n, v in rest.items()}
            state = {**params, **beside, **weights}
            losses = self.losses(functional_call(work.module, state, (x,)), y)
            total = batch_mean(losses, sample_weights(self.loss, y), real)
            return total, ({n: v.detach() for n, v in past.saw.items()}, {n: state[n].detach() for n in self.buffers})

        params = self.rows(self.near)
        probes = {name: d.probe for name, d in self.dense.items()}
        weights = {f"{name}.weight": d.weight for name, d in self.dense.items()}
        own = {name: w if w.shape[0] > 1 else w[0] for name, w in weights.items()}
        where = {name: 0 if w.shape[0] > 1 else None for name, w in weights.items()}
        pasts = {name: (d.inputs, d.moves) for name, d in self.dense.items()}
        others, lies = lent_apart(self.others, self.lent)
        axes: Any = (0, 0, lies, where, 0, 0, 0, None if real is None else 0, 0)
        with torch.enable_grad():
            one: Any = grad_and_value(forward, argnums=(0, 1), has_aux=True)
            (grads, moves), (values, (saw, changed)) = vmap(one, in_dims=axes, randomness="error")(
                params, probes, others, own, pasts, x, y, real, keys
            )
        work.step.begin(None)
        return grads, moves, values, saw, changed

    def losses(self, output: Any, y: Tensor) -> Tensor:
        from sparing.accel.train_cuda.kernels.entropy import Entropy

        if self.loss is cross_entropy and y.ndim == 1 and isinstance(output, Tensor) and output.ndim == 2:
            return Entropy.apply(output, y)  # type: ignore[return-value]
        return sample_losses(self.loss, in_float32(output), y)


def _room_for(x: Tensor, k: int) -> tuple[int, ...]:
    """The shape of a leaf with room for k clients; one that all share keeps one row."""
    return (1 if x.shape[0] == 1 else k, *x.shape[1:])


def _in_memory(grad: Tensor) -> Tensor:
    """A gradient `[K, *shape]` as a row of numbers, channels of convolutions last."""
    return (grad.movedim(2, -1) if grad.ndim == 5 else grad).reshape(-1)
