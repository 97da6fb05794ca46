"""Which path of local training is likely the fastest."""

import torch
from torch import nn

from sparing.accel.train_cpu.implicit import can_imply, most_visits
from sparing.core.method import Local

SMALL = 100_000
"""Parameters up to which stacking dense layers pays on a CPU."""
GRAND = 4_000_000
"""Weights of convolutions from which on a GPU has enough to do in one client's step, so that compiling it pays."""
VISITS = 150
"""Samples that a client may visit in a phase while implicit training still pays on a CPU.

Measured in batches of 10 and 32, from 64-64-10 to 2048-512-100, clients starting from one model: faster than both other
paths up to 150 visits on one core and on two; on some of these nets slower than one of them from 200 (batches of 32) or
400 visits on (batches of 10). Clients that start from models of their own gain less: in batches of 32, the largest net
lost a tenth to the loop at 100 visits.
"""


def fastest_path(model: nn.Module, device: torch.device | str, local: Local | None = None, samples: int = 0) -> str:
    """The faster path: "stacked" on CUDA and for small nets without convolutions on a CPU, else "loop-fast".

    "compiled" on CUDA for networks with large convolutions: of ResNet-18 on an H200 in bfloat16, "stacked" trains
    10,900 images a second, one model alone that is compiled 28,200 in batches of 50.
    "implicit" on a CPU, where it can train the model so, and the client with the most samples visits `VISITS` or fewer
    in a phase.

    >>> fastest_path(nn.Linear(4, 2), "cpu"), fastest_path(nn.Conv2d(1, 4, 3), "cpu")
    ('stacked', 'loop-fast')
    >>> fastest_path(nn.Conv2d(512, 1024, 3), "cuda"), fastest_path(nn.Conv2d(3, 64, 3), "cuda")
    ('compiled', 'stacked')
    >>> fastest_path(nn.Linear(4, 2), "cpu", Local(), 20), fastest_path(nn.Linear(4, 2), "cpu", Local(), 2000)
    ('implicit', 'stacked')
    """
    layers = list(model.modules())
    if any(isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)) for layer in layers):
        return "loop-fast"
    convolutions = [layer for layer in layers if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))]
    if torch.device(device).type == "cuda":
        grand = sum(layer.weight.numel() for layer in convolutions) >= GRAND
        return "compiled" if grand else "stacked"
    if local is not None and can_imply(model, local) and most_visits(local, samples) <= VISITS:
        return "implicit"
    return "loop-fast" if convolutions or sum(p.numel() for p in model.parameters()) > SMALL else "stacked"
