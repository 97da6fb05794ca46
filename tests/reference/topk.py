"""Top-k and random-k with error feedback, from their formulas: float64, client by client, nothing of the library."""

import math

import numpy as np


def count(ratio, size):
    return max(1, math.ceil(round(ratio * size, 9)))


def largest(u, ratio):
    """The k largest magnitudes of the whole array, ties to the lowest index, zeros never: bool like u."""
    order = np.argsort(-np.abs(u).ravel(), kind="stable")[: count(ratio, u.size)]
    mask = np.zeros(u.size, bool)
    mask[order] = True
    return mask.reshape(u.shape) & (u != 0)


def above_quantile(u, ratio):
    return (np.abs(u) >= np.quantile(np.abs(u), 1 - ratio)) & (u != 0)


def over_model(u, ratio):
    """All layers compete: {name: bool}."""
    names = list(u)
    mask = largest(np.concatenate([u[name].ravel() for name in names]), ratio)
    parts = np.split(mask, np.cumsum([u[name].size for name in names])[:-1])
    return {name: part.reshape(u[name].shape) for name, part in zip(names, parts, strict=True)}


def play(model, moves, counts, choose, memory):
    """Rounds over {name: array}. `moves[t][k]` is what client k's training adds in round t; who is absent sits out.

    `choose(t, k, u)` gives {name: bool}: what is sent of u. Gives (models after every round, residuals).
    """
    model = {name: np.asarray(x, np.float64) for name, x in model.items()}
    residual, history = {}, []
    for t, cohort in enumerate(moves):
        total = sum(counts[k] for k in cohort)
        step = {name: np.zeros_like(x) for name, x in model.items()}
        for k, move in cohort.items():
            old = residual.get(k) if memory else None
            u = {name: move[name] + (old[name] if old else 0.0) for name in model}
            masks = choose(t, k, u)
            for name, x in u.items():
                step[name] += counts[k] / total * np.where(masks[name], x, 0.0)
            residual[k] = {name: np.where(masks[name], 0.0, x) for name, x in u.items()}
        model = {name: x + step[name] for name, x in model.items()}
        history.append(model)
    return history, residual


def over_pair(b, a, whole_b, whole_a, ratio):
    """Both factors of an adapter compete, each entry by how far it alone moves their product: two masks."""
    moves_b = np.abs(b) * np.linalg.norm(whole_a, axis=1)[None, :]
    moves_a = np.abs(a) * np.linalg.norm(whole_b, axis=0)[:, None]
    mask = largest(np.concatenate([moves_b.ravel(), moves_a.ravel()]), ratio)
    return mask[: b.size].reshape(b.shape), mask[b.size :].reshape(a.shape)
