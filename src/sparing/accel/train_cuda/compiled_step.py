"""One client's training step, compiled once: forward, loss, gradients and the update, written in place.

The step is traced to operations on tensors alone, of fixed shapes, and compiled as a whole, so that norms, attention,
the loss and the update are fused. It takes a client's tensors as arguments, so every client takes the same one.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.func import grad_and_value
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from sparing.accel.keyed_classes import stacked_copy
from sparing.accel.train_stacked.stacked import refuse_unstackable
from sparing.core.method import Phase
from sparing.train.call import PathCall
from sparing.train.losses import batch_mean, in_float32, sample_losses, sample_weights
from sparing.train.model_call import call_with_state
from sparing.train.optim import Beside, update_params
from sparing.train.working_copy import trained_names

COMPILER: dict[str, Any] = {"backend": "inductor"}
"""How `torch.compile` is asked."""
IN_ORDER: dict[str, Any] = {"options": {"loop_ordering_after_fusion": False}}


class ClientTensors(NamedTuple):
    """What one client's step reads, and what of it is overwritten."""

    params: list[Tensor]  # float32, overwritten
    near: list[Tensor]  # the same in bfloat16, overwritten; none in other precisions
    velocity: list[Tensor]  # overwritten; none without momentum
    others: list[Tensor]  # what does not move
    x: Tensor  # [B, ...]
    y: Tensor
    real: Tensor  # [B]: false for padding; none real: a client that has finished
    loss: Tensor  # overwritten

    def line_up(self) -> list[Tensor]:
        return [*self.params, *self.near, *self.velocity, *self.others, *self[4:]]


class Uncompilable(Exception):
    """The model does in a step what a compiled one cannot do."""


class ClientStep:
    """The step of a model in a phase; `params` and `others` are names in `work.state`."""

    def __init__(self, lesson: PathCall, phase: Phase) -> None:
        self.work = stacked_copy(lesson.model, lesson.device, lesson.static)
        refuse_unstackable(self.work.module)
        self.loss, self.phase = lesson.loss, phase
        self.half = lesson.precision == "bf16"
        self.params = trained_names(self.work, phase)
        self.others = [name for name in self.work.state if name not in self.params]
        self.compiled: dict[Any, Callable[..., object]] = {}  # by the shape of the samples

    def __call__(self, given: ClientTensors) -> None:
        key = given.x.shape, given.x.dtype, given.y.shape
        if key not in self.compiled:
            self.compiled[key] = self._compile(given)
        with torch.no_grad():
            self.compiled[key](*given.line_up())

    def _compile(self, given: ClientTensors) -> Callable[..., object]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler's own parts
            copies = [x.clone() for x in given.line_up()]
            traced = make_fx(self.take)(*copies)
            if any(map(_draws, traced.graph.nodes)):
                raise Uncompilable("it draws random numbers")
            return _compiled(traced, copies)

    def take(self, *tensors: Tensor) -> tuple[()]:
        """The step itself."""
        given = self._apart(tensors)
        used = given.near or given.params
        rest = dict(zip(self.others, given.others, strict=True))

        def mean_loss(params: Sequence[Tensor]) -> Tensor:
            self.work.step.begin(None, given.real)
            state = dict(zip(self.params, params, strict=True)) | rest
            before = {name: (id(x), x._version) for name, x in rest.items()}
            output = call_with_state(self.work.module, state, given.x)
            if before != {name: (id(state[name]), state[name]._version) for name in rest}:
                raise Uncompilable("its buffers move")
            losses = sample_losses(self.loss, in_float32(output), given.y)
            return batch_mean(losses, sample_weights(self.loss, given.y), given.real)

        grads, loss = grad_and_value(mean_loss)(used)
        self.work.step.begin(None)
        self._move(given, [grad.float() for grad in grads])
        given.loss.copy_(loss.expand(given.loss.shape))
        return ()

    def _apart(self, tensors: Sequence[Tensor]) -> ClientTensors:
        n, parts, begin = len(self.params), [], 0
        momentum = self.phase.optimiser.momentum > 0
        for size in (n, n * self.half, n * momentum, len(self.others)):
            parts.append(list(tensors[begin : begin + size]))
            begin += size
        return ClientTensors(*parts, *tensors[begin:])

    def _move(self, given: ClientTensors, grads: list[Tensor]) -> None:
        """One who has finished stays where it is."""
        how, params = self.phase.optimiser, given.params
        before = [p.clone() for p in params] if how.momentum or how.weight_decay else []
        memory = {"velocity": given.velocity} if how.momentum else {}
        update_params(self.phase, 0, params, grads, Beside([], [], []), memory, [], stacked=False)
        if before:
            still = [torch.where(given.real[0], p, old) for p, old in zip(params, before, strict=True)]
            torch._foreach_copy_(params, still)  # pyright: ignore[reportPrivateImportUsage]
        if given.near:
            torch._foreach_copy_(given.near, params)  # pyright: ignore[reportPrivateImportUsage]


def _compiled(traced: GraphModule, copies: list[Tensor]) -> Callable[..., object]:
    """Called once with these. Where the compiler cannot reorder the loops of an update, it leaves them as they are."""
    from torch._inductor.exc import InductorError  # which imports the compiler

    step = torch.compile(traced, fullgraph=True, dynamic=False, **COMPILER)
    with torch.no_grad():
        try:
            step(*copies)
        except InductorError:
            step = torch.compile(traced, fullgraph=True, dynamic=False, **COMPILER, **IN_ORDER)
            step(*copies)
    return step


def _draws(node: Node) -> bool:
    """Whether an operation draws random numbers. Attention is marked so, and does not where nothing is dropped."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments = cast(OpOverload, node.target)._schema.arguments
    given = {one.name: one.default_value for one in arguments if one.has_default_value()}
    given |= dict(zip([one.name for one in arguments], node.args, strict=False)) | node.kwargs
    return given.get("dropout_p") != 0.0


STEPS: "WeakKeyDictionary[nn.Module, dict[Any, ClientStep]]" = WeakKeyDictionary()
"""Compiling takes tens of seconds, so a step is kept as long as its model."""


def known_step(lesson: PathCall, phase: Phase) -> ClientStep:
    known = STEPS.setdefault(lesson.model, {})
    key = (lesson.loss, phase._replace(epochs=1, steps=None, batch=1), lesson.local.buffers, lesson.precision)
    key = (*key, lesson.device)
    if key not in known:
        known[key] = ClientStep(lesson, phase)
    return known[key]
