"""The words that kernels draw: see `core.keys`."""

import triton
import triton.language as tl


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
