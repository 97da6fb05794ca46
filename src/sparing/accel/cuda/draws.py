"""Keys of clients in one launch, and the words that other kernels draw: see `core.keys`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparing.core.keys import GOLDEN

BLOCK = 1024


@triton.jit
def mix_words(z):
    """`core.keys.mix`."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def word(key, i, GOLDEN: tl.constexpr):
    """Word i of a key's stream, uint64."""
    return mix_words(key.to(tl.uint64, bitcast=True) + (i + 1).to(tl.uint64) * GOLDEN)


@triton.jit
def keys_kernel(ids, out, n, base, GOLDEN: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(ids + i, mask=i < n, other=0).to(tl.int64).to(tl.uint64, bitcast=True)
    z = mix_words(mix_words(z * GOLDEN + 1) ^ base.to(tl.int64).to(tl.uint64, bitcast=True))
    tl.store(out + i, z.to(tl.int64, bitcast=True), mask=i < n)


def keys_of(ids: Tensor, base: int) -> Tensor:
    """`Ctx.keys` of clients `[K]`, the hash of its tag given."""
    ids = ids.contiguous()
    out = torch.empty_like(ids, dtype=torch.int64)
    keys_kernel[(triton.cdiv(len(ids), BLOCK),)](ids, out, len(ids), base, GOLDEN=GOLDEN, BLOCK=BLOCK)
    return out
