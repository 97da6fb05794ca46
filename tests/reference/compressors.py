"""Compressors from their formulas: float64, one tensor of one client at a time, nothing of the library."""

import math

import numpy as np


def stepped(x, levels, size, draw=None):
    """Steps of size / levels; to the nearest, or at random between the two neighbours by a draw in [0, 1)."""
    if size == 0:
        return np.zeros_like(x)
    share = np.abs(x) / size * levels
    low = np.floor(share)
    if draw is None:
        step = np.round(share)
    else:  # a draw d rounds up where it is among the largest; for negative values among the smallest
        up = np.where(x < 0, draw < share - low, draw >= 1 - (share - low))
        step = low + up
    return np.sign(x) * step * size / levels


def nearest(x, bits):
    return stepped(x, 2 ** (bits - 1) - 1, np.abs(x).max())


def qsgd(x, levels, draw):
    return stepped(x, levels, math.sqrt(float((x**2).sum())), draw)


def terngrad(x, draw):
    return stepped(x, 1, np.abs(x).max(), draw)


def scaled_sign(x):
    return np.where(x < 0, -1.0, 1.0) * np.abs(x).mean()


def sparse_ternary(x, ratio):
    """The k largest by magnitude become their sign times their mean magnitude."""
    k = max(1, math.ceil(round(ratio * x.size, 9)))
    chosen = np.argsort(-np.abs(x).ravel(), kind="stable")[:k]
    out = np.zeros(x.size)
    out[chosen] = np.sign(x.ravel()[chosen]) * np.abs(x.ravel()[chosen]).mean()
    return out.reshape(x.shape)


def normal_levels(bits, rounds=1500):
    """Lloyd's algorithm for the normal density: all 2^bits levels, rising; each the mean of its cell."""
    levels = np.linspace(-1.5, 1.5, 2**bits)
    for _ in range(rounds):
        cuts = [-np.inf, *((levels[1:] + levels[:-1]) / 2), np.inf]
        below = np.array([math.erf(c / math.sqrt(2)) / 2 for c in cuts])
        density = np.array([math.exp(-c * c / 2) / math.sqrt(2 * math.pi) for c in cuts])
        levels = -np.diff(density) / np.diff(below)
    return levels


def hadamard(d):
    h = np.ones((1, 1))
    while len(h) < d:
        h = np.block([[h, h], [h, -h]])
    return h


def eden(x, flips, levels, unbiased=True):
    """x filled up to d, a power of two; the rotation, by signs [2, d], is written out as a matrix."""
    d = flips.shape[1]
    rotation = (hadamard(d) * flips[1]) @ (hadamard(d) * flips[0]) / d
    padded = np.concatenate([x.ravel(), np.zeros(d - x.size)])
    if not padded.any():
        return np.zeros_like(x)
    rotated = rotation @ padded
    z = rotated * math.sqrt(d) / np.linalg.norm(padded)
    q = levels[np.abs(z[:, None] - levels).argmin(1)]
    scale = (padded @ padded) / (rotated @ q) if unbiased else (rotated @ q) / (q @ q)
    return (scale * rotation.T @ q)[: x.size].reshape(x.shape)


def low_rank(x, q):
    """One step of power iteration: (the matrix as the receiver sees it, the next q)."""
    m = x.reshape(x.shape[0], -1)
    p, _ = np.linalg.qr(m @ q)
    return (p @ (p.T @ m)).reshape(x.shape), m.T @ p


def play(model, moves, counts, send, server=None, lost=()):
    """Rounds over {name: array}. `send(t, k, u)` gives what arrives of client k's move u and remembers on its own.

    `server(t, step, here)` may change the mean of what arrived. Gives the models after every round.
    """
    model = {name: np.asarray(x, np.float64) for name, x in model.items()}
    history = []
    for t, cohort in enumerate(moves):
        sent = {k: send(t, k, move) for k, move in cohort.items()}
        here = [k for k in cohort if (t, k) not in lost]
        total = sum(counts[k] for k in here)
        step = {name: sum(counts[k] / total * sent[k][name] for k in here) for name in model}
        step = server(t, step, here) if server else step
        model = {name: x + step[name] for name, x in model.items()}
        history.append(model)
    return history


def with_memory(compress):
    """Error feedback around `compress(t, k, name, x)`."""
    residual = {}

    def send(t, k, u):
        wanted = {name: x + residual.get((k, name), 0.0) for name, x in u.items()}
        sent = {name: compress(t, k, name, x) for name, x in wanted.items()}
        residual.update({(k, name): wanted[name] - sent[name] for name in u})
        return sent

    return send, residual


class Ef21:
    """Richtarik et al.: g_k <- g_k + C(u_k - g_k); the server's g is the mean over all clients, by samples."""

    def __init__(self, counts, compress, lost=()):
        self.counts, self.compress, self.lost = counts, compress, lost
        self.g, self.sent = {}, {}

    def send(self, t, k, u):
        old = self.g.get(k, {name: np.zeros_like(x) for name, x in u.items()})
        sent = {name: self.compress(x - old[name]) for name, x in u.items()}
        if (t, k) not in self.lost:
            self.g[k] = {name: old[name] + sent[name] for name in u}
        return sent

    def server(self, t, step, here):
        everyone = sum(self.counts)
        return {x: sum(self.counts[k] / everyone * g[x] for k, g in self.g.items()) for x in step}


class Dgc:
    """Lin et al., algorithm 2, with `choose(t, x)` the mask of what is sent of one tensor."""

    def __init__(self, choose, momentum, clip=None, lost=()):
        self.choose, self.momentum, self.clip, self.lost = choose, momentum, clip, lost
        self.u, self.v = {}, {}

    def send(self, t, k, g, cohort):
        zero = {name: np.zeros_like(x) for name, x in g.items()}
        norm = math.sqrt(sum(float((x**2).sum()) for x in g.values()))
        limit = math.inf if self.clip is None else self.clip / math.sqrt(cohort)
        scale = min(1.0, limit / norm) if norm else 1.0
        u = {name: self.momentum * self.u.get(k, zero)[name] + scale * x for name, x in g.items()}
        v = {name: self.v.get(k, zero)[name] + u[name] for name in g}
        masks = {name: self.choose(t, x) for name, x in v.items()}
        sent = {name: np.where(masks[name], v[name], 0) for name in g}
        self.u[k] = {name: np.where(masks[name], 0, u[name]) for name in g}
        self.v[k] = v if (t, k) in self.lost else {name: np.where(masks[name], 0, v[name]) for name in g}
        return sent
