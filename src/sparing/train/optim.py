# pyright: reportPrivateImportUsage=false
# torch._foreach_* are what torch.optim itself is written in, but carry no public name.
"""SGD, Adam and AdamW exactly as torch.optim writes them, on lists of tensors, in place; others by torch itself.

The loop path hands in one client's parameters, the stacked path the same tensors with a client axis in front: all
arithmetic but the gradient norm is elementwise, so both use the same lines.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.method import Phase
from sparing.core.operation import operation
from sparing.core.optimiser import Optimiser
from sparing.core.tree import Layout, Tree
from sparing.parts.factors import along_factors, factor_pace, gram_of_rows
from sparing.train.torch_optimisers import TorchMemory, is_of_torch

Memory = dict[str, list[Tensor]]
Pairs = list[tuple[int, int]]
"""Places of the two factors of a layer in a list of parameters."""
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


def is_plain_sgd(phase: Phase) -> bool:
    """Whether a step is W -= lr * gradient and nothing else."""
    how = phase.optimiser
    more = how.momentum, how.weight_decay, phase.prox, phase.frobenius, phase.correct, phase.holds
    return how.name == "sgd" and how.clip is None and not how.options and not any(more)


def is_sgd(optimiser: Optimiser) -> bool:
    """Whether every round takes the same steps of SGD, with or without momentum."""
    return optimiser.name == "sgd" and not optimiser.options and optimiser.schedule is None


class Aside(NamedTuple):
    """Trees that steer training from the side, leaves `[K, *shape]` or `[1, *shape]`."""

    anchor: Tree  # what FedProx's term draws to
    pull: Tree  # what is added to the gradients of phases that `correct`


class Beside(NamedTuple):
    """The same for the parameters of one phase, in their order; empty where nothing steers."""

    anchors: list[Tensor]
    pulls: list[Tensor]
    holds: list[int]  # places of tensors in which zeros stay zero


def beside_rows(aside: Aside, phase: Phase, names: list[str], rows: Tensor | slice, alone: bool = False) -> Beside:
    """These clients' rows; `alone`: of one client, without the client axis."""

    def chosen(x: Tensor) -> Tensor:
        x = x if x.shape[0] == 1 and isinstance(rows, slice) else x.expand(max(len(x), count), *x.shape[1:])[rows]
        return x[0] if alone else x

    count = len(rows) if isinstance(rows, Tensor) else 1
    anchors = [chosen(aside.anchor[name]) for name in names] if phase.prox else []
    zero = torch.zeros(())
    pulls = [chosen(aside.pull[name]) if name in aside.pull else zero for name in names] if phase.correct else []
    return Beside(anchors, pulls, [i for i, name in enumerate(names) if name in phase.holds])


def first_beside_rows(beside: Beside, m: int) -> Beside:
    return Beside([x[:m] for x in beside.anchors], [x[:m] if x.ndim else x for x in beside.pulls], beside.holds)


def fresh_memory(phase: Phase, params: Sequence[Tensor]) -> Memory:
    """What the optimiser remembers, before its first step."""
    how = phase.optimiser
    if is_of_torch(how):
        return TorchMemory(how, params)
    names = ("velocity",) if how.momentum else () if how.name == "sgd" else ("mean", "square")
    return {name: [torch.zeros_like(p) for p in params] for name in names}


def velocities(layout: Layout) -> Tree:
    """What a client keeps between rounds so that its momentum can go on, before its first: leaves `[1, ...]`."""
    return {
        f"velocity/{name}": torch.zeros(1, *layout.shapes[name], dtype=layout.dtypes[name]) for name in layout.params
    }


def recalled_memory(memory: Memory, names: list[str], remembered: Tree, rows: Tensor | slice) -> Memory:
    """The optimiser's memory going on from what these clients remember of earlier rounds, `[K, ...]`."""
    for i, name in enumerate(names):
        if "velocity" in memory and (old := remembered.get(f"velocity/{name}")) is not None:
            memory["velocity"][i].copy_(old[rows].view_as(memory["velocity"][i]))
    return memory


def remember_velocities(memory: Memory, names: list[str], remembered: Tree, rows: Tensor | slice) -> None:
    """Write it back for the next round."""
    for i, name in enumerate(names):
        if "velocity" in memory and (old := remembered.get(f"velocity/{name}")) is not None:
            old[rows] = memory["velocity"][i].view_as(old[rows])


def factor_pairs(names: list[str]) -> Pairs:
    """Layers that stand as two factors are called NAME.a and NAME.b.

    >>> factor_pairs(["conv.a", "conv.b", "conv.bias"])
    [(0, 1)]
    """
    place = {name: i for i, name in enumerate(names)}
    return [(i, place[f"{n[:-2]}.b"]) for n, i in place.items() if n.endswith(".a") and f"{n[:-2]}.b" in place]


def frobenius(grads: list[Tensor], params: list[Tensor], pairs: Pairs, strength: float) -> list[Tensor]:
    """Adds the gradient of strength / 2 * |A B|^2, strength A B B^T and strength A^T A B, in the layer's `factor_pace`.

    A dense layer's factors are a [m, r] and b [r, n]; a convolution's are a [m, r, k, 1] and b [r, n, 1, k]. A client
    axis may come first.
    """
    grads = list(grads)
    for i, j in pairs:
        a, b = params[i], params[j]
        of_a, of_b = along_factors(factor_pace(a, b), a)
        if a.ndim >= 4:
            columns, rows = a.transpose(-4, -3).flatten(-3), b.flatten(-3)  # [r, m k], [r, n k]
            inner, outer = gram_of_rows(rows), gram_of_rows(columns)
            decay = (inner @ columns).view(a.transpose(-4, -3).shape).transpose(-4, -3)
            grads[i] = grads[i] + strength * of_a * decay
            grads[j] = grads[j] + strength * of_b * (outer @ rows).view(b.shape)
        else:
            grads[i] = add_product(grads[i], a, gram_of_rows(b) * of_a, strength)
            grads[j] = add_product(grads[j], of_b * (a.mT @ a), b, strength)
    return grads


@operation
def add_product(grad: Tensor, x: Tensor, y: Tensor, strength: float) -> Tensor:
    """`grad + strength x y`."""
    return grad + strength * (x @ y)


def first_memory_rows(memory: Memory, m: int) -> Memory:
    return {name: [x[:m] for x in tensors] for name, tensors in memory.items()}


def update_params(
    phase: Phase,
    t: int,
    params: list[Tensor],
    grads: list[Tensor],
    beside: Beside,
    memory: Memory,
    pairs: Pairs,
    stacked: bool,
) -> None:
    """Step t (from 0): FedProx's pull, zeros held, clip, decay, correction, then the optimiser. Overwrites `params`."""
    if not params:
        return
    if phase.prox:
        pull = torch._foreach_sub(params, beside.anchors)
        grads = list(torch._foreach_add(grads, pull, alpha=phase.prox))
    if beside.holds:
        grads = list(grads)
        for i in beside.holds:
            grads[i] = torch.where(params[i] == 0, 0.0, grads[i])
    how = phase.optimiser
    if how.clip is not None:
        grads = clipped_gradients(grads, how.clip, stacked)
    factors = {i for pair in pairs for i in pair} if phase.frobenius else set()
    plain = [i for i in range(len(params)) if i not in factors] if how.weight_decay else []
    if how.weight_decay and how.name in ("sgd", "adam") and not isinstance(memory, TorchMemory):
        decayed = torch._foreach_add([grads[i] for i in plain], [params[i] for i in plain], alpha=how.weight_decay)
        grads = list(grads)
        for i, g in zip(plain, decayed, strict=True):
            grads[i] = g
    if factors:
        grads = frobenius(grads, params, pairs, phase.frobenius)
    if beside.pulls:
        grads = list(torch._foreach_add(grads, beside.pulls))
    if isinstance(memory, TorchMemory):
        memory.step(grads)
        return
    if how.name == "adamw" and how.weight_decay:
        torch._foreach_mul_([params[i] for i in plain], 1 - how.lr * how.weight_decay)
    (sgd if how.name == "sgd" else adam)(how, t, params, grads, memory)


def sgd(how: Optimiser, t: int, params: list[Tensor], grads: list[Tensor], memory: Memory) -> None:
    if how.momentum:
        velocity = memory["velocity"]
        torch._foreach_mul_(velocity, how.momentum)
        torch._foreach_add_(velocity, grads)
        grads = list(torch._foreach_add(grads, velocity, alpha=how.momentum)) if how.nesterov else velocity
    torch._foreach_add_(params, grads, alpha=-how.lr)


def adam(how: Optimiser, t: int, params: list[Tensor], grads: list[Tensor], memory: Memory) -> None:
    mean, square = memory["mean"], memory["square"]
    torch._foreach_lerp_(mean, grads, 1 - BETA1)
    torch._foreach_mul_(square, BETA2)
    torch._foreach_addcmul_(square, grads, grads, 1 - BETA2)
    root = torch._foreach_sqrt(square)
    torch._foreach_div_(root, (1 - BETA2 ** (t + 1)) ** 0.5)
    torch._foreach_add_(root, EPS)
    torch._foreach_addcdiv_(params, mean, root, -how.lr / (1 - BETA1 ** (t + 1)))


def clipped_gradients(grads: list[Tensor], limit: float, stacked: bool) -> list[Tensor]:
    """Gradients scaled down to a global norm of `limit`, per client where stacked, as clip_grad_norm_ does it.

    >>> clipped_gradients([torch.tensor([3.0]), torch.tensor([4.0])], limit=1.0, stacked=False)
    [tensor([0.6000]), tensor([0.8000])]
    """
    if not stacked:
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
        return list(torch._foreach_mul(grads, (limit / (norm + 1e-6)).clamp(max=1.0)))
    norm_K = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in grads]), dim=0
    )
    scale_K = (limit / (norm_K + 1e-6)).clamp(max=1.0)
    return [g * scale_K.view(-1, *[1] * (g.ndim - 1)) for g in grads]
