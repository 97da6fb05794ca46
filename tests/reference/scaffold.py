"""SCAFFOLD, option II, in float64 on least squares, from the formulas alone; full gradients."""

import numpy as np


def gradient(w, x, y):
    """Of mean (x w - y)^2."""
    return 2 * x.T @ (x @ w - y) / len(x)


def fedavg(w, data, lr, steps, rounds):
    """All clients, alike, every round: where plain averaging of several local steps goes."""
    for _ in range(rounds):
        models = []
        for x, y in data:
            here = w.copy()
            for _ in range(steps):
                here = here - lr * gradient(here, x, y)
            models.append(here)
        w = np.mean(models, axis=0)
    return w


def optimum(data):
    """Of the mean over clients of their mean squared errors."""
    a = np.mean([x.T @ x / len(x) for x, y in data], axis=0)
    b = np.mean([x.T @ y / len(x) for x, y in data], axis=0)
    return np.linalg.solve(a, b)


def rounds(w, data, cohorts, lr, steps, by_samples=False):
    """Yields (w, c, {k: c_k}). A cohort is who arrived; `steps[k]` local steps each."""
    own = {k: np.zeros_like(w) for k in range(len(data))}
    c, everyone = np.zeros_like(w), sum(len(x) for x, _ in data)
    for cohort in cohorts:
        after, change = {}, {}
        for k in cohort:
            y = w.copy()
            for _ in range(steps[k]):
                y = y - lr * (gradient(y, *data[k]) - own[k] + c)
            after[k] = y
            new = own[k] - c + (w - y) / (steps[k] * lr)
            change[k] = new - own[k]
        n = {k: len(data[k][0]) if by_samples else 1 for k in cohort}
        all_n = everyone if by_samples else len(data)
        w = sum(n[k] * after[k] for k in cohort) / sum(n.values())
        c = c + sum(n[k] * change[k] for k in cohort) / all_n
        own = own | {k: own[k] + change[k] for k in cohort}
        yield w, c, dict(own)
