"""Checks that wait: a GPU goes on working while the host does not know yet whether all is well.

Whoever has a doubt about values on a device says how to judge them. Where nobody collects doubts, they are judged at
once; a round on a GPU collects them, brings all values to the host in one copy, and judges them when it is read.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Judge = Callable[[Tensor], None]
"""Sees the values as float64 on the CPU; raises what is to be said about them."""
Doubts = list[tuple[Tensor, Judge]]


def doubt(doubts: Doubts | None, values: Tensor, judge: Judge) -> None:
    """Judged at once, or collected.

    >>> doubt(None, torch.tensor([2]), print)
    tensor([2.], dtype=torch.float64)
    """
    if doubts is None:
        judge(values.double().cpu())
    else:
        doubts.append((values.double(), judge))


def asked(doubts: Doubts) -> Callable[[], None]:
    """All values are on their way to the host; what this gives waits for them and judges them in turn."""
    there = [values.reshape(-1) for values, _ in doubts if values.is_cuda]
    here, came = [values for values, _ in doubts if not values.is_cuda], None
    flat = torch.cat(there) if there else torch.zeros(0)
    arriving = torch.empty(len(flat), dtype=torch.float64, pin_memory=bool(there))
    if there:
        arriving.copy_(flat, non_blocking=True)
        came = torch.cuda.Event()
        came.record()

    def judged() -> None:
        if came is not None:
            came.synchronize()
        near, far = iter(here), iter(arriving.split([len(values) for values in there]))
        try:
            for values, judge in doubts:
                judge(next(far).view(values.shape) if values.is_cuda else next(near))
        finally:
            doubts.clear()  # judges know the round that knows them

    return judged
