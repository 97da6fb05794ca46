"""How a model is called: samples of several tensors as its arguments, and what counts of what it gives."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.func import functional_call

from sparing.core.tree import Tree
from sparing.data.inputs import Inputs, Samples


class Unformed(NamedTuple):
    """Logits that nobody has formed yet: `head(hidden)`."""

    hidden: Tensor  # [B, T, width]
    head: Callable[[Tensor], Tensor]


def call_model(model: nn.Module, x: Samples) -> Any:
    """What the model gives for these samples; an output of Hugging Face counts as its logits.

    >>> import torch
    >>> call_model(nn.Bilinear(1, 1, 2), Inputs((torch.ones(3, 1), torch.ones(3, 1)))).shape
    torch.Size([3, 2])
    """
    args, named = _arguments(x)
    return _logits_of(model(*args, **named))


def call_with_state(model: nn.Module, state: Tree, x: Samples) -> Any:
    """The same with these tensors in place of the model's own."""
    return _logits_of(functional_call(model, state, *_arguments(x)))


def _arguments(x: Samples) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    if not isinstance(x, Inputs):
        return (x,), {}
    return (x.tensors, {}) if x.names is None else ((), dict(zip(x.names, x.tensors, strict=True)))


def _logits_of(output: Any) -> Any:
    """A tuple stays one: a loss of one's own may take it apart."""
    if isinstance(output, Tensor | tuple):
        return output
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor | Unformed) else output


def main_tensor(output: Any) -> Tensor | None:
    """What accuracy and the usual losses look at: the output, of several the logits or the first; None: no tensor.

    >>> import torch
    >>> main_tensor((torch.tensor(1.0), "and more")), main_tensor({"a": torch.tensor(1.0)})
    (tensor(1.), None)
    """
    if isinstance(output, Tensor):
        return output
    first = output[0] if isinstance(output, tuple | list) and len(output) else output
    first = getattr(output, "logits", first)
    return first if isinstance(first, Tensor) else None
