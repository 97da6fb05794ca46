"""What takes many operations of torch, as Triton kernels for a GPU: all layers and clients at once.

The bodies in `accel` call them, beside plain ones for CPUs and machines without Triton; with the same bits, but for
the products of `factors` and the sums of `spread`, where only the batch makes no difference.
"""

from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def takes_kernels(x: Tensor) -> bool:
    """Whether the kernels can take this tensor."""
    return x.is_cuda and has_triton()
