"""pFedSim's published form at scale: similarity and serving of one round, the clients' extractors on disk.

Writes one extractor per client to a slot file (10,000 clients x 1M float32: 40 GB), gives every client 200 random
neighbours in the similarity matrix, and then times a round of 100 clients: their own extractors blended and made ready
to send, and afterwards the similarities renewed from the heads that came back. The file is deleted at the end.

    python benchmarks/neighbours.py [--folder DIR] [--clients 10000] [--params 1000000] [--neighbours 200]
"""

import argparse
import os
import platform
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from sparing.core.compose import compose
from sparing.core.context import context
from sparing.core.method import Arrival, Blended
from sparing.core.round import Under, first_row, first_server, outgoing
from sparing.core.tree import Tree, layout_of, tree_of
from sparing.recipes.pfedsim import pfedsim
from sparing.storage.bank import Bank, open_bank

POOL = 32


def network(params: int) -> nn.Module:
    """An extractor of so many parameters in dense layers, and a head of ten classes."""
    width = 250
    layers: list[nn.Module] = [nn.Linear(width, width, bias=False) for _ in range(params // width**2)]
    rest = params - len(layers) * width**2
    if rest:
        layers.append(nn.Linear(rest, 1, bias=False))
    return nn.Sequential(*layers, nn.Linear(64, 10))


def fill(rows: Bank, template: Tree, clients: int) -> None:
    """Rows that differ, without drawing a number for every one of them."""
    pool = {name: torch.randn(POOL, *x.shape[1:]) for name, x in template.items()}
    for start in range(0, clients, POOL):
        ids = torch.arange(start, min(start + POOL, clients))
        scale = 1 + ids[:, None] / clients
        rows.write(ids, {n: (x[: len(ids)].flatten(1) * scale).reshape(-1, *x.shape[1:]) for n, x in pool.items()})
    rows.state()
    rows.committed()


def similarities(clients: int, each: int) -> Tree:
    draw = torch.Generator().manual_seed(0)
    other = torch.stack([torch.randperm(clients - 1, generator=draw)[:each].sort().values for _ in range(clients)])
    other += other >= torch.arange(clients)[:, None]
    pairs = (torch.arange(clients)[:, None] * clients + other).flatten()
    similarity = torch.rand(len(pairs), generator=draw) * 0.98 + 0.01
    return {"pairs": pairs, "similarity": similarity, "stored": torch.ones(clients, dtype=torch.bool)}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument(
        "--folder", type=Path, default=None, help="where the file goes; a temporary folder if left out"
    )
    options.add_argument("--clients", type=int, default=10_000)
    options.add_argument("--params", type=int, default=1_000_000)
    options.add_argument("--neighbours", type=int, default=200)
    options.add_argument("--sample", type=int, default=100)
    options.add_argument("--repeats", type=int, default=3, help="of serving; the median counts")
    args = options.parse_args()
    home = Path(tempfile.mkdtemp(prefix="sparing-neighbours-", dir=args.folder))
    try:
        measure(home, args)
    finally:
        shutil.rmtree(home)


def measure(home: Path, args: argparse.Namespace) -> None:
    model = network(args.params)
    layout, initial = layout_of(model), tree_of(model)
    method = compose(layout, pfedsim(mode="published", warmup=0.0))
    template = first_row(method, initial)
    size = 4 * sum(x.numel() for x in template.values())
    need, free = args.clients * size, shutil.disk_usage(home).free
    if free < 1.1 * need:
        raise SystemExit(f"{home} has {free / 1e9:.0f} GB free; the extractors take {need / 1e9:.0f} GB: use --folder")
    rows = open_bank(template, args.clients, path=home / "server.slots")
    began = time.perf_counter()
    fill(rows, template, args.clients)
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"wrote {args.clients:,} extractors, {need / 1e9:.1f} GB, in {time.perf_counter() - began:.0f} s", flush=True)

    (step,) = method.blend.steps
    server = first_server(method, initial, args.clients, rows)
    state = similarities(args.clients, args.neighbours)
    server = server._replace(blend={f"0/{name}": x for name, x in state.items()}, met=state["stored"].long())
    ids = torch.randperm(args.clients, generator=torch.Generator().manual_seed(1))[: args.sample].sort().values
    n = torch.full_like(ids, 50)
    ctx = context(0, 7, 10, ids, n, args.clients, 50 * args.clients, len(ids), torch.zeros_like(ids, dtype=torch.bool))

    times = []
    for _ in range(args.repeats):
        down = None
        began = time.perf_counter()
        down = outgoing(method, server, ctx)
        times.append(time.perf_counter() - began)
    assert down is not None
    serving = statistics.median(times)
    read = len({int(j) for i in ids for j in neighbours_of(state, int(i), args.clients)} | set(ids.tolist()))
    each = ", ".join(f"{t:.2f}" for t in times)
    print(f"serving {len(ids)} clients: {each} s, {read:,} extractors read, {read * size / 1e9:.1f} GB", flush=True)
    off = largest_error(down.leaves["0.weight"].value[0], rows, state, int(ids[0]), args.clients)

    update = {name: down.leaves[name].value - initial[name] for name in (key.removeprefix("0/") for key in template)}
    del down
    head = torch.randn(len(ids), 10, 64)
    arrival = Arrival(update | {f"{len(model) - 1}.weight": head}, dict.fromkeys(layout.shapes), {}, initial, ctx)
    began = time.perf_counter()
    seen = step.watch(state, arrival)
    blended = Blended({}, {}, ids, n.double(), seen)
    _, after, _ = step.apply(state, blended, ctx)
    similarity = time.perf_counter() - began
    pairs = len(ids) * (len(ids) - 1) // 2
    print(f"similarity of {pairs:,} pairs: {similarity:.2f} s, {len(after['pairs']):,} in the matrix")
    began = time.perf_counter()
    Under("0", rows).write(ids, step.keep(after, blended, ctx))
    print(f"(storing the {len(ids)} new extractors: {time.perf_counter() - began:.2f} s)")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"similarity and serving: {serving + similarity:.2f} s, peak memory {peak:.2f} GB, largest error {off:.1e}")


def neighbours_of(state: Tree, i: int, clients: int) -> torch.Tensor:
    pairs = state["pairs"]
    return pairs[(pairs >= i * clients) & (pairs < (i + 1) * clients)] % clients


def largest_error(got: torch.Tensor, rows: Bank, state: Tree, i: int, clients: int) -> float:
    """One client's first layer against the formula in float64."""
    pairs = state["pairs"]
    mine = (pairs >= i * clients) & (pairs < (i + 1) * clients)
    who = torch.cat([pairs[mine] % clients, torch.tensor([i])])
    s = torch.cat([state["similarity"][mine].double(), torch.tensor([1 - 1e-4], dtype=torch.float64)])
    v = -torch.log(1 - s.clamp(max=1 - 1e-4))
    want = torch.zeros_like(got, dtype=torch.float64)
    for j, w in zip(who, v / v.sum(), strict=True):
        want += w * rows.read(j[None])["0/0.weight"][0]
    return float((got - want).abs().max())


if __name__ == "__main__":
    main()
