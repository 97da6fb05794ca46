"""Laws of what is merged into the base: nodes that keep it hold the server's, and are sent no more than they miss."""

import pytest
import torch
from torch import nn

from sparing.core.compose import compose, remake_model
from sparing.core.download import download_kinds, read_download, write_download
from sparing.core.errors import WireError
from sparing.core.method import Trained
from sparing.core.round import begin, client, first_client, first_server, incoming, outgoing, schema_down, settle
from sparing.core.tree import layout_of, tree_of, tree_sha256
from sparing.core.versions import first_held
from sparing.recipes.lora import lora
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.wire import nbytes, split_parcels
from support import changed, make_ctx

CLIENTS, SIDES = 12, (96, 80)
COHORTS = {1: [0, 1, 2], 2: [1, 3], 3: [1, 2], 4: [1], 5: [0, 1, 2], 6: [1, 4, 5], 7: [1, 2, 7], 8: [0, 6]}
METHODS = [
    ({"rank": 2, "blend": "exact"}, []),
    ({"rank": 2, "blend": "exact"}, [{"psfed": {"per_client": True}}, "topk", "memory"]),
    ({"rank": 2, "blend": "exact", "full": ["head"]}, ["personal", "fedadam"]),
    ({"rank": 3, "blend": "stack"}, []),
    ({"ranks": [3, 0, 1], "blend": "stack", "full": ["head"]}, ["topk", "int8"]),
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(*SIDES)
        self.norm = nn.BatchNorm1d(SIDES[1])
        self.head = nn.Linear(SIDES[1], 2)

    def forward(self, x):
        return self.head(self.norm(self.q(x)))


def training(lesson, ctx):
    after = {}
    for name, x in lesson.start.items():
        noise = ctx.uniform(f"move/{name}", x[0].numel()).reshape(len(ctx.ids), *x.shape[1:]) - 0.5
        after[name] = x + noise if x.is_floating_point() else (x + 2).expand(len(ctx.ids), *x.shape[1:]).clone()
    return Trained(after, lesson.memory, {"loss": torch.zeros(len(ctx.ids))})


class Federation:
    """Every round: (ctx, server before it, what goes down to each client, its report)."""

    def __init__(self, options, beside=()):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            net = Net()
        made = [lora(targets=["q"], **options), *recipes_from_entries(list(beside))]
        net = remake_model(net, made, seed=5)
        self.method, self.initial = compose(layout_of(net), *made), tree_of(net, layout_of(net))

    def rounds(self, cohorts):
        method, states = self.method, {}
        server = first_server(method, self.initial, CLIENTS)
        for t, ids in cohorts.items():
            ctx = make_ctx(ids, seed=5, t=t, clients=CLIENTS)
            ctx, before = changed(ctx, first=~server.seen[ctx.ids]), server
            fold, downs = begin(method, server, ctx), []
            for k, i in enumerate(ids):
                one = ctx.at(slice(k, k + 1))
                downs.append((one, down := outgoing(method, server, one)))
                up, states[i] = client(method, states.get(i, first_client(method, self.initial)), down, training, one)
                incoming(method, server, fold, down, up, one)
            server, report = settle(method, server, fold, ctx)
            yield before, downs, report


def bits(parcel):
    return tree_sha256({name: leaf.value for name, leaf in parcel.leaves.items()} | parcel.notes)


@pytest.mark.parametrize(("options", "beside"), METHODS, ids=str)
def test_nodes_hold_what_was_merged(options, beside):
    """A download is the residuals missed and the rest, or all of it, whichever is shorter."""
    play = Federation(options, beside)
    method, name = play.method, "q.merged.weight"
    first = {name: torch.zeros(1, SIDES[1], SIDES[0])}
    nodes, said, behind = {i: (first, first_held(method)) for i in range(CLIENTS)}, {}, set()
    for server, downs, report in play.rounds(COHORTS):
        for ctx, down in downs:
            who, t = int(ctx.ids[0]), ctx.round
            copy, held = nodes[who]
            data, expected = write_download(method, server.past, down, ctx), schema_down(method, play.initial, ctx)
            some_K, kinds = download_kinds(method, server.past, down, ctx)
            assert len(data) == sum(int(x[0]) for x in kinds.values())
            rest = down._replace(leaves={n: leaf for n, leaf in down.leaves.items() if n != name})
            missed = [said[s] for s in range(held, t) if said[s]]
            best = min(int(nbytes(down)[0]), sum(missed) + int(nbytes(rest)[0]))
            assert len(data) == best, "what is missed or the sum, whichever is shorter"
            got, parts = read_download(method, data, expected, copy, held, ctx)
            assert bits(got) == bits(down), "the server's, in every bit"
            assert len(parts) == len(split_parcels(data)) == (len(missed) + 1 if bool(some_K[0]) else 1)
            nodes[who] = {name: got.leaves[name].value}, t
            behind.add(len(missed) if bool(some_K[0]) else None)
        said[ctx.round] = int(report["broadcast_bytes"])
    assert {0, 1, 2} <= behind, "those who were here, and those who sat out a round or two"


@pytest.mark.parametrize(
    ("options", "ranks"),
    [({"rank": 2, "blend": "exact"}, [4, 2, 2, 0]), ({"ranks": [3, 0, 1], "blend": "stack"}, [4, 0, 1, 0])],
    ids=str,
)
def test_bytes_down_are_those_of_factors(options, ranks):
    """For a missed round of j arrivals: `exact` (j - 1) r (m + n) values, `stack` those of the sum of their ranks."""
    reports = [report for _, _, report in Federation(options).rounds({1: [0, 1, 2], 2: [1, 4], 3: [1, 2], 4: [1]})]
    for rank, report in zip(ranks, reports, strict=True):
        values = 4 * rank * sum(SIDES)
        assert values <= report["broadcast_bytes"] < values + 60 * bool(rank) + 1


def test_factors_longer_than_the_matrix_go_as_the_matrix():
    *_, (_, _, report) = Federation({"rank": 30, "blend": "stack"}).rounds({1: [0, 1, 2]})
    assert report["broadcast_bytes"] < 4 * SIDES[0] * SIDES[1] + 60 < 4 * 90 * sum(SIDES)


def test_another_past_is_told():
    play = Federation({"rank": 2, "blend": "exact"})
    method, name, copies = play.method, "q.merged.weight", {}
    for server, downs, _ in play.rounds({1: [0, 1], 2: [1, 2], 3: [0, 1]}):
        ctx, down = downs[0]
        data, expected = write_download(method, server.past, down, ctx), schema_down(method, play.initial, ctx)
        copies[ctx.round] = {name: down.leaves[name].value}
    assert len(split_parcels(data)) == 3
    read_download(method, data, expected, copies[1], 1, ctx)
    for copy, held in ((copies[1], 2), (copies[1], 3), ({}, 1)):
        with pytest.raises(WireError):
            read_download(method, data, expected, copy, held, ctx)
