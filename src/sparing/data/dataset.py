"""A dataset before it is shared out: samples, labels, and the natural ids some partitions go by."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparing.data.inputs import Inputs, Samples, SomeSamples

IGNORED = -100
"""A target in a sequence where there is nothing to guess, as torch's own losses have it."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """All samples of a dataset in one pool.

    `x` is uint8 images `[N, C, H, W]`, float features `[N, ...]`, or int64 tokens `[N, T]`, beside which a
    mask may tell padding apart; it may be memory-mapped.
    `y` is int64 labels `[N]` (for text, the next token at every place, `[N, T]`, or IGNORED). `official` marks the
    samples that the authors set aside for testing; None where they did not. `groups` holds natural ids per sample, such
    as writer, role, domain or superclass, and `names` what their numbers mean.
    """

    name: str
    x: Samples
    y: Tensor
    classes: int
    official: Tensor | None = None  # bool [N]
    groups: dict[str, Tensor] = field(default_factory=dict)  # name -> int64 [N]
    names: dict[str, list[str]] = field(default_factory=dict)  # "class" or a group -> what its ids mean
    vocabulary: int | None = None  # of text: how many tokens there are

    def __len__(self) -> int:
        return len(self.y)


def to_network_input(x: SomeSamples) -> SomeSamples:
    """Samples as a network takes them: uint8 images become floats in [0, 1], everything else stays as it is.

    >>> to_network_input(torch.tensor([[0, 255]], dtype=torch.uint8))
    tensor([[0., 1.]])
    """
    if isinstance(x, Inputs):
        return x.map(to_network_input)
    return x.to(torch.float32).mul_(1 / 255) if x.dtype == torch.uint8 else x
