import torch

from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code import quantisers


@recipe("fp16", paper="IEEE 754 binary16")
def fp16() -> Recipe:
    """Send each value as a 16-bit float."""
    return _half(torch.float16)


@recipe("bf16", paper="bfloat16")
def bf16() -> Recipe:
    """Send each value as a bfloat16: the range of float32, 8 bits of precision."""
    return _half(torch.bfloat16)


def _half(dtype: torch.dtype) -> Recipe:
    def apply(method: Method) -> Method:
        return method._replace(up=(*method.up, quantisers.half_codec(method.layout, dtype)))

    return apply
