"""Partial model sharing, written from the formulas in plain NumPy over one flat vector of d parameters."""

import numpy as np


def fraction(t, p, start, warmup, shape):
    """p_t: `start` in round 1, p after `warmup` rounds."""
    s = min(1.0, (t - 1) / warmup)
    if shape == "step":
        return start if s < 1 else p
    if shape == "cosine":
        s = 0.5 - 0.5 * np.cos(np.pi * s)
    return start + (p - start) * s


def how_many(p, d):
    return int(np.floor(p * d + 0.5))


def largest(score, k):
    """A mask of the k largest; meant for scores without ties."""
    mask = np.zeros(len(score), bool)
    mask[np.argsort(-score)[:k]] = True
    return mask


def scored(score, update, covered):
    """|last aggregated update| * 0.9^age, one round later."""
    return np.where(covered, np.abs(update), 0.9 * score)


def slope(theta, x, y):
    """The gradient at theta of the mean over samples of (x theta - y)^2."""
    return 2 * x.T @ (x @ theta - y) / len(y)


def layers_in_turn(sizes, target, rounds):
    """The layers of every round: the next ones, at least one, as long as one more brings their size nearer."""
    at, out = 0, []
    for _ in range(rounds):
        taken = [at % len(sizes)]
        while len(taken) < len(sizes):
            now = sum(sizes[i] for i in taken)
            if abs(now + sizes[(at + len(taken)) % len(sizes)] - target) >= abs(now - target):
                break
            taken.append((at + len(taken)) % len(sizes))
        at += len(taken)
        out.append(taken)
    return out


class Federation:
    """A server and N clients, each with a whole model of its own."""

    def __init__(self, theta, clients):
        self.theta = np.array(theta, np.float64)
        self.own = np.tile(self.theta, (clients, 1))
        self.met = np.zeros(clients, bool)
        self.score = np.zeros_like(self.theta)

    def round(self, who, samples, masks, train, download=True):
        """`masks` [n, d]: what client who[j] is sent and returns; newcomers are sent everything if `download`.

        Gives the models that training started from.
        """
        starts, after = [], []
        for k, mask in zip(who, masks, strict=True):
            sent = np.ones_like(mask) if download and not self.met[k] else mask
            start = np.where(sent, self.theta, self.own[k])
            starts.append(start)
            self.own[k] = train(start, k)
            after.append(self.own[k])
            self.met[k] = True
        weight = np.array(samples, np.float64)[:, None] * masks
        total = weight.sum(0)
        covered = total > 0
        mean = (weight * np.array(after)).sum(0) / np.where(covered, total, 1)
        new = np.where(covered, mean, self.theta)
        self.score = scored(self.score, new - self.theta, covered)
        self.theta = new
        return np.array(starts)


def divergence(starts):
    """The mean over coordinates of the variance between clients."""
    return starts.var(axis=0).mean()


def chance(p, rounds, q=1.0):
    """That a coordinate reaches one client, taking part with probability q, within so many rounds."""
    return 1 - (1 - p * q) ** rounds
