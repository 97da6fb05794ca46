"""FedAdagrad, FedAdam and FedYogi in float64, from the formulas alone. Models are {name: array}."""

import numpy as np


def second_moment(kind, v, d, beta2):
    if kind == "fedadagrad":
        return v + d**2
    if kind == "fedadam":
        return beta2 * v + (1 - beta2) * d**2
    return v - (1 - beta2) * d**2 * np.sign(v - d**2)


def rounds(kind, model, moves, masks, counts, lr, beta1, beta2, tau):
    """Yields (server model, m, v). `masks[t]` says where round t has votes: {name: bool array}."""
    server = {name: x.astype(np.float64) for name, x in model.items()}
    m = {name: np.zeros_like(x) for name, x in server.items()}
    v = {name: np.full_like(x, tau**2) for name, x in server.items()}
    for cohort, mask in zip(moves, masks, strict=True):
        whole = sum(counts[k] for k in cohort)
        for name, here in mask.items():
            d = sum(counts[k] * cohort[k][name] for k in cohort) / whole
            m[name] = np.where(here, beta1 * m[name] + (1 - beta1) * d, m[name])
            v[name] = np.where(here, second_moment(kind, v[name], d, beta2), v[name])
            server[name] = np.where(here, server[name] + lr * m[name] / (np.sqrt(v[name]) + tau), server[name])
        yield dict(server), dict(m), dict(v)
