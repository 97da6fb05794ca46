"""FedProx, FedPer, LG-FedAvg, FedRep, FedBABU, Ditto and fine-tuning in float64, from their descriptions alone.

The network is y = B tanh(A x + a) + b with mean squared error, its full gradients written out. BODY and HEAD are its
two layers. A stretch of training is (steps, lr, names that move).
"""

import numpy as np

BODY, HEAD = ("0.weight", "0.bias"), ("2.weight", "2.bias")
ALL = BODY + HEAD


def gradient(p, x, y):
    """Of the mean over samples and outputs of (output - y)^2."""
    hidden = np.tanh(x @ p["0.weight"].T + p["0.bias"])
    wrong = 2 * (hidden @ p["2.weight"].T + p["2.bias"] - y) / y.size
    back = (wrong @ p["2.weight"]) * (1 - hidden**2)
    return {"0.weight": back.T @ x, "0.bias": back.sum(0), "2.weight": wrong.T @ hidden, "2.bias": wrong.sum(0)}


def trained(p, data, stretches, prox=0.0, anchor=None):
    p, anchor = dict(p), anchor or p
    for steps, lr, names in stretches:
        for _ in range(steps):
            g = gradient(p, *data)
            p |= {name: p[name] - lr * (g[name] + prox * (p[name] - anchor[name])) for name in names}
    return p


def averaged(models, counts):
    whole = sum(counts[k] for k in models)
    return {name: sum(counts[k] * m[name] for k, m in models.items()) / whole for name in ALL}


def rounds(p, data, cohorts, stretches, home=(), prox=0.0):
    """Yields (server, {client: its own tensors}): layers `home` stay with the client, the others are averaged."""
    counts = {k: len(x) for k, (x, _) in enumerate(data)}
    server, own = dict(p), {}
    for cohort in cohorts:
        models = {k: trained(server | own.get(k, {}), data[k], stretches, prox) for k in cohort}
        own |= {k: {name: m[name] for name in home} for k, m in models.items()}
        mean = averaged(models, counts)
        server = server | {name: mean[name] for name in ALL if name not in home}
        yield dict(server), dict(own)


def ditto(p, data, cohorts, stretches, second, lam):
    """Yields (server, {client: its second model}), each drawn to the model that the server sent this round."""
    mine = {}
    counts = {k: len(x) for k, (x, _) in enumerate(data)}
    server = dict(p)
    for cohort in cohorts:
        mine |= {k: trained(mine.get(k, p), data[k], second, lam, anchor=server) for k in cohort}
        server = averaged({k: trained(server, data[k], stretches) for k in cohort}, counts)
        yield dict(server), dict(mine)
