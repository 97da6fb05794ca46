"""The components that `lowrank` and `budget` send, found in whole numbers, beside the best there are.

Updates of a small CNN and a ResNet-18 on the digits, a few SGD steps each. For every matrix of a size that travels as
components: the squared error that the 32 found leave beyond that of the best 32, in percent of its squares, and
the time taken, for ours and for two passes of the same iteration in float64 from the same guess, as it was before.

    python benchmarks/components.py [--rank 32] [--threads 1]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from sparing.core.context import context
from sparing.data import load_dataset
from sparing.models import build_network
from sparing.parts.code.budget.matrices import MORE, as_matrix_shape, strongest_components, weight_as_matrix
from sparing.parts.code.budget.subspace import Components


def updates(model: str, steps: int = 30) -> Iterator[tuple[str, Tensor]]:
    data = load_dataset("digits")
    x, y = data.x.float(), data.y
    torch.manual_seed(0)
    net = build_network(model, tuple(x.shape[1:]), 10)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(steps):
        batch = torch.randint(len(x), (32,))
        optimiser.zero_grad()
        F.cross_entropy(net(x[batch]), y[batch]).backward()
        optimiser.step()
    for name, p in net.named_parameters():
        yield name, (p.detach() - before[name])[None]


def in_float64(m: Tensor, rank: int, guess: Tensor) -> Components:
    m, x, y = m.double(), guess.double(), m
    for _ in range(2):
        y = torch.linalg.qr(m @ x).Q
        x = m.mT @ y
    u, s, vt = torch.linalg.svd(x.mT, full_matrices=False)
    return Components((y @ u)[..., :rank], s[..., :rank], vt.mT[..., :rank])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rank", type=int, default=32)
    options.add_argument("--threads", type=int, default=1)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    ctx = context(1, 1, 0, torch.tensor([0]), torch.tensor([1]), clients=1, samples=1)
    for model in ("cnn", "resnet18"):
        beyond, seconds = ({"ours": [], "float64": []} for _ in range(2))
        for name, update in updates(model):
            how = as_matrix_shape(tuple(update.shape[1:]), args.rank)
            if how is None or min(how.rows, how.columns) <= args.rank + MORE:
                continue
            m = weight_as_matrix(update, how)
            m = m if how.rows >= how.columns else m.mT
            guess = ctx.uniform(f"lowrank/{name}", m.shape[2] * (args.rank + MORE)).reshape(1, m.shape[2], -1) * 2 - 1
            best = torch.linalg.svdvals(m.double())[0, args.rank :].square().sum()
            ways: dict[str, Callable[[], Components]] = {
                "ours": lambda m=m, name=name: strongest_components(name, m.double(), args.rank, ctx),
                "float64": lambda m=m, guess=guess: in_float64(m, args.rank, guess),
            }
            for way, find in ways.items():
                find()
                began = time.perf_counter()
                found = find()
                seconds[way].append(time.perf_counter() - began)
                left = (m.double() - (found.u * found.s[:, None]) @ found.v.mT).square().sum()
                beyond[way].append(100 * float((left - best) / m.double().square().sum()))
        for way, some in beyond.items():
            worst, mean = max(some), statistics.mean(some)
            print(f"{model:9} {len(some):3} matrices, {way:8} beyond the least: {mean:6.3f} % on average, ", end="")
            print(f"{worst:6.3f} % at most; {1000 * sum(seconds[way]):7.1f} ms in all")


if __name__ == "__main__":
    main()
