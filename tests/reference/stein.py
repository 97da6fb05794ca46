"""Stein-rule shrinkage, written from the formula in plain NumPy, in two passes, one tensor at a time."""

import numpy as np


def shrink(deltas, weights, m, clients, finite=True, low=0.2, high=1.0):
    """(c, g) for client updates [n, p], any weights [n], and target m [p]."""
    d = np.asarray(deltas, np.float64)
    w = np.asarray(weights, np.float64)
    w = w / w.sum()
    n, p = d.shape
    x = (w[:, None] * d).sum(0)
    distance = ((x - m) ** 2).sum()
    if n < 2 or p <= 2 or distance == 0:
        return 1.0, x
    spread = sum(w[i] * ((d[i] - x) ** 2).sum() for i in range(n)) / p
    s2 = spread / (1 - (w**2).sum())
    v = s2 * (w**2).sum() * ((1 - n / clients) if finite else 1.0)
    c = float(np.clip(1 - (p - 2) * v / distance, low, high))
    return c, x if c == 1 else m + c * (x - m)


class Ema:
    """The target: a bias-corrected running mean of earlier averages."""

    def __init__(self, beta):
        self.beta, self.sum, self.rounds = beta, 0.0, 0

    @property
    def value(self):
        return self.sum / (1 - self.beta**self.rounds) if self.beta < 1 else 0.0

    def take(self, x):
        self.sum = self.beta * self.sum + (1 - self.beta) * x
        self.rounds += 1


def rounds(cohorts, beta, warmup, clients):
    """The g of every round; `cohorts` is a list of (deltas [n, p], weights [n])."""
    target, out = Ema(beta), []
    for t, (deltas, weights) in enumerate(cohorts, 1):
        w = np.asarray(weights, np.float64) / np.sum(weights)
        x = (w[:, None] * np.asarray(deltas, np.float64)).sum(0)
        if t <= warmup or target.rounds == 0:
            out.append((1.0, x))
        else:
            out.append(shrink(deltas, weights, target.value, clients))
        target.take(x)
    return out
