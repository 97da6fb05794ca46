"""FedSCR from its formulas: float64, one client at a time, nothing of the library."""

import numpy as np


def blocks(u, threshold, mode="absolute"):
    """Which (filter, channel) blocks of u [F, C, ...] are sent: bool [F, C]."""
    filt = np.array([np.abs(u[i]).sum() for i in range(u.shape[0])])
    chan = np.array([np.abs(u[:, j]).sum() for j in range(u.shape[1])])
    if mode == "relative":
        if not u.any():
            return np.zeros(u.shape[:2], bool)
        filt, chan = filt / filt.max(), chan / chan.max()
    if mode == "budget":
        return within(filt, chan, np.full(u.shape[:2], u[0, 0].size), threshold)
    return np.outer(filt > threshold, chan > threshold)


def within(filt, chan, size, share):
    """The lowest threshold that sends at most that share of the entries, or else the highest that sends anything."""
    best = np.zeros(size.shape, bool)
    for bar in sorted({0.0, *filt, *chan}, reverse=True):
        sent = np.outer(filt > bar, chan > bar)
        if (sent * size).sum() > share * size.sum() + 1e-9 and (best * size).any():
            return best
        best = sent
    return best


def shaped(mask, like):
    return mask.reshape(mask.shape + (1,) * (like.ndim - 2))


def play(model, moves, counts, thin, threshold, mode="absolute", everyone=None, lost=(), adaptive=False):
    """Rounds over {name: array}. `moves[t][k]` is what client k's training adds in round t; absent clients sit out.

    `thin`: names of convolutions. `counts[k]`: samples. `everyone` = (clients, samples) asks for the unbiased weights.
    `lost`: (t, k) whose upload never arrives. With `adaptive` moves hold (tree, loss).
    Gives (models after every round, residuals, share not sent per round, thresholds per round).
    """
    model = {name: np.asarray(x, np.float64) for name, x in model.items()}
    residual, theta, spreads = {}, {}, []
    history, pruned, used = [], [], []
    for t, cohort in enumerate(moves):
        sent, shares, losses, reports = {}, {}, {}, {}
        used.append({k: theta.get(k, threshold) for k in cohort})
        for k, move in cohort.items():
            move, losses[k] = move if adaptive else (move, 0.0)
            old = residual.get(k, {name: np.zeros_like(x) for name, x in model.items()})
            u = {name: move[name] + old[name] for name in model}
            out, hit = dict(u), {}
            for name in thin:
                mask = blocks(u[name], used[-1][k], mode)
                out[name], hit[name] = u[name] * shaped(mask, u[name]), 1 - mask.mean()
            residual[k] = {name: u[name] - out[name] for name in model}
            if (t, k) in lost:
                residual[k] = u
                continue
            sent[k], shares[k] = out, hit
            after = {name: model[name] + move[name] for name in thin}
            norm = {name: np.abs(after[name]).sum() for name in thin}
            divergence = np.sqrt(sum(np.abs(move[name]).sum() / norm[name] for name in thin))
            significance = np.sqrt(sum(np.abs(out[name]).sum() for name in thin) / sum(norm.values()))
            reports[k] = divergence + significance
        spreads.append(np.var([losses[k] for k in sent]))
        var = np.mean(spreads) if len(spreads) > 3 else 0.0
        if adaptive:
            theta |= {k: threshold / (1 + np.exp(-(x + var))) for k, x in reports.items()}
        total = sum(counts[k] for k in sent)
        if everyone:
            weight = {k: everyone[0] / len(sent) * counts[k] / everyone[1] for k in sent}
        else:
            weight = {k: counts[k] / total for k in sent}
        model = {name: x + sum(weight[k] * sent[k][name] for k in sent) for name, x in model.items()}
        history.append(model)
        pruned.append({name: np.mean([shares[k][name] for k in sent]) for name in thin})
    return history, residual, pruned, used
