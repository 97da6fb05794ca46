"""FedHM in float64 NumPy, from the formulas alone."""

import math

import numpy as np


def matrix(weight):
    """(m, n, kh, kw) -> (m kh, n kw), entry by entry; a dense weight is its own matrix."""
    if weight.ndim == 2:
        return weight.copy()
    m, n, kh, kw = weight.shape
    out = np.zeros((m * kh, n * kw))
    for i in range(m):
        for j in range(n):
            for y in range(kh):
                for x in range(kw):
                    out[i * kh + y, j * kw + x] = weight[i, j, y, x]
    return out


def weight(matrix_, shape):
    if len(shape) == 2:
        return matrix_.copy()
    m, n, kh, kw = shape
    out = np.zeros(shape)
    for i in range(m):
        for j in range(n):
            for y in range(kh):
                for x in range(kw):
                    out[i, j, y, x] = matrix_[i * kh + y, j * kw + x]
    return out


def rank(shape, ratio):
    m, n, kh, kw = (*shape, 1, 1)[:4]
    return min(max(round(ratio * m), 1), m * kh, n * kw)


def factors(weight_, r):
    u, s, vt = np.linalg.svd(matrix(weight_), full_matrices=False)
    return u[:, :r] * np.sqrt(s[:r]), np.sqrt(s[:r])[:, None] * vt[:r]


def conv(x, w, stride, padding, dilation):
    """One image (n, H, W), zero padding, looped."""
    m, _, kh, kw = w.shape
    x = np.pad(x, ((0, 0), (padding[0],) * 2, (padding[1],) * 2))
    high = (x.shape[1] - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    wide = (x.shape[2] - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    out = np.zeros((m, high, wide))
    for i in range(high):
        for j in range(wide):
            top, left = i * stride[0], j * stride[1]
            rows, columns = top + dilation[0] * np.arange(kh), left + dilation[1] * np.arange(kw)
            out[:, i, j] = np.tensordot(w, x[:, rows][:, :, columns], axes=3)
    return out


def omegas(ratios, samples, weighting, temperature, largest):
    """Weights of the clients that came, and of the old model (None where it does not join)."""
    gamma, n = np.array(ratios, float), np.array(samples, float)
    joins = not (gamma == largest).any()
    if joins:
        gamma, n = np.append(gamma, 1.0), np.append(n, n.mean())
    if weighting == "samples":
        weights = n / n.sum()
    else:
        logit = {"ratio": gamma, "factor": -1 / gamma, "uniform": 0 * gamma}[weighting] / temperature
        weights = np.exp(logit - logit.max())
        weights = weights / weights.sum()
    return (weights[:-1], weights[-1]) if joins else (weights, None)


def descend(a, b, target, lr, steps, decay):
    """Gradient descent on |A B - target|^2 / 2 + decay |A B|^2 / 2."""
    for _ in range(steps):
        off = a @ b - target
        ga, gb = off @ b.T + decay * a @ b @ b.T, a.T @ off + decay * a.T @ a @ b
        a, b = a - lr * ga, b - lr * gb
    return a, b


def descend_whole(w, target, lr, steps):
    for _ in range(steps):
        w = w - lr * (w - target)
    return w


def play(model, thin, cohorts, targets, samples, ratios, size_of, weighting, temperature, lr, steps, decay):
    """Rounds of clients that pull every layer to a target of their own; layers `thin` are factored below ratio 1."""
    for cohort in cohorts:
        mine = [ratios[size_of(k)] for k in cohort]
        w, old = omegas(mine, [samples[k] for k in cohort], weighting, temperature, max(ratios))
        after = {name: (0 if old is None else old) * x for name, x in model.items()}
        for k, gamma, omega in zip(cohort, mine, w, strict=True):
            for name, x in model.items():
                if name in thin and gamma < 1:
                    a, b = factors(x, rank(x.shape, gamma))
                    a, b = descend(a, b, matrix(targets[k][name]), lr, steps, decay)
                    grown = weight(a @ b, x.shape)
                else:
                    grown = descend_whole(x, targets[k][name], lr, steps)
                after[name] = after[name] + omega * grown
        model = after
    return model


def relative_error(weight_, r):
    s = np.linalg.svd(matrix(weight_), compute_uv=False)
    return math.sqrt((s[r:] ** 2).sum() / (s**2).sum())
