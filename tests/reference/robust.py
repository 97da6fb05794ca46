"""Robust blends from their formulas, in float64 NumPy. Rows are clients; NaN where a client has no vote."""

import itertools
import math

import numpy as np


def floor_share(share, n):
    return next(k for k in range(n, -1, -1) if k <= share * n + 1e-9)


def median(x, weight=None):
    out = np.zeros(x.shape[1])
    for j in range(x.shape[1]):
        v = sorted(x[~np.isnan(x[:, j]), j])
        if v:
            c = len(v)
            out[j] = v[c // 2] if c % 2 else (v[c // 2 - 1] + v[c // 2]) / 2
    return out


def trimmed_mean(x, weight=None, share=0.2):
    out = np.zeros(x.shape[1])
    for j in range(x.shape[1]):
        v = sorted(x[~np.isnan(x[:, j]), j])
        b = floor_share(share, len(v))
        if v:
            out[j] = np.mean(v[b : len(v) - b])
    return out


def voters_mean(x, weight):
    out = np.zeros(x.shape[1])
    for j in range(x.shape[1]):
        here = ~np.isnan(x[:, j]) & (weight > 0)
        if here.any():
            out[j] = np.average(x[here, j], weights=weight[here])
    return out


def scale_up(difference, everywhere):
    """The squared length over the coordinates known, as if over all that anybody votes on."""
    known = difference[~np.isnan(difference)]
    return np.sum(known**2) * everywhere / len(known) if len(known) else math.inf


def krum_choice(x, share=0.2, m=1):
    n, everywhere = len(x), int((~np.isnan(x)).any(axis=0).sum())
    f = floor_share(share, n)
    while f > 0 and not n > 2 * f + 2:
        f -= 1
    near = max(n - f - 2, 1)
    distance = np.full((n, n), math.inf)
    for i, j in itertools.permutations(range(n), 2):
        distance[i, j] = scale_up(x[i] - x[j], everywhere)
    score = [sum(sorted(row)[:near]) for row in distance]
    return sorted(sorted(range(n), key=lambda i: (score[i], i))[: near if m == "most" else m])


def krum(x, weight=None, share=0.2, m=1):
    chosen = np.zeros(len(x))
    chosen[krum_choice(x, share, m)] = 1.0
    return voters_mean(x, chosen)


def geomed(x, weight, nu=1e-6, steps=4):
    everywhere = int((~np.isnan(x)).any(axis=0).sum())
    z = voters_mean(x, weight)
    for _ in range(steps):
        beta = [w / max(nu, math.sqrt(scale_up(row - z, everywhere))) for w, row in zip(weight, x, strict=True)]
        z = voters_mean(x, np.array(beta))
    return z


def norm_bound(x, weight, bound=1.0):
    short = [row * min(1.0, bound / max(np.sqrt(np.nansum(row**2)), 1e-300)) for row in x]
    return voters_mean(np.array(short), weight)
