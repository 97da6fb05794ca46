"""The gradient of a loss on one set of samples. Taking it changes nothing: no model, no random state, no mode."""

import torch
from torch import Tensor, nn

from sparing.core.errors import TrainingError
from sparing.core.method import Local
from sparing.core.threads import intra_op
from sparing.core.tree import Tree
from sparing.data.dataset import to_network_input
from sparing.data.inputs import Samples
from sparing.train.evaluate import CopyMaker, frozen_copy
from sparing.train.losses import Loss, sample_losses, sample_weights
from sparing.train.model_call import call_model
from sparing.train.torch_rng import own_rng
from sparing.train.working_copy import (
    EVALUATED_AT_ONCE,
    check_names,
    device_of_tree,
    gathered_samples,
    load_row,
    trained_names,
    working_copy,
)


def gradients(loss: Tensor, params: list[Tensor]) -> list[Tensor]:
    """Zeros for a parameter that the loss does not depend on."""
    if not params or not loss.requires_grad:
        return [torch.zeros_like(p) for p in params]
    found = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
    return [g.to_dense() if g.is_sparse else g for g in found]


def gradient_at(
    model: nn.Module,
    loss: Loss,
    tree: Tree,
    x: Samples,
    y: Tensor,
    static: bool = False,
    copy: CopyMaker = frozen_copy,
) -> Tree:
    """Of the mean loss, at the model `tree` (leaves `[1, *shape]`) as it is evaluated, for every parameter that trains.

    It works on one thread, so that its bits do not depend on how many there are.

    >>> x, y = torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([0.0, 1.0])
    >>> gradient_at(nn.Linear(2, 1, bias=False), lambda out, y: out[:, 0] * y, {"weight": torch.zeros(1, 1, 2)}, x, y)
    {'weight': tensor([[[1.5000, 0.0000]]])}
    """
    check_names(model, tree)
    work = copy(model, device_of_tree(tree), static)
    for layer in work.module.modules():
        if isinstance(layer, nn.RNNBase):  # cuDNN has no gradient of one in evaluation
            layer.train()
            layer.dropout = 0.0
    names = [name for name in work.state if name in work.params]
    params = [work.state[name] for name in names]
    total, weighed = [torch.zeros_like(p) for p in params], 0.0
    with torch.enable_grad(), own_rng(work.device), intra_op(1):
        load_row(work, tree, 0)
        for place in torch.arange(len(x), device=x.device).tensor_split(-(-len(x) // EVALUATED_AT_ONCE)):
            output = call_model(work.module, to_network_input(gathered_samples(x, place, work)))
            target = y.index_select(0, place).to(work.device)
            losses, weights = sample_losses(loss, output, target), sample_weights(loss, target)
            losses = losses if weights is None else losses * weights
            total = [so_far + more for so_far, more in zip(total, gradients(losses.sum(), params), strict=True)]
            weighed += len(losses) if weights is None else float(weights.sum())
    found = {name: (g / max(weighed, 1)).contiguous()[None] for name, g in zip(names, total, strict=True)}
    for name, g in found.items():
        if not bool(g.isfinite().all()):
            raise TrainingError(f"the gradient of {name!r} on the probe set is not finite; lower the learning rates")
    return found


def reaches_params(model: nn.Module, loss: Loss, tree: Tree, x: Samples, y: Tensor, local: Local) -> bool:
    """Whether a gradient of the loss on these samples comes to any parameter that local training moves.

    >>> x, y, tree = torch.ones(2, 2), torch.zeros(2), {"weight": torch.zeros(1, 1, 2)}
    >>> losses = [lambda out, y: out[:, 0] - y, lambda out, y: (out[:, 0] > y).float()]
    >>> [reaches_params(nn.Linear(2, 1, bias=False), loss, tree, x, y, Local()) for loss in losses]
    [True, False]
    """
    work = working_copy(model, device_of_tree(tree), static=local.buffers == "static")
    names = {name for phase in (*local.phases, *local.wrapped_phases) for name in trained_names(work, phase)}
    if not names:
        return True
    with torch.enable_grad(), own_rng(work.device), intra_op(1):
        load_row(work, tree, 0)
        work.step.begin(0 if work.device.type == "cpu" else torch.tensor(0, device=work.device))
        output = call_model(
            work.module, to_network_input(gathered_samples(x, torch.arange(len(x), device=x.device), work))
        )
        total = sample_losses(loss, output, y.to(work.device)).sum()
        if not total.requires_grad:
            return False
        found = torch.autograd.grad(total, [work.state[name] for name in names], allow_unused=True)
    return any(grad is not None for grad in found)
