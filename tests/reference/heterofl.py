"""HeteroFL in float64 NumPy, from the formulas alone."""

import math

import numpy as np


def units(width, ratio):
    return list(range(math.ceil(round(ratio * width, 9))))


def places(layers, ratio):
    """Which outputs and inputs of each layer a client holds, written out one by one.

    `layers`: (outputs, input channels, places of each input channel), in order.
    """
    held = []
    for number, (outputs, channels, each) in enumerate(layers):
        rows = range(outputs) if number == len(layers) - 1 else units(outputs, ratio)
        inputs = range(channels) if number == 0 else units(channels, ratio)
        held.append((list(rows), [c * each + p for c in inputs for p in range(each)]))
    return held


def averaged(model, clients, samples):
    """Every entry: the mean over the clients that hold it, by samples; the old value where nobody does.

    `clients`: for each, name -> (index sets of the axes it holds, values there).
    """
    after = {}
    for name, old in model.items():
        total, weight = np.zeros_like(old), np.zeros_like(old)
        for mine, n in zip(clients, samples, strict=True):
            index, values = mine[name]
            for here, value in zip(np.ndindex(*values.shape), values.ravel(), strict=True):
                spot = tuple(axis[i] for axis, i in zip(index, here, strict=False)) + here[len(index) :]
                total[spot] += n * value
                weight[spot] += n
        after[name] = np.where(weight > 0, total / np.maximum(weight, 1e-300), old)
    return after


def cut(model, held):
    """A client's tensors: name -> (index sets, values); weights `i.weight` and biases `i.bias` of layer i."""
    mine = {}
    for i, (rows, inputs) in enumerate(held):
        mine[f"{i}.weight"] = ((rows, inputs), model[f"{i}.weight"][rows][:, inputs])
        mine[f"{i}.bias"] = ((rows,), model[f"{i}.bias"][rows])
    return mine


def descend(mine, x, y, ratio, lr, steps, scaler):
    """Gradient descent of a network of dense layers with ReLU on the mean cross entropy of all its samples."""
    depth = len(mine) // 2
    values = {name: value.copy() for name, (_, value) in mine.items()}
    scale = ratio if scaler else 1.0
    for _ in range(steps):
        inputs, before = [x], []
        for i in range(depth):
            z = inputs[-1] @ values[f"{i}.weight"].T + values[f"{i}.bias"]
            z = z / scale if i < depth - 1 else z
            before.append(z)
            inputs.append(np.maximum(z, 0))
        odds = np.exp(before[-1] - before[-1].max(1, keepdims=True))
        back = odds / odds.sum(1, keepdims=True)
        back[np.arange(len(y)), y] -= 1
        back /= len(y)
        for i in reversed(range(depth)):
            back = back / scale if i < depth - 1 else back
            down = back @ values[f"{i}.weight"] * (inputs[i] > 0)
            values[f"{i}.weight"] = values[f"{i}.weight"] - lr * back.T @ inputs[i]
            values[f"{i}.bias"] = values[f"{i}.bias"] - lr * back.sum(0)
            back = down
    return {name: (index, values[name]) for name, (index, _) in mine.items()}


def play(model, layers, data, ratios, rounds, lr, steps, scaler):
    """Rounds of all clients; client k has ratio number k modulo how many there are."""
    for _ in range(rounds):
        clients = []
        for k, (x, y) in enumerate(data):
            ratio = ratios[k % len(ratios)]
            clients.append(descend(cut(model, places(layers, ratio)), x, y, ratio, lr, steps, scaler))
        model = averaged(model, clients, [len(y) for _, y in data])
    return model
