"""Split-Mix in float64 NumPy, from the paper alone: networks of dense layers with ReLU, each trained by itself."""

import numpy as np


def outputs(base, x):
    """What each layer is given, then what the network gives."""
    depth = len(base) // 2
    seen = [x]
    for i in range(depth):
        z = seen[-1] @ base[f"{i}.weight"].T + base[f"{i}.bias"]
        seen.append(np.maximum(z, 0) if i < depth - 1 else z)
    return seen


def odds(logits):
    raised = np.exp(logits - logits.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


def descend(base, x, y, lr, steps, clip):
    """Gradient descent on the mean cross entropy of all samples; the gradient of this base is at most `clip` long."""
    depth = len(base) // 2
    for _ in range(steps):
        *seen, logits = outputs(base, x)
        back = odds(logits)
        back[np.arange(len(y)), y] -= 1
        back /= len(y)
        gradient = {}
        for i in reversed(range(depth)):
            gradient[f"{i}.weight"], gradient[f"{i}.bias"] = back.T @ seen[i], back.sum(0)
            back = back @ base[f"{i}.weight"] * (seen[i] > 0)
        length = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        scale = min(1.0, clip / (length + 1e-6)) if clip else 1.0
        base = {name: w - lr * scale * gradient[name] for name, w in base.items()}
    return base


def held(k, order, more):
    """The bases of client k: one in turn from the shuffled list, which is turned by one place after each time through,
    and of the rest, in rising order, those that `more` marks."""
    times, place = divmod(k, len(order))
    first = np.roll(order, -times)[place]
    rest = [base for base in range(len(order)) if base != first]
    return {first, *(base for base, mine in zip(rest, more, strict=True) if mine)}


def play(bases, data, chosen, rounds, lr, steps, clip=None):
    """Rounds of all clients; client k trains the bases chosen(t, k), t from 1. Every base is the mean, by samples, over
    the clients that trained it, and stays where nobody did."""
    for t in range(1, rounds + 1):
        after = []
        for i, base in enumerate(bases):
            who = [k for k in range(len(data)) if i in chosen(t, k)]
            trained = [(len(data[k][1]), descend(base, *data[k], lr, steps, clip)) for k in who]
            count = sum(n for n, _ in trained)
            after.append({name: sum(n * b[name] for n, b in trained) / count for name in base} if who else base)
        bases = after
    return bases


def loss(bases, x, y):
    """Mean cross entropy of the mean of what the bases give."""
    mixed = np.mean([outputs(base, x)[-1] for base in bases], axis=0)
    return -np.log(odds(mixed)[np.arange(len(y)), y]).mean()
