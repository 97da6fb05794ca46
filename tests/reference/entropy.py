"""Two compressors from their formulas: float64, one client at a time, nothing of the library."""

import math

import numpy as np

DEAD, TOP = 0.15, 127
SLOPE, LOST, FINEST = 0.25, 0.1, 0.5


def codes(x, step):
    """Multiples of the step; a value takes the larger of two only from 0.65 of the way on."""
    return np.sign(x) * np.floor(np.abs(x) / step + 0.5 - DEAD) if step else np.zeros_like(x)


def long_enough(step, x):
    return max(step, np.abs(x).max() / TOP)


def ecsq(update, step, over="model"):
    """{name: what arrives} of {name: array}."""
    out = {}
    for names in [list(update)] if over == "model" else [[name] for name in update]:
        x = np.concatenate([update[name].ravel() for name in names])
        common = min(step * math.sqrt((x**2).mean()), np.abs(x).max())
        for name in names:
            own = long_enough(common, update[name])
            out[name] = codes(update[name], own) * own
    return out


def to_matrix(x):
    """The matrix of a tensor and the way back; None where two components would not make it smaller."""
    if x.ndim < 2:
        return None
    wide = x.reshape(len(x), -1)
    if x.ndim == 4:
        m, n, h, w = x.shape
        tall = np.array([[x[f, c, i, j] for c in range(n) for j in range(w)] for f in range(m) for i in range(h)])
        if sum(tall.shape) < sum(wide.shape):
            back = lambda y: y.reshape(m, h, n, w).transpose(0, 2, 1, 3)  # noqa: E731
            return (tall, back) if 2 * sum(tall.shape) < tall.size else None
    return (wide, lambda y: y.reshape(x.shape)) if 2 * sum(wide.shape) < wide.size else None


def lowrank(update, energy, rank=32):
    """{name: what arrives} of {name: array}: components by s^2 / (rows + columns), one step for all."""
    seen = {name: found for name, x in update.items() if (found := to_matrix(x)) is not None}
    parts = []
    for name, (m, _) in seen.items():
        u, s, vt = np.linalg.svd(m, full_matrices=False)
        parts += [(s[i] ** 2 / sum(m.shape), name, s[i], u[:, i], vt[i]) for i in range(min(rank, len(s)))]
    parts.sort(key=lambda part: -part[0])
    whole = sum(float((x**2).sum()) for x in update.values())
    held = whole - sum(float((m**2).sum()) for m, _ in seen.values())
    size, cut = 0, 0.0
    for ratio, _, s, u, v in parts:
        held, size, cut = held + s**2, size + len(u) + len(v), ratio
        if held - LOST / SLOPE * ratio * size >= energy * whole:
            break
    cut = max(cut, SLOPE * FINEST**2 * whole / sum(x.size for x in update.values()))
    step = math.sqrt(cut / SLOPE)
    out = {}
    for name, (m, back) in seen.items():
        mine = [(s * u, s * v) for ratio, where, s, u, v in parts if where == name and ratio >= cut and s > 0]
        own = max([step] + [long_enough(step, y) for pair in mine for y in pair])
        got = np.zeros_like(m)
        for p, q in mine:
            a, b = codes(p, own), codes(q, own)
            if a.any() and b.any():
                got += own * np.outer(a, b) / math.sqrt(np.linalg.norm(a) * np.linalg.norm(b))
        out[name] = back(got)
    rest = [name for name in update if name not in seen]
    if rest:
        own = long_enough(step, np.concatenate([update[name].ravel() for name in rest]))
        out |= {name: codes(update[name], own) * own for name in rest}
    return out
