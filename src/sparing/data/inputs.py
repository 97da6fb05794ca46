"""Samples of several tensors: what a model takes as keyword arguments (a dict) or as positional ones (a tuple).

`Inputs` answers the few questions that are asked of samples, in the words of a tensor, so that what moves samples about
need not know which of the two it has.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from sparing.data.arrays import dtype_name


@dataclass(frozen=True, eq=False)
class Inputs:
    """Tensors `[n, ...]` side by side, one row of each to a sample.

    >>> both = Inputs((torch.ones(3, 2), torch.zeros(3)), ("input_ids", "attention_mask"))
    >>> len(both), [tuple(x.shape) for x in both[:2].tensors]
    (3, [(2, 2), (2,)])
    """

    tensors: tuple[Tensor, ...]
    names: tuple[str, ...] | None = None  # of the model's keyword arguments; None: they are positional

    def map(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """The same with every tensor changed."""
        return Inputs(tuple(change(x) for x in self.tensors), self.names)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: Any) -> "Inputs":
        return self.map(lambda x: x[index])

    def index_select(self, dim: int, index: Tensor) -> "Inputs":
        return self.map(lambda x: x.index_select(dim, index))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> "Inputs":
        return self.map(lambda x: x.unflatten(dim, tuple(sizes)))

    def to(self, device: torch.device | str) -> "Inputs":
        return self.map(lambda x: x.to(device))

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def is_cuda(self) -> bool:
        return self.tensors[0].is_cuda


def _taken_apart(inputs: Inputs) -> tuple[list[Tensor], tuple[str, ...] | None]:
    return list(inputs.tensors), inputs.names


def _put_together(tensors: Any, names: Any) -> Inputs:
    return Inputs(tuple(tensors), names)


register_pytree_node(Inputs, _taken_apart, _put_together)  # so that vmap takes them

Samples = Tensor | Inputs
SomeSamples = TypeVar("SomeSamples", Tensor, Inputs, Tensor | Inputs)


def sample_tensors(x: Samples, what: str = "x") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the samples, by what a sentence calls it.

    >>> [name for name, _ in sample_tensors(Inputs((torch.ones(1),), ("mask",)))]
    ["x['mask']"]
    """
    if isinstance(x, Tensor):
        yield what, x
        return
    for i, tensor in enumerate(x.tensors):
        yield f"{what}[{i if x.names is None else repr(x.names[i])}]", tensor


def samples_in_words(x: Samples) -> str:
    """
    >>> samples_in_words(Inputs((torch.ones(3, 2), torch.zeros(3))))
    'samples of several tensors: (2,) float32, () float32'
    """
    if isinstance(x, Tensor):
        return f"samples of shape {tuple(x.shape[1:])} and type {x.dtype}"
    names = [""] * len(x.tensors) if x.names is None else [f"{name} " for name in x.names]
    parts = [f"{name}{tuple(t.shape[1:])} {dtype_name(t)}" for name, t in zip(names, x.tensors, strict=True)]
    return f"samples of {'one tensor' if len(parts) == 1 else 'several tensors'}: {', '.join(parts)}"
