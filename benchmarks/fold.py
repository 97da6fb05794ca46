"""The exact server fold of 100 clients x 10M parameters, against an out-of-place loop over state dicts.

Both run in this process, in turn, several times, over the same updates. The loop is the one most code has: a new
dict, a new product and a new sum for every client. How fast that is depends on whether the allocator can reuse its
memory, so three models of the same size are measured: one tensor, five dense layers, and ResNet-18's shapes.

    python benchmarks/fold.py [--clients 100] [--chunk 10] [--repeats 3] [--threads 1]
"""

import argparse
import math
import platform
import resource
import statistics
import time

import torch

from sparing.core.context import context
from sparing.core.fold import Fold
from sparing.core.grid import limits_of
from sparing.core.method import Arrival

RESNET = [(64, 3, 3, 3), *[(64, 64, 3, 3)] * 4]
for a, b in ((64, 128), (128, 256), (256, 512)):
    RESNET += [(b, a, 3, 3), (b, b, 3, 3), (b, a), (b, b, 3, 3), (b, b, 3, 3)]
MODELS = {
    "one tensor": [(10_000_000,)],
    "dense layers": [(2048, 3072), (1024, 2048), (1024, 1024), (512, 1024), (10, 512)],
    "resnet-18": [*RESNET, (10, 512)],
}


def tree(shapes, rows):
    return {f"layer{i}": torch.randn(rows, *shape).mul_(0.05) for i, shape in enumerate(shapes)}


def fold_all(model, pool, clients, chunk):
    """Chunks of clients, as the engine brings them."""
    fold = Fold(limits_of(model), float(10 * clients))
    for start in range(0, clients, chunk):
        ids = torch.arange(start, min(start + chunk, clients))
        n = torch.full((len(ids),), 10)
        update = {name: x[: len(ids)] for name, x in pool.items()}
        fold.add(Arrival(update, {}, {}, model, context(0, 1, 1, ids, n, clients, 10 * clients)), n.double(), {})
    return fold.mean().update


def out_of_place(model, pool, clients, chunk):
    total = {name: torch.zeros_like(x) for name, x in model.items()}
    for k in range(clients):
        total = {name: total[name] + pool[name][k % chunk] * (1 / clients) for name in total}
    return total


def timed(function, *arguments) -> float:
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--clients", type=int, default=100)
    options.add_argument("--chunk", type=int, default=10)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--threads", type=int, default=1)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{platform.machine()}, torch {torch.__version__}, {args.threads} thread(s)")
    for name, shapes in MODELS.items():
        model, pool = tree(shapes, 1), tree(shapes, args.chunk)
        size = sum(math.prod(shape) for shape in shapes)
        before = peak()
        fold_all(model, pool, args.chunk, args.chunk)
        extra = peak() - before
        exact, loop = [], []
        for _ in range(args.repeats):
            loop.append(timed(out_of_place, model, pool, args.clients, args.chunk))
            exact.append(timed(fold_all, model, pool, args.clients, args.chunk))
        a, b = statistics.median(exact), statistics.median(loop)
        print(
            f"{name:13s} {args.clients} x {size:,}: exact fold {a:.2f} s, out-of-place loop {b:.2f} s, {b / a:.2f}x; "
            f"memory added {extra:.0f} MB (float64 accumulator {size * 8 / 2**20:.0f} MB)"
        )


if __name__ == "__main__":
    main()
