"""Keyed randomness: every draw is a hash of (seed, round, client, tag), so nothing random is ever stored.

The same numbers come out for any number of clients at once, any engine, thread count and device, and both ends of
the wire can draw the same mask without sending it.

    >>> ids, n = torch.tensor([4, 7]), torch.tensor([20, 30])
    >>> ctx = Ctx(seed=0, round=3, rounds=10, ids=ids, n=n, clients=9, samples=200)
    >>> bool((ctx.uniform("u", 5)[1] == ctx.at(slice(1, 2)).uniform("u", 5)[0]).all())
    True
"""

import hashlib
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparing.core.gpu import brought, ready
from sparing.core.later import Doubts

GOLDEN = 0x9E3779B97F4A7C15
WORD = (1 << 64) - 1
BLOCK = 1 << 17
EVERYONE = -1
"""The id under which draws common to all clients are keyed."""


def signed(z: int) -> int:
    """The 64-bit pattern of z as the signed number torch wants."""
    z &= WORD
    return z - (1 << 64) if z >> 63 else z


MUL1, MUL2 = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)
GOLDEN_U, MUL1_U, MUL2_U = np.uint64(GOLDEN), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
BY30, BY27, BY31 = np.uint64(30), np.uint64(27), np.uint64(31)


def mix(z: Tensor) -> Tensor:
    """A bijective 64-bit scrambler (the splitmix64 finaliser) on int64 tensors; z is overwritten."""
    z = z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(MUL1)
    z = z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(MUL2)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def mix_few(word: np.ndarray) -> np.ndarray:
    """The same on uint64 in NumPy, whose operations on few numbers take less time."""
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


class Ctx(NamedTuple):
    """What both ends know in a round about these K clients."""

    seed: int
    round: int
    rounds: int  # planned in all
    ids: Tensor  # [K]
    n: Tensor  # [K] samples of these clients
    clients: int  # in all
    samples: int  # of the clients that train
    cohort: int = 1  # clients taking part in this round
    first: Tensor | None = None  # [K] true where the server never met the client before
    capacity: dict[str, Tensor] | None = None  # what devices declared, such as rank or bandwidth, each [K]
    held: int = 0  # of all clients: those that never train
    budget: Tensor | None = None  # [K] most bytes each may upload, where a round has a deadline
    home: tuple[Tensor, Tensor] | None = None  # ids and n on the CPU, where they are elsewhere
    news: bool = True  # whether one of them may be new to the server
    doubts: Doubts | None = None  # what will be judged later; None: everything at once
    sizes: Tensor | None = None  # [K] on the CPU: which size each one's model has, where that was asked already

    @property
    def here(self) -> tuple[Tensor, Tensor]:
        """(ids, n) on the CPU."""
        return self.home or (self.ids.cpu(), self.n.cpu())

    def at(self, index: Tensor | slice) -> "Ctx":
        """The same round seen by some of these clients."""
        there = index.to(self.ids.device, non_blocking=True) if isinstance(index, Tensor) else index
        known = self.home is not None or self.sizes is not None
        near = index.cpu() if isinstance(index, Tensor) and known else index
        first = None if self.first is None else self.first[there]
        capacity = {name: x[there] for name, x in self.capacity.items()} if self.capacity else None
        budget = None if self.budget is None else self.budget[there]
        home = (self.home[0][near], self.home[1][near]) if self.home else None
        sizes = None if self.sizes is None else self.sizes[near]
        who = self._replace(ids=self.ids[there], n=self.n[there], home=home, sizes=sizes)
        return who._replace(first=first, capacity=capacity, budget=budget)

    @property
    def common(self) -> "Ctx":
        """One row that every client and the server agree on."""
        here, there = (
            (brought((EVERYONE,), device), brought((self.samples,), device))
            for device in (torch.device("cpu"), self.ids.device)
        )
        alone = self._replace(ids=there[0], n=there[1], home=here)
        return alone._replace(first=None, capacity=None, budget=None, sizes=None)

    def keys(self, tag: str) -> Tensor:
        """One 64-bit key per client: `[K]` int64. The tag is hashed in full."""
        if self.ids.device.type == "cpu":
            return torch.from_numpy(few_keys(self, tag)[0].view(np.int64))
        base = signed(word_of(self, tag))
        if ready(self.ids):
            from sparing.core.gpu.draws import keys_of

            return keys_of(self.ids, base)
        return mix(mix(self.ids.to(torch.int64) * signed(GOLDEN) + 1) ^ base)

    def uniform(self, tag: str, n: int) -> Tensor:
        """`[K, n]` float32 in [0, 1)."""
        return uniforms(hashes(self.keys(tag), n))

    def choose(self, tag: str, d: int, k: int) -> Tensor:
        """`[K, d]` bool with exactly k true in every row, every set of k positions equally likely."""
        return choose(self.keys(tag), d, k)


def word_of(ctx: Ctx, tag: str) -> int:
    """A tag in this round, as 64 bits."""
    digest = hashlib.blake2b(f"{ctx.seed}/{ctx.round}/{tag}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def few_keys(ctx: Ctx, *tags: str) -> np.ndarray:
    """`ctx.keys` of several tags, worked out on the host: `[tags, K]` uint64."""
    ids = ctx.here[0].to(torch.int64).numpy().view(np.uint64)
    words = np.array([[word_of(ctx, tag)] for tag in tags], dtype=np.uint64)
    return mix_few(mix_few(ids * GOLDEN_U + np.uint64(1)) ^ words)


def choose(keys: Tensor, d: int, k: int) -> Tensor:
    """The k positions whose words are smallest. Beyond one block only a narrow band around the cut is sorted."""
    if not 0 <= k <= d:
        raise ValueError(f"cannot choose {k} of {d} positions")
    if k in (0, d):
        return torch.full((len(keys), d), k == d, dtype=torch.bool, device=keys.device)
    if ready(keys):
        from sparing.core.gpu import select

        return select.choose(keys, d, k)
    if d > BLOCK:
        return torch.stack([choose_in_band(key, d, k) for key in keys.split(1)])
    words = hashes(keys, d)
    cut = words.kthvalue(k, dim=1, keepdim=True).values
    return words <= cut  # a 64-bit bijection of the position: no two words of a row are equal


def choose_in_band(key: Tensor, d: int, k: int) -> Tensor:
    share = k / d
    spread = 8 * math.sqrt(max(share * (1 - share) / d, 1e-30))  # eight standard deviations of the k-th word
    low = signed_level(share - spread)
    high = signed_level(share + spread)
    out = torch.empty(d, dtype=torch.bool, device=key.device)
    places, words = [], []
    for start in range(0, d, BLOCK):
        block = hashes(key, min(BLOCK, d - start), start)[0]
        torch.lt(block, low, out=out[start : start + len(block)])
        near = ((block >= low) & (block <= high)).nonzero()[:, 0]
        places.append(near + start)
        words.append(block[near])
    place, word = torch.cat(places), torch.cat(words)
    missing = k - int(out.sum())
    if not 0 <= missing <= len(place):  # beyond eight deviations: sort everything instead
        word, place = hashes(key, d)[0], torch.arange(d, device=key.device)
        out.zero_()
        missing = k
    out[place[word.argsort()[:missing]]] = True
    return out


def signed_level(u: float) -> int:
    """The signed word below which a share u of all words lies."""
    return min(max(int(u * 2.0**64), 0), WORD) - (1 << 63)
