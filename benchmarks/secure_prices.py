"""What secure aggregation costs beside plain, on real networks: bytes of a client, seconds of a client and the server.

    python benchmarks/secure_prices.py networks [--clients 10]
    python benchmarks/secure_prices.py codes [--clients 100]

`networks` puts one round of the digits CNN, of a network of 1.6M parameters of which a tenth is sent, and of ResNet-18
with and without 8-bit codes beside the same round in the open. `codes` is the 8-bit code on 1.6M parameters among many
clients, against plain int8: with equal weights and with weights by samples, and with drop-outs. Seconds are processor
time of one thread: a client's from its trained model to its last answer, the server's for everybody. The bare sums are
measured by `secure_sums.py`.
"""

import argparse
import math
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from secure_sums import SumPrice, evenly_gone, measure_sum

from sparing.core.compose import compose
from sparing.core.context import Ctx, context
from sparing.core.fold import Fold
from sparing.core.grid import Grid
from sparing.core.method import Lesson, Method, Trained
from sparing.core.parcel import Parcel
from sparing.core.round import (
    Server,
    begin,
    client,
    first_client,
    first_server,
    incoming,
    outgoing,
    parcel_about,
    schema_up,
)
from sparing.core.tree import layout_of, tree_of
from sparing.models import build_network
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.study import method_list
from sparing.secure_round.settings import SecureSettings
from sparing.secure_round.sum_layout import sum_layout
from sparing.secure_round.sum_notice import notice_bytes
from sparing.secure_round.summands import RoundSum, client_vector, fold_sum
from sparing.wire import from_bytes, nbytes, to_bytes

CODE: list[Any] = [{"int8": {"common": True}}]
NETWORKS: dict[str, tuple[str, tuple[int, ...], list[Any]]] = {
    "digits CNN": ("cnn", (1, 8, 8), ["fedavg"]),
    "1.6M, a tenth": ("fedavg-cnn", (1, 28, 28), [{"randk": {"ratio": 0.1, "shared": True}}]),
    "ResNet-18": ("resnet18", (3, 32, 32), ["fedavg"]),
    "ResNet-18, 8 bits": ("resnet18", (3, 32, 32), CODE),
}
SAMPLES = 100


class PlayedRound(NamedTuple):
    """A round in which every client has the same update."""

    method: Method
    server: Server
    cohort: Ctx
    down: Parcel
    up: Parcel


def moved(lesson: Lesson, ctx: Ctx) -> Trained:
    """Every float moves by a small random number."""
    g = torch.Generator().manual_seed(0)
    after = {
        name: x + 1e-3 * torch.randn(x.shape, generator=g) if x.is_floating_point() else x
        for name, x in lesson.start.items()
    }
    return Trained(after, lesson.memory, {"loss": torch.ones(1)})


def play_round(entries: list[Any], network: str, shape: tuple[int, ...], clients: int, samples: int) -> PlayedRound:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = build_network(network, shape, 10)
    layout = layout_of(net)
    recipes = recipes_from_entries(method_list(entries))
    method = compose(layout, *recipes, arrives=True, summed=SecureSettings().summed)
    initial = tree_of(net, layout)
    server = first_server(method, initial, clients)
    each = (range(clients), [samples] * clients)
    met = torch.zeros(clients, dtype=torch.bool)
    cohort = context(0, 2, 10, *each, clients, clients * samples, cohort=clients, first=met)
    first = cohort.at(slice(0, 1))
    down = outgoing(method, server, first)
    up, _ = client(method, first_client(method, initial), down, moved, first)
    return PlayedRound(method, server, cohort, down, up)


class OpenPrice(NamedTuple):
    up: int
    down: int
    client_ms: float
    server_s: float


def measure_open(played: PlayedRound) -> OpenPrice:
    method, server, cohort, down, up = played
    fold, wrote, took, posted = begin(method, server, cohort), 0.0, 0.0, b""
    for k in range(len(cohort.ids)):
        ctx = cohort.at(slice(k, k + 1))
        start = time.process_time()
        posted = to_bytes(up, 0, f"{parcel_about(ctx)}/up")
        written = time.process_time()
        incoming(method, server, fold, down, from_bytes(posted, schema_up(method, down, ctx)), ctx)
        wrote, took = wrote + written - start, took + time.process_time() - written
    return OpenPrice(len(posted), int(nbytes(down)[0]), 1e3 * wrote / len(cohort.ids), took)


class MaskedPrice(NamedTuple):
    up: int
    down: int
    bits: int
    client_ms: float
    server_s: float
    protocol: SumPrice


def measure_masked(played: PlayedRound, share_gone: float = 0.0) -> MaskedPrice:
    method, server, cohort, down, up = played
    total, first = method.blend.weigh.most(cohort), cohort.at(slice(0, 1))
    layout = sum_layout(method, down, total, first)
    sums, ids = RoundSum(layout, Grid(server.limits, total), total), cohort.ids.tolist()
    terms = SecureSettings().terms(bytes(16), 1, 1, ids, layout.size, layout.bits)
    gone = evenly_gone(terms, share_gone)
    start = time.process_time()
    vector = client_vector(method, sums, down, up, first)
    made = 1e3 * (time.process_time() - start)
    price = measure_sum(terms, gone, vector)
    here = [k for k, who in enumerate(ids) if who not in gone]
    words = (vector.astype(np.uint64) * np.uint64(len(here)) & np.uint64(2**layout.bits - 1)).astype(vector.dtype)
    counted = cohort.at(torch.tensor(here))
    fold = begin(method, server, cohort)
    assert isinstance(fold, Fold)
    start = time.process_time()
    fold_sum(method, sums, fold, words, down, counted)
    folded = time.process_time() - start
    sizes = price.sizes
    told = notice_bytes(len(ids), len(layout.leaves)) + sizes["introduction"] + sizes["request"]
    return MaskedPrice(
        up=sizes["prepare"] + sizes["upload"] + sizes["shares"],
        down=int(nbytes(down)[0]) + told,
        bits=layout.bits,
        client_ms=made + sum(price.client.values()),
        server_s=price.server["all"] + folded,
        protocol=price,
    )


def show_networks(args: argparse.Namespace) -> None:
    print(f"{args.clients} clients with {SAMPLES} samples each; plain, then masked")
    print(f"{'':20}{'parameters':>12}{'bits':>6}{'up, bytes':>26}{'times':>7}{'down, bytes':>26}{'times':>7}", end="")
    print(f"{'client, ms':>18}{'server, s':>17}")
    for name, (network, shape, entries) in NETWORKS.items():
        played = play_round(entries, network, shape, args.clients, SAMPLES)
        plain, masked = measure_open(played), measure_masked(played)
        print(
            f"{name:20}{played.method.layout.size:12,}{masked.bits:6}"
            f"{plain.up:13,}{masked.up:13,}{masked.up / plain.up:7.2f}"
            f"{plain.down:13,}{masked.down:13,}{masked.down / plain.down:7.3f}"
            f"{plain.client_ms:8.1f}{masked.client_ms:10.1f}{plain.server_s:8.2f}{masked.server_s:9.2f}",
            flush=True,
        )


def show_codes(args: argparse.Namespace) -> None:
    network, shape = "fedavg-cnn", (1, 28, 28)
    plain = measure_open(play_round(["int8"], network, shape, args.clients, SAMPLES))
    print(f"{args.clients} clients, 8-bit codes; plain int8: {plain.up:,} bytes, server {plain.server_s:.2f} s")
    print(f"{'weights add up to':>18}{'bits':>6}{'bytes':>12}{'times':>7}{'aim':>7}", end="")
    print(f"{'gone':>6}{'client, ms':>12}{'server, s':>11}   of it: add, rebuild, remove masks")
    for samples in (1, SAMPLES):
        played, total = play_round(CODE, network, shape, args.clients, samples), args.clients * samples
        aim = 2.1 if samples == 1 else (8 + math.log2(total)) / 8 * 1.02
        for gone in (0.0, 0.1, 0.3):
            found = measure_masked(played, gone)
            parts = [found.protocol.server[name] for name in ("add", "rebuild", "remove")]
            print(
                f"{total:18,}{found.bits:6}{found.up:12,}{found.up / plain.up:7.3f}{aim:7.3f}{gone:6.0%}"
                f"{found.client_ms:12.1f}{found.server_s:11.2f}   " + " ".join(f"{x:.2f}" for x in parts),
                flush=True,
            )


def main() -> None:
    options = argparse.ArgumentParser()
    commands = options.add_subparsers(required=True)
    for name, show, clients in (("networks", show_networks, 10), ("codes", show_codes, 100)):
        command = commands.add_parser(name)
        command.add_argument("--clients", type=int, default=clients)
        command.set_defaults(show=show)
    args = options.parse_args()
    args.show(args)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    main()
