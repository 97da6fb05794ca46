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
    """Gradient descent on |A B - target|^2 / 2 + decay |A B|^2 / 2, long columns and rows at their pace."""
    for _ in range(steps):
        off = a @ b - target
        ga, gb = off @ b.T + decay * a @ b @ b.T, a.T @ off + decay * a.T @ a @ b
        slow = 4 / np.maximum(4, (a**2).sum(0) + (b**2).sum(1))
        a, b = a - lr * ga * slow, b - lr * gb * slow[:, None]
    return a, b


def descend_whole(w, target, lr, steps):
    for _ in range(steps):
        w = w - lr * (w - target)
    return w


def play(model, thin, cohorts, targets, samples, ratios, size_of, weighting, temperature, lr, steps, decay, blend):
    """Rounds of clients that pull every layer to a target of their own; layers `thin` are factored below ratio 1."""
    for cohort in cohorts:
        mine = [ratios[size_of(k)] for k in cohort]
        w, old = omegas(mine, [samples[k] for k in cohort], weighting, temperature, max(ratios))
        if blend != "products":
            w, old = w / w.sum(), None
        after = {}
        for name, x in model.items():
            trained = [trained_by(x, targets[k][name], name in thin, gamma, lr, steps, decay)
                       for k, gamma in zip(cohort, mine, strict=True)]  # fmt: skip
            if blend == "partitioned" and name in thin and min(ratios) < 1:
                after[name] = partitioned(x, trained, mine, w, ratios)
                continue
            after[name] = (0 if old is None else old) * x
            for (grown, _, sent), omega in zip(trained, w, strict=True):
                after[name] = after[name] + omega * (grown if blend == "products" else x + grown - sent)
        model = after
    return model


def trained_by(x, target, factored, gamma, lr, steps, decay):
    """The weight that a client ends with, its factors (None: it has none), and the weight that it began with."""
    if not factored or gamma == 1:
        return descend_whole(x, target, lr, steps), None, x
    a0, b0 = factors(x, rank(x.shape, gamma))
    a, b = descend(a0, b0, matrix(target), lr, steps, decay)
    return weight(a @ b, x.shape), (a, b), weight(a0 @ b0, x.shape)


def partitioned(x, trained, mine, w, ratios):
    """Each partition of ranks averaged over those who have it; what nobody has stays the server's."""
    ends = sorted({rank(x.shape, ratio) for ratio in ratios if ratio < 1})
    u, s, vt = np.linalg.svd(matrix(x), full_matrices=False)
    ends += [len(s)] if max(ratios) == 1 else []
    whole, low = np.zeros_like(matrix(x)), 0
    for number, high in enumerate(ends):
        total, part = 0.0, 0.0
        for (grown, pair, _), gamma, omega in zip(trained, mine, w, strict=True):
            if gamma < 1 and rank(x.shape, gamma) < high:
                continue
            if gamma < 1 and max(ratios) == 1 and number == len(ends) - 1:
                continue
            if pair is None:
                p, t, q = np.linalg.svd(matrix(grown), full_matrices=False)
                pair = (p * t, q)
            total, part = total + omega, part + omega * pair[0][:, low:high] @ pair[1][low:high]
        if not total:
            part, total = u[:, low:high] * s[low:high] @ vt[low:high], 1.0
        whole, low = whole + part / total, high
    return weight(whole + u[:, low:] * s[low:] @ vt[low:], x.shape)


def relative_error(weight_, r):
    s = np.linalg.svd(matrix(weight_), compute_uv=False)
    return math.sqrt((s[r:] ** 2).sum() / (s**2).sum())
