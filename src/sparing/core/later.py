"""Checks that wait: a GPU goes on working while the host does not know yet whether all is well.

Whoever has a doubt about values on a device says how to judge them. Where nobody collects doubts, they are judged at
once; a round on a GPU collects them, brings all values to the host in one copy, and judges them when it is read.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sparing.core.gpu import fetched

Judge = Callable[[Tensor], None]
"""Sees the values as float64 on the CPU; raises what is to be said about them."""
Doubts = list[tuple[Tensor, Judge]]


def doubt(doubts: Doubts | None, values: Tensor, judge: Judge) -> None:
    """Judged at once, or collected; then nobody may write to the values any more.

    >>> doubt(None, torch.tensor([2]), print)
    tensor([2.], dtype=torch.float64)
    """
    if doubts is None:
        judge(values.double().cpu())
    else:
        doubts.append((values, judge))


def asked(doubts: Doubts) -> Callable[[], None]:
    """All values are on their way to the host; what this gives waits for them and judges them in turn."""
    there = [i for i, (values, _) in enumerate(doubts) if values.is_cuda]
    there.sort(key=lambda i: -doubts[i][0].element_size())  # so that each can be looked at where it stands
    bits = [doubts[i][0].contiguous().view(-1).view(torch.uint8) for i in there]
    arrived = fetched(torch.cat(bits) if bits else torch.zeros(0, dtype=torch.uint8))

    def judged() -> None:
        far = dict(zip(there, arrived().split([len(some) for some in bits]), strict=True))
        try:
            for i, (values, judge) in enumerate(doubts):
                judge((far[i].view(values.dtype).view(values.shape) if i in far else values).double())
        finally:
            doubts.clear()  # judges know the round that knows them

    return judged
