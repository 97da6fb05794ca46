"""Adapters in float64 NumPy, from the formulas alone: an upload is (B, A, scale, weight), weights summing to 1."""

import numpy as np


def product(b, a, scale):
    return scale * b @ a


def mean_product(uploads):
    return sum(w * product(b, a, s) for b, a, s, w in uploads)


def average(uploads):
    return sum(w * b for b, _, _, w in uploads), sum(w * a for _, a, _, w in uploads)


def exact(uploads):
    """The means of both factors, and what joins the base."""
    (b, a), s = average(uploads), uploads[0][2]
    return b, a, sum(w * s * (one - b) @ (other - a) for one, other, _, w in uploads)


def stack(uploads):
    """What joins the base: all factors side by side, weights and scales in B."""
    return np.hstack([w * s * b for b, _, s, w in uploads]) @ np.vstack([a for _, a, _, _ in uploads])


def freeze_a(uploads, old, scale):
    """B alone, in the server's scale, each column over those who have it; where nobody has it, the old one."""
    new = old.copy()
    for i in range(old.shape[1]):
        has = [(w, s / scale * b[:, i]) for b, _, s, w in uploads if b.shape[1] > i]
        if has:
            new[:, i] = sum(w * x for w, x in has) / sum(w for w, _ in has)
    return new


def cut(matrix, rank):
    """The best approximation of this rank."""
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank] * s[:rank] @ vt[:rank]


def svd(uploads, keep):
    return cut(mean_product(uploads), keep)


def increments(uploads, sent, old, keep):
    """`sent`: the product that each of them was sent."""
    return cut(old + sum(u[3] * (product(*u[:3]) - t) for u, t in zip(uploads, sent, strict=True)), keep)


def partitioned(uploads, old, offered, keep):
    """`old`: the server's B, A and scale."""
    total, ends = 0, sorted(offered)
    for low, high in zip([0, *ends[:-1]], ends, strict=True):
        has = [(w, product(b[:, low:high], a[low:high], s)) for b, a, s, w in uploads if b.shape[1] >= high]
        weight = sum(w for w, _ in has)
        total = total + (
            sum(w / weight * p for w, p in has) if has else product(old[0][:, low:high], old[1][low:high], old[2])
        )
    return cut(total, keep)


def padded(uploads, rank, scale):
    """The server's B and A, in its scale, weighted by the norms of products."""
    norms = np.array([np.linalg.norm(product(b, a, s)) for b, a, s, _ in uploads])
    new_b, new_a = 0, 0
    for (b, a, s, _), w in zip(uploads, norms / norms.sum(), strict=True):
        more = rank - b.shape[1]
        new_b = new_b + w * np.sqrt(s / scale) * np.pad(b, ((0, 0), (0, more)))
        new_a = new_a + w * np.sqrt(s / scale) * np.pad(a, ((0, more), (0, 0)))
    return new_b, new_a
