"""The best that a byte budget can buy, by brute force: NumPy, nothing of the library.

A tensor is sent as values in some step, or as some components in some step, or not at all; its bytes are what the
entropy of its codes says. All combinations of such ways over all tensors are tried.
"""

import itertools
import math

import numpy as np

DEAD, RANK = 0.15, 32


def codes(x, step):
    return np.sign(x) * np.floor(np.abs(x) / step + 0.5 - DEAD)


def entropy(*arrays):
    """Bytes."""
    bits = 0.0
    for x in arrays:
        _, counts = np.unique(x, return_counts=True)
        bits -= float((counts * np.log2(counts / counts.sum())).sum())
    return bits / 8


def ways(x, steps, by="best"):
    """[(bytes, squared error)] of one matrix or vector."""
    found = [(0.0, float((x**2).sum()))]
    for step in steps if by != "components" or x.ndim == 1 else ():
        sent = codes(x, step)
        found.append((entropy(sent), float(((x - sent * step) ** 2).sum())))
    if x.ndim == 2 and by != "values":
        u, s, vt = np.linalg.svd(x, full_matrices=False)
        for step, rank in itertools.product(steps, range(1, min(len(s), RANK) + 1)):
            a, b = codes(s[:rank] * u[:, :rank], step), codes(s[:rank] * vt[:rank].T, step)
            size = np.sqrt(np.linalg.norm(a, axis=0) * np.linalg.norm(b, axis=0))
            got = step * (a / np.where(size > 0, size, 1)) @ b.T
            found.append((entropy(a, b), float(((x - got) ** 2).sum())))
    return found


def frontier(found):
    """Only those ways that no other beats in both."""
    best, out = math.inf, []
    for size, error in sorted(found):
        if error < best:
            best = error
            out.append((size, error))
    return out


def least(update, budget, steps, by="best"):
    """The least squared error of any combination of ways that takes at most so many bytes."""
    combined = [(0.0, 0.0)]
    for x in update.values():
        pairs = itertools.product(combined, frontier(ways(x, steps, by)))
        combined = frontier([(a + c, b + d) for (a, b), (c, d) in pairs if a + c <= budget])
    return min(error for _, error in combined)
