"""FedHM's decomposition of ResNet-18's 16 block convolutions each round, against a full SVD of each.

The server's weights move in two ways: by rounds of real training (a ResNet-18 on the digits, SGD), and by a random
low-rank matrix of 30 % of their norm, added anew each round. Ours goes on from its own last round, as in a run, and
its time includes what it reports. Its error, at every rank of the default ratios, is compared with the best there is;
the excess is how much larger it is, the largest and the mean over layers, ranks and rounds.

    python benchmarks/decompose.py [--rounds 4] [--steps 20] [--threads 1]
"""

import argparse
import platform
import statistics
import time

import torch
import torch.nn.functional as F

from sparing.core.context import context
from sparing.core.tree import layout_of, tree_of
from sparing.data import load_dataset
from sparing.models import build_network
from sparing.parts.factors import factor_product, matrix_of
from sparing.parts.size.fedhm.low_rank import lowrank, rank_of

RATIOS = (1, 0.5, 0.25, 0.125)


def trained(rounds, steps):
    """The server's model before and after each round of real training."""
    data = load_dataset("digits")
    x, y = data.x.float(), data.y
    torch.manual_seed(0)
    net = build_network("resnet18", tuple(x.shape[1:]), 10)
    layout, optimiser = layout_of(net), torch.optim.SGD(net.parameters(), lr=0.003, momentum=0.9)
    models, losses = [tree_of(net, layout)], []
    for _ in range(rounds):
        total = 0.0
        for _ in range(steps):
            batch = torch.randint(len(x), (32,))
            loss = F.cross_entropy(net(x[batch]), y[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += float(loss.detach())
        losses.append(f"{total / steps:.2f}")
        models.append(tree_of(net, layout))
    print(f"real training: {rounds} rounds of {steps} steps, loss {' '.join(losses)}")
    return layout, models


def drifting(model, names, rank, rounds):
    """The same model, moved each round by 30 % of each weight's norm in `rank` random directions."""
    g, models = torch.Generator().manual_seed(1), [model]
    for _ in range(rounds):
        model = dict(models[-1])
        for name in names:
            weight = model[name]
            m, n, k, _ = weight.shape[1:]
            push = torch.randn(m * k, rank, generator=g) @ torch.randn(rank, n * k, generator=g)
            push = push.reshape(1, m, k, n, k).transpose(2, 3)
            model[name] = weight + push * (0.3 * weight.norm() / push.norm())
        models.append(model)
    return models


def measured(fit, models, names):
    """CPU seconds of a full SVD and of ours, excess errors, fallbacks, over the rounds."""
    full, ours, excess, fallbacks = [], [], [], 0
    one = torch.zeros(1, dtype=torch.int64)
    state = fit.init(models[0])
    for t, model in enumerate(models[1:], 1):
        began = time.process_time()
        best = {name: torch.linalg.svd(matrix_of(model[name])[0], full_matrices=False).S for name in names}
        full.append(time.process_time() - began)
        began = time.process_time()
        state, said = fit.learn(state, model, context(0, t, len(models), one, one, 1, 1))
        ours.append(time.process_time() - began)
        fallbacks += int(said["fallbacks"])
        for name in names:
            m = matrix_of(model[name])[0].double()
            for ratio in RATIOS[1:]:
                r = rank_of(tuple(model[name].shape[1:]), ratio)
                a, b = state[f"a/{name}"][:, :, :r].double(), state[f"b/{name}"][:, :r].double()
                error, least = torch.dist(m, matrix_of(factor_product(a, b))[0]), best[name][r:].double().norm()
                excess.append(float(error / least) - 1)
    return statistics.median(full), statistics.median(ours), max(excess), statistics.mean(excess), fallbacks


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=4)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--threads", type=int, default=1)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{platform.machine()}, torch {torch.__version__}, {args.threads} thread(s)")
    layout, models = trained(args.rounds, args.steps)
    fit = lowrank(layout, RATIOS, full=1)
    names = [name for name in layout.kinds if name not in fit.layouts[1].shapes]
    cases = {"real training": models}
    for rank in (4, 32, 128):
        cases[f"30 % drift of rank {rank}"] = drifting(models[-1], names, rank, args.rounds)
    print(f"{len(names)} convolutions, ratios {RATIOS[1:]}, CPU seconds a round (median of {args.rounds})")
    print(f"{'drift':24s} {'full SVD':>9s} {'ours':>7s} {'faster':>7s} {'excess, most':>13s} {'mean':>7s} fallbacks")
    for case, moved in cases.items():
        full, ours, most, mean, fallbacks = measured(fit, moved, names)
        print(f"{case:24s} {full:9.2f} {ours:7.3f} {full / ours:6.1f}x {most:13.2%} {mean:7.2%} {fallbacks:9d}")


if __name__ == "__main__":
    main()
