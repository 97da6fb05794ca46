"""Keyed randomness: every draw is a hash of (seed, round, client, tag), so nothing random is ever stored.

The same numbers come out for any number of clients at once, any engine, thread count and device, and both ends of
the wire can draw the same mask without sending it. A client's key is worked out in NumPy, where few numbers cost
little; the stream of words that follows from it is a tensor.

    >>> hashes(torch.from_numpy(client_keys(np.array([4, 7]), 0)[0].view(np.int64)), 2).shape
    torch.Size([2, 2])
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

from sparing.core.operation import operation

GOLDEN = 0x9E3779B97F4A7C15
WORD = (1 << 64) - 1
GOLDEN_U, MUL1_U, MUL2_U = np.uint64(GOLDEN), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
BY30, BY27, BY31 = np.uint64(30), np.uint64(27), np.uint64(31)


def signed(z: int) -> int:
    """The 64-bit pattern of z as the signed number torch wants."""
    z &= WORD
    return z - (1 << 64) if z >> 63 else z


MUL1, MUL2 = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)


def mix(z: Tensor) -> Tensor:
    """A bijective 64-bit scrambler (the splitmix64 finaliser) on int64 tensors; z is overwritten."""
    z = z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(MUL1)
    z = z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(MUL2)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def mix_few(word: np.ndarray) -> np.ndarray:
    """The same on uint64 in NumPy."""
    word ^= word >> BY30
    word *= MUL1_U
    word ^= word >> BY27
    word *= MUL2_U
    word ^= word >> BY31
    return word


def hashes(keys: Tensor, n: int, start: int = 0) -> Tensor:
    """Words start .. start + n of each key's stream: `[K]` -> `[K, n]` int64, all 64 bits uniform."""
    step = torch.arange(start + 1, start + n + 1, device=keys.device) * signed(GOLDEN)
    return mix(keys[:, None] + step)


def few_hashes(keys: np.ndarray, n: int) -> np.ndarray:
    """The first n of them in NumPy: `[K]` -> `[K, n]` uint64."""
    return mix_few(keys[:, None] + np.arange(1, n + 1, dtype=np.uint64) * GOLDEN_U)


def uniforms(words: Tensor) -> Tensor:
    """Hash words as float32 in [0, 1): the top 24 bits, so every device gives the same number."""
    return ((words >> 40) & ((1 << 24) - 1)).to(torch.float32) * 2.0**-24


def tag_word(seed: int, round: int, tag: str) -> int:
    """A tag in a round, as 64 bits; it is hashed in full."""
    digest = hashlib.blake2b(f"{seed}/{round}/{tag}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def client_keys(ids: np.ndarray, *words: int) -> np.ndarray:
    """One 64-bit key for each of these words and clients: `[words, K]` uint64."""
    rows = np.array([[word] for word in words], dtype=np.uint64)
    return mix_few(mix_few(ids.astype(np.int64).view(np.uint64) * GOLDEN_U + np.uint64(1)) ^ rows)


@operation
def choose(keys: Tensor, d: int, k: int) -> Tensor:
    """The k of d positions whose words are smallest, bool `[K, d]`: every set of k is equally likely.

    >>> choose(torch.tensor([7, 8]), 10, 3).sum(1)
    tensor([3, 3])
    """
    if not 0 <= k <= d:
        raise ValueError(f"cannot choose {k} of {d} positions")
    if k in (0, d):
        return torch.full((len(keys), d), k == d, dtype=torch.bool, device=keys.device)
    words = hashes(keys, d)
    cut = words.kthvalue(k, dim=1, keepdim=True).values
    return words <= cut  # a 64-bit bijection of the position: no two words of a row are equal
