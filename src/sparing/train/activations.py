"""How many bytes a training step keeps for its gradient: what autograd saves of one sample, counted in one forward."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparing.data.dataset import to_network_input
from sparing.data.inputs import Samples, sample_tensors
from sparing.train.losses import Loss, cross_entropy, sample_losses
from sparing.train.model_call import call_model, main_tensor
from sparing.train.pieces import repeated_blocks
from sparing.train.torch_rng import own_rng
from sparing.train.working_copy import gathered_samples, working_copy


class SampleActivations(NamedTuple):
    """Bytes of one sample."""

    whole: int
    blocks: int = 0  # of these, within repeated blocks
    largest: int = 0  # within the largest of them
    inputs: int = 0  # what goes into them, which is kept where they are computed again
    head: int = 0  # of the whole: from the logits on
    head_path: str = ""  # the layer that gives the logits of sequences; empty: there is none

    def held(self, recompute: bool, chunked: bool) -> int:
        """Where blocks are computed again, and logits formed a few at a time."""
        size = self.whole - (self.head if chunked else 0)
        return size - self.blocks + self.inputs + self.largest if recompute else size


def sample_activations(model: nn.Module, loss: Loss, x: Samples, y: Tensor, device: torch.device) -> SampleActivations:
    """Of the first of these samples, in the model as it trains.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    >>> sample_activations(net, cross_entropy, torch.zeros(1, 4), torch.tensor([0]), torch.device("cpu")).whole
    56
    """
    work = working_copy(model, device, static=False)
    own = {p.untyped_storage().data_ptr() for p in (*work.module.parameters(), *work.module.buffers())}
    samples = to_network_input(gathered_samples(x[:1], torch.zeros(1, dtype=torch.int64, device=x.device), work))
    own |= {one.untyped_storage().data_ptr() for _, one in sample_tensors(samples)}
    seen = _Seen(work.module, own)
    work.step.begin(0 if device.type == "cpu" else torch.tensor(0, device=device))
    with torch.enable_grad(), own_rng(device), torch.autograd.graph.saved_tensors_hooks(seen.save, _as_saved):
        output = call_model(work.module, samples)
        path = seen.head_of(main_tensor(output)) if y.ndim > 1 and loss is cross_entropy else ""
        losses = sample_losses(loss, output, y[:1].clone().to(device))
    del losses
    head = seen.bytes - seen.before[path] if path else 0
    return SampleActivations(seen.bytes, sum(seen.blocks), max(seen.blocks, default=0), seen.inputs, head, path)


def _as_saved(x: Tensor) -> Tensor:
    return x


class _Seen:
    """Bytes that autograd saves, each storage once, and where in the network."""

    def __init__(self, module: nn.Module, own: set[int]) -> None:
        self.own, self.bytes, self.inputs = own, 0, 0
        self.kept: list[Tensor] = []  # so that no two lie in one place
        self.blocks: list[int] = []
        self.before: dict[str, int] = {}  # a dense layer's path -> what had been saved when it was called
        self.outputs: dict[str, Any] = {}
        self.begun = 0
        for block in repeated_blocks(module).values():
            block.register_forward_pre_hook(self.enter)
            block.register_forward_hook(self.leave)
        for path, layer in module.named_modules():
            if type(layer) is nn.Linear:
                layer.register_forward_pre_hook(partial(self.call, path))
                layer.register_forward_hook(partial(self.give, path))

    def save(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.own:
            self.own.add(storage.data_ptr())
            self.bytes += storage.nbytes()
            self.kept.append(x)
        return x

    def call(self, path: str, layer: nn.Module, args: Any) -> None:
        self.before[path] = self.bytes

    def give(self, path: str, layer: nn.Module, args: Any, output: Any) -> None:
        self.outputs[path] = output

    def enter(self, block: nn.Module, args: Any) -> None:
        self.begun = self.bytes
        self.inputs += sum(x.numel() * x.element_size() for x in args if isinstance(x, Tensor))

    def leave(self, block: nn.Module, args: Any, output: Any) -> None:
        self.blocks.append(self.bytes - self.begun)

    def head_of(self, output: Tensor | None) -> str:
        return next((path for path, out in self.outputs.items() if out is output), "")
