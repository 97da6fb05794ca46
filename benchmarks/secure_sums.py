"""Secure sums: are they exact, and what do they cost?

    python benchmarks/secure_sums.py exact [--seeds 100] [--clients 10 30 100] [--degree 20] [--threshold 14]
    python benchmarks/secure_sums.py price [--values 1600000]

`exact` plays sums with drop-outs and compares them with the plain sum of Python integers: each is exact, cleanly
refused (too few for the threshold), or wrong. In one seed everybody prepares and uploads once, and from there on every
share of drop-outs is played at every moment. `price` prints the bytes of each message and seconds of processor time, of
one thread, for a client and for the server. Who drops out there has prepared and never uploads, which costs most, and
is spread evenly over the graph, so that the sum can be unmasked.
"""

import argparse
import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparing.core.errors import SecureError
from sparing.secure.long_term import KeyRoster, NodeKeys, new_node_keys
from sparing.secure.mask_graph import ring_of_clients
from sparing.secure.node_rules import Bound, NodePolicy
from sparing.secure.sum_client import ClientSum, answer_unmask, mask_upload, prepare_sum
from sparing.secure.sum_server import MaskedSum, read_prepared
from sparing.secure.sum_terms import SumTerms, make_sum_terms, write_sum_terms

RUN = bytes(16)
POLICY = NodePolicy()
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4)
MOMENTS = ("before upload", "after upload", "unmasking", "spread")


@dataclass
class Party:
    keys: NodeKeys
    bound: Bound
    state: ClientSum


def prepare_all(terms: SumTerms, keys: dict[int, NodeKeys], roster: KeyRoster) -> tuple[dict[int, Party], MaskedSum]:
    parties, prepared = {}, {}
    for who, own in keys.items():
        state, bound = prepare_sum(terms, who, own, roster, POLICY, Bound(RUN))
        parties[who] = Party(own, bound, state)
        prepared[who] = read_prepared(terms, roster, who, state.prepare)
    return parties, MaskedSum(terms, prepared)


def unmask_by(party: Party, roster: KeyRoster, request: bytes) -> bytes:
    answer, party.bound = answer_unmask(party.state, party.keys, roster, POLICY, request, party.bound)
    return answer


# ------------------------------------------------------------------------------------------------------------- exact


def drop_outs(n: int, share: float, moment: str, rng: np.random.Generator) -> list[set[int]]:
    """Who is gone at each of the three moments."""
    gone = rng.permutation(n)[: round(share * n)].tolist()
    if moment == "spread":
        return [set(gone[i::3]) for i in range(3)]
    return [set(gone) if moment == name else set() for name in MOMENTS[:3]]


def play_seed(terms: SumTerms, seed: int, counts: dict[tuple[float, str], Counter[str]]) -> None:
    rng = np.random.default_rng(seed)
    keys = {who: new_node_keys() for who in terms.cohort}
    roster = KeyRoster({who: own.public() for who, own in keys.items()})
    values = {who: rng.integers(0, 2**terms.bits, terms.size, np.uint64) for who in keys}
    parties, before = prepare_all(terms, keys, roster)
    uploads = {}
    for who, party in parties.items():
        party.state, uploads[who] = mask_upload(party.state, roster, before.introduction(who), values[who])
    for share in SHARES:
        for moment in MOMENTS if share else MOMENTS[:1]:
            total = MaskedSum(terms, before.prepared)
            never, after, silent = drop_outs(len(keys), share, moment, rng)
            for who in set(keys) - never:
                total.add(who, uploads[who])
            counts[share, moment][outcome(total, parties, roster, values, never | after, silent)] += 1


def outcome(total: MaskedSum, parties: dict[int, Party], roster: KeyRoster, values, gone, silent) -> str:
    try:
        for who in sorted(parties.keys() - gone):
            answer = unmask_by(copy.copy(parties[who]), roster, total.request(who))
            if who not in silent:
                total.hear(who, answer)
        found = total.unmasked()
    except SecureError:
        return "refused"
    plain = [sum(int(values[who][i]) for who in total.arrived) for i in range(total.terms.size)]
    return "exact" if found.tolist() == [x % 2**total.terms.bits for x in plain] else "wrong"


def show_exactness(args: argparse.Namespace) -> None:
    for n in args.clients:
        degree = args.degree if args.degree and n > args.degree else None
        terms = make_sum_terms(RUN, 1, 1, range(n), 16, 21, degree, args.threshold)
        counts = {(share, moment): Counter[str]() for share in SHARES for moment in MOMENTS}
        for seed in range(args.seeds):
            play_seed(terms, seed, counts)
        print(f"\n{n} clients, {terms.degree} neighbours, threshold {terms.threshold}: exact / refused / wrong")
        print("gone   " + "".join(f"{moment:>18}" for moment in MOMENTS))
        for share in SHARES:
            cells = [
                f"{c['exact']} / {c['refused']} / {c['wrong']}" if (c := counts[share, moment]) else ""
                for moment in MOMENTS
            ]
            print(f"{share:4.0%}   " + "".join(f"{cell:>18}" for cell in cells), flush=True)


# ------------------------------------------------------------------------------------------------------------- price


class Stopwatch:
    """Seconds of processor time, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        start = time.process_time()
        found = function(*arguments)
        self.seconds.setdefault(name, []).append(time.process_time() - start)
        return found

    def median(self, *names: str) -> float:
        return sum(statistics.median(self.seconds[name]) for name in names)

    def total(self, *names: str) -> float:
        return sum(sum(self.seconds[name]) for name in names)


def evenly_gone(terms: SumTerms, share: float) -> set[int]:
    """As many of everybody's neighbours, as nearly as can be."""
    ring, n = ring_of_clients(terms), len(terms.cohort)
    gone = round(share * n)
    return {ring[i * n // gone] for i in range(gone)}


@dataclass
class SumPrice:
    """Of one sum: bytes of a client's messages, milliseconds of a client and seconds of the server, by name."""

    sizes: dict[str, int]
    client: dict[str, float]
    server: dict[str, float]

    @property
    def beside(self) -> int:
        """Bytes beside the upload."""
        return sum(size for name, size in self.sizes.items() if name != "upload")


def measure_sum(terms: SumTerms, gone: Collection[int], values: np.ndarray | None = None) -> SumPrice:
    """Play a sum of these values of everybody (random ones if none are given), and be sure that it is right."""
    clock = Stopwatch()
    keys = {who: new_node_keys() for who in terms.cohort}
    roster = KeyRoster({who: own.public() for who, own in keys.items()})
    if values is None:
        values = np.random.default_rng(0).integers(0, 2**terms.bits, terms.size, np.uint64)
    parties, prepared = {}, {}
    for who, own in keys.items():
        state, bound = clock("prepare", prepare_sum, terms, who, own, roster, POLICY, Bound(RUN))
        parties[who] = Party(own, bound, state)
        prepared[who] = clock("read", read_prepared, terms, roster, who, state.prepare)
    total = clock("begin", MaskedSum, terms, prepared)
    some = next(who for who in terms.cohort if who not in gone)
    sizes = {"terms": len(write_sum_terms(terms)), "prepare": len(parties[some].state.prepare)}
    for who, party in parties.items():
        introduction = clock("introduce", total.introduction, who)
        if who not in gone:
            party.state, upload = clock("mask", mask_upload, party.state, roster, introduction, values)
            clock("add", total.add, who, upload)
            sizes |= {"introduction": len(introduction), "upload": len(upload)}
    for who in parties.keys() - gone:
        request = clock("request", total.request, who)
        answer = clock("unmask", unmask_by, parties[who], roster, request)
        clock("hear", total.hear, who, answer)
        sizes |= {"request": len(request), "shares": len(answer)}
    clock("rebuild", lambda: [total._secret(who) for who in total.prepared])
    found = clock("remove masks", total.unmasked)
    expected = values.astype(np.uint64) * np.uint64(len(total.arrived)) & np.uint64(2**terms.bits - 1)
    assert np.array_equal(found, expected.astype(found.dtype))
    parts = {"prepare": ("read", "introduce"), "add": ("add",), "rebuild": ("rebuild",), "remove": ("remove masks",)}
    parts["all"] = ("read", "begin", "introduce", "add", "request", "hear", "remove masks")
    return SumPrice(
        sizes,
        {name: 1e3 * clock.median(name) for name in ("prepare", "mask", "unmask")},
        {name: clock.total(*names) for name, names in parts.items()},
    )


def price_of(terms: SumTerms, gone: Collection[int]) -> None:
    price = measure_sum(terms, gone)
    sent = [price.sizes[name] for name in ("prepare", "introduction", "upload", "request", "shares")]
    print(
        f"{len(terms.cohort):4} {terms.degree:4} {terms.bits:4} {len(gone):5} |"
        + "".join(f"{x:12,}" for x in sent)
        + f" {price.beside:8,} |"
        + "".join(f"{x:8.1f}" for x in price.client.values())
        + " |"
        + "".join(f"{x:8.3f}" for x in price.server.values()),
        flush=True,
    )


def show_price(args: argparse.Namespace) -> None:
    print(f"{args.values:,} values. Bytes of a client's messages, and what there is beside the upload; ms of a")
    print("client; s of the server: prepare, add uploads, rebuild secrets, remove masks, and all of it")
    sent = "".join(f"{x:>12}" for x in ("prepare", "introduce", "upload", "request", "shares"))
    client = "".join(f"{x:>8}" for x in ("prepare", "mask", "unmask"))
    server = "".join(f"{x:>8}" for x in ("prepare", "add", "rebuild", "remove", "all"))
    print(f"   n    k bits  gone |{sent}   beside |{client} |{server}")
    for n in (50, 100):
        for bits in (16, 21, 53):
            for share in (0.0, 0.1, 0.3):
                terms = make_sum_terms(RUN, 1, 1, range(n), args.values, bits)
                price_of(terms, evenly_gone(terms, share))
    print("one value: the protocol alone")
    for n, degree in ((50, None), (100, None), (100, 99)):
        terms = make_sum_terms(RUN, 1, 1, range(n), 1, 16, degree)
        price_of(terms, evenly_gone(terms, 0.1))


def main() -> None:
    options = argparse.ArgumentParser()
    commands = options.add_subparsers(required=True)
    exact = commands.add_parser("exact")
    exact.add_argument("--seeds", type=int, default=100)
    exact.add_argument("--clients", type=int, nargs="+", default=[10, 30, 100])
    exact.add_argument("--degree", type=int)
    exact.add_argument("--threshold", type=int)
    exact.set_defaults(show=show_exactness)
    price = commands.add_parser("price")
    price.add_argument("--values", type=int, default=1_600_000)
    price.set_defaults(show=show_price)
    args = options.parse_args()
    args.show(args)


if __name__ == "__main__":
    main()
