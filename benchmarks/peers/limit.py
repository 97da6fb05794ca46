"""What the machine could do at best: the arithmetic of a round, and how fast this machine multiplies and copies."""

import time
from collections.abc import Callable

import torch
from peers.shapes import Shape
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

TRIES = 8


def flops(shape: Shape) -> int:
    """Of one round: forward and backward passes of every sample of the cohort; a multiply-add is two."""
    model = shape.model()
    x, y = torch.zeros(shape.batch, *shape.image), torch.zeros(shape.batch, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        cross_entropy(model(x), y).backward()
    return counter.get_total_flops() * shape.samples * shape.epochs * shape.cohort // shape.batch


def weight_bytes(shape: Shape) -> int:
    """Of one round, where every client's weights are formed: read and written once in every step."""
    steps = -(-shape.samples // shape.batch) * shape.epochs * shape.cohort
    return 2 * 4 * sum(p.numel() for p in shape.model().parameters()) * steps


def machine(device: str) -> dict[str, float]:
    """Operations a second of a large matrix product (float32 on a CPU, bfloat16 on CUDA), bytes a second of a copy."""
    n, kind, size = (1024, torch.float32, 1 << 24) if device == "cpu" else (8192, torch.bfloat16, 1 << 28)
    a, out = torch.ones(n, n, dtype=kind, device=device), torch.empty(n, n, dtype=kind, device=device)
    here, there = (torch.ones(size, device=device) for _ in range(2))
    return {
        "flops": 2 * n**3 / fastest(lambda: torch.mm(a, a, out=out), device),
        "bytes": 2 * here.nbytes / fastest(lambda: there.copy_(here), device),
    }


def fastest(work: Callable[[], object], device: str) -> float:
    seconds = []
    for _ in range(TRIES + 1):
        began = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def best(*measured: dict[str, float]) -> dict[str, float]:
    return {key: max(able[key] for able in measured) for key in measured[0]}


def floor(shape: Shape, device: str, able: dict[str, float]) -> float:
    """Seconds below which no round can be that computes as said.

    On CUDA the weights of all clients are too large for the caches and have to move as well.
    """
    moved = 0.0 if device == "cpu" else weight_bytes(shape) / able["bytes"]
    return max(flops(shape) / able["flops"], moved)
