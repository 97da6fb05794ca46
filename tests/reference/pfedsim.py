"""FedSim and pFedSim in float64, one client at a time, from the formulas alone. Models are {name: array}."""

import numpy as np


def flat(model, names):
    return np.concatenate([model[name].ravel() for name in names])


def cosine(a, b):
    """1 where b has no direction, None where only a has none."""
    if not b.any():
        return 1.0
    return float(a @ b / np.sqrt((a @ a) * (b @ b))) if a.any() else None


def omega(cos, n, q=1.0, softmax=None):
    """Unnormalised: max(cos, 0) n^q, or exp(cos / T) n^q."""
    if cos is None:
        return 0.0
    return (max(cos, 0.0) if softmax is None else np.exp(cos / softmax)) * n**q


def seed_form(model, moves, counts, home=(), q=1.0, on="weights", softmax=None):
    """Yields (server model, {client: cosine}, {client: normalised weight}, {client: its model}) of every round."""
    server = {name: x.astype(np.float64) for name, x in model.items()}
    shared = [name for name in server if name not in home]
    own, last, pause, coming = {}, dict.fromkeys(shared, 0.0), 0, 1
    for cohort in moves:
        after = {}
        for k, move in cohort.items():
            start = server | own.get(k, {})
            after[k] = {name: start[name] + move[name] for name in server}
            own[k] = {name: after[k][name] for name in home}
        delta = {k: {name: after[k][name] - server[name] for name in shared} for k in after}
        if on == "weights":
            cos = {k: cosine(flat(after[k], shared), flat(server, shared)) for k in after}
        else:
            before = {name: last[name] + np.zeros_like(server[name]) for name in shared}
            cos = {k: cosine(flat(delta[k], shared), flat(before, shared)) for k in after}
        weight = {k: omega(cos[k], counts[k], q, softmax) for k in after}
        whole = sum(weight.values())
        share = {k: w / whole if whole else 0.0 for k, w in weight.items()}
        last = {name: sum(share[k] * delta[k][name] for k in after) for name in shared}
        similar = sum(counts[k] ** q for k in after if weight[k] > 0)
        follow = on == "weights" or 2 * similar > sum(counts[k] ** q for k in after)
        if follow:
            server = server | {name: server[name] + last[name] for name in shared}
        if pause:
            pause -= 1
        elif not follow:
            pause, coming = coming, 2 * coming
        if pause:
            last = dict.fromkeys(shared, 0.0)
        yield server, cos, share, after


def head_similarity(a, b):
    """Mean over classes of the cosine of two heads' rows; a row of zeros is like nothing."""
    cos = []
    for x, y in zip(a, b, strict=True):
        size = np.sqrt((x @ x) * (y @ y))
        cos.append(x @ y / size if size else 0.0)
    return float(np.mean(cos))


def blend_of(i, similar):
    """{j: weight} of client i: -log(1 - s_ij) over all j with s_ij > 0, itself among them, normalised."""
    s = {j: value for (a, j), value in similar.items() if a == i and value > 0} | {i: 0.9999}
    v = {j: -np.log(1 - min(value, 1 - 1e-4)) for j, value in s.items()}
    whole = sum(v.values())
    return {j: x / whole for j, x in v.items()}


def published(model, moves, counts, home, head, warmup):
    """Yields (server model, {(i, j): similarity}, {client: what it started from}) of every round."""
    server = {name: x.astype(np.float64) for name, x in model.items()}
    extractor = [name for name in server if name not in home]
    heads, stored, similar = {}, {}, {}
    for t, cohort in enumerate(moves):
        warm, start = t < warmup, {}
        for k in cohort:
            start[k] = dict(server)
            if not warm and k in stored:
                blend = blend_of(k, similar)
                start[k] |= {name: sum(w * stored[j][name] for j, w in blend.items()) for name in extractor}
            if not warm and k in heads:
                start[k] |= heads[k]
        after = {k: {name: start[k][name] + move[name] for name in server} for k, move in cohort.items()}
        heads |= {k: {name: x[name] for name in home} for k, x in after.items()}
        whole = sum(counts[k] for k in cohort)
        for name in server if warm else extractor:
            server[name] = sum(counts[k] * after[k][name] for k in cohort) / whole
        if not warm:
            stored |= {k: {name: x[name] for name in extractor} for k, x in after.items()}
            for i in cohort:
                for j in cohort:
                    if i != j:
                        similar[i, j] = max(0.0, head_similarity(after[i][head], after[j][head]))
        yield dict(server), dict(similar), start
