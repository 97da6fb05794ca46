"""Laws of a broadcast: nodes that keep their last download, and only that, always hold the server's model."""

import itertools

import pytest
import torch
from torch import nn

from sparing.core.compose import compose
from sparing.core.download import download_kinds, read_download, write_download
from sparing.core.errors import WireError
from sparing.core.method import Broadcast, Codec, Effect, Local, Share, Trained
from sparing.core.parcel import Cut, Parcel, pick_clients
from sparing.core.round import (
    begin,
    client,
    first_client,
    first_server,
    incoming,
    mark_met,
    outgoing,
    schema_down,
    settle,
)
from sparing.core.tree import cat_trees, layout_of, take_rows, tree_of, tree_sha256, tree_to
from sparing.core.versions import NEVER, copy_of
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.study import method_list
from sparing.wire import nbytes, split_parcels
from support import changed, make_ctx

CLIENTS, ROUNDS, STILL = 12, 10, 5
COHORTS = {
    1: [0, 1, 2, 3],
    2: [2, 3],
    3: [2, 4],
    4: [2, 5],
    5: [2, 3],
    6: [2, 4],
    7: [2, 5],
    8: [2, 6],
    9: [0, 2, 4, 11],
    10: [2, 11],  # 0 was away for long, 11 is new
}
SMALL = [{"topk": {"ratio": 0.03}}, "int8", "tight"]
METHODS = [
    "broadcast",
    [{"broadcast": {"by": "lowrank"}}],
    [{"broadcast": {"by": SMALL}}],
    [{"broadcast": {"by": "randk+int8"}}],
    [{"broadcast": {"by": "topk+sign", "memory": False}}],
    [{"broadcast": {"by": "eden", "memory": False}}],
    [{"broadcast": {"by": [{"powersgd": {"rank": 1}}]}}],
    "stc",
    "personal+lowrank+broadcast+fedavgm",
    ["broadcast", "personal"],
    "scaffold+broadcast",
    ["median", {"broadcast": {"by": "lowrank"}}],
    [{"norm-bound": {"bound": 1.0}}, "broadcast"],
    [{"fedscr": {"adaptive": True, "threshold_mode": "relative"}}, "broadcast"],
    [{"broadcast": {"by": "fp16"}}],
]


def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(24, 50), nn.ReLU(), nn.Linear(50, 3)
        )


NET = network()
LAYOUT = layout_of(NET)


def method_of(spec, local=None):
    return compose(LAYOUT, *recipes_from_entries(method_list(spec)), local=local)


def training(lesson, ctx):
    """Keyed noise, smaller in most places than in a few, and counters that count."""
    after = {}
    for name, x in lesson.start.items():
        noise = ctx.uniform(f"move/{name}", x[0].numel()).reshape(-1, *x.shape[1:]) - 0.5
        after[name] = x + noise**5 if x.is_floating_point() else (x + 2).expand(len(ctx.ids), *x.shape[1:]).clone()
    return Trained(after, lesson.memory, {"loss": torch.zeros(len(ctx.ids), device=ctx.device)})


def federation(method, device="cpu", cohorts=COHORTS):
    """Every round: (ctx, server before, what goes down, server after, report). Client 3 always vanishes, all in one."""
    model = tree_to(tree_of(NET, LAYOUT), device)
    server, states = first_server(method, model, CLIENTS), {}
    for t, ids in cohorts.items():
        ctx = make_ctx(ids, seed=5, t=t, clients=CLIENTS)
        ctx = changed(ctx, device=device, first=~server.seen[ctx.ids])
        down = outgoing(method, server, ctx)
        state = cat_trees([states.get(k, first_client(method, model)) for k in ids])
        up, state = client(method, state, down, training, ctx)
        states |= {k: take_rows(state, slice(i, i + 1)) for i, k in enumerate(ids)}
        before, report = server, {}
        if t == STILL:
            server = mark_met(server, ctx)
        else:
            here = torch.tensor([i for i, k in enumerate(ids) if k != 3], device=device)
            fold = begin(method, server, ctx)
            incoming(method, server, fold, pick_clients(down, here), pick_clients(up, here), ctx.at(here))
            server, report = settle(method, server, fold, ctx)
        yield ctx, before, down, server, report


def bits(parcel):
    return tree_sha256({name: leaf.value for name, leaf in parcel.leaves.items()} | parcel.notes)


class Node:
    """All that a client keeps for its downloads."""

    def __init__(self):
        self.copy, self.held = {}, NEVER

    def read(self, method, data, ctx):
        expected = schema_down(method, tree_of(NET, LAYOUT), ctx)
        got, parts = read_download(method, data, expected, self.copy, self.held, ctx)
        assert len(parts) == len(split_parcels(data))
        return got

    def take_in(self, got, ctx):
        self.copy, self.held = {name: leaf.value for name, leaf in got.leaves.items()}, ctx.round


def nodes_hold_the_servers_model(method, device="cpu"):
    nodes, said, missing = [Node() for _ in range(CLIENTS)], {}, {}
    for node in nodes if method.broadcast.seeded else []:
        node.copy, node.held = tree_to(tree_of(NET, LAYOUT), device), 1
    for ctx, server, down, _, report in federation(method, device):
        behind_K, kinds = download_kinds(method, server.past, down, ctx)
        assert kinds.keys() == {"value", "index", "scale", "header", "notes"}
        counted_K = torch.stack([x.expand(len(ctx.ids)) for x in kinds.values()]).sum(0)
        for k, i in enumerate(ctx.ids.tolist()):
            one, node = ctx.at(slice(k, k + 1)), nodes[i]
            mine = pick_clients(down, slice(k, k + 1))
            data = write_download(method, server.past, mine, one)
            whole, notes = int(nbytes(mine)[0]), int(nbytes(Parcel({}, mine.notes))[0])
            missed = [said[t] for t in range(max(node.held, 0), ctx.round) if t in said]
            best = min(whole, sum(missed) + notes) if node.held != NEVER else whole
            assert len(data) == int(counted_K[k]) == best, "what is missed or the whole, whichever is shorter"
            assert len(split_parcels(data)) == (len(missed) + 1 if bool(behind_K[k]) else 1)
            got = node.read(method, data, one)
            assert bits(got) == bits(mine), "the server's model, in every bit"
            if bool(behind_K[k]):
                assert tree_sha256(copy_of(method, server.model, server.past, node.held, ctx)) == tree_sha256(node.copy)
            node.take_in(got, one)
            missing[ctx.round, i] = len(missed) if bool(behind_K[k]) else None
        if report:
            said[ctx.round] = int(report["broadcast_bytes"])
    return missing


@pytest.mark.parametrize("spec", METHODS, ids=str)
def test_nodes_hold_the_servers_model(spec):
    missing = nodes_hold_the_servers_model(method_of(spec))
    assert missing[ROUNDS - 1, 11] is None, "a newcomer gets the whole model"
    assert missing[ROUNDS, 11] == missing[2, 2] == 1
    assert missing[STILL + 1, 2] == 0, "the model has not moved"
    if "fp16" not in str(spec) and "scaffold" not in spec:
        assert missing[ROUNDS - 1, 4] > 1
    if spec == "stc":
        assert missing[ROUNDS - 1, 0] == ROUNDS - 3, "however long it was away"


@pytest.mark.slow
def test_with_the_seed_a_newcomer_misses_updates_only():
    missing = nodes_hold_the_servers_model(method_of([{"broadcast": {"by": SMALL, "seeded": True}}]))
    assert missing[1, 0] == 0, "the first model is known"
    assert missing[ROUNDS - 1, 11] == ROUNDS - 3, "all updates but those of the two rounds without one"


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["stc", "dp+broadcast"])
def test_buffers_that_stay_at_home(spec):
    method = method_of(spec, Local(buffers="own"))
    nodes_hold_the_servers_model(method)
    *_, (_, _, _, server, _) = federation(method)
    assert not [name for name in server.past if "running" in name]


def test_a_codec_that_knows_no_buffers():
    """Whatever a stage does to the leaves it sees, buffers arrive as they are."""

    def cast(parcel, dtype):
        change = {name: leaf._replace(value=leaf.value.to(dtype)) for name, leaf in parcel.leaves.items()}
        return parcel._replace(leaves=change)

    rude = Codec(
        lambda parcel, state, view: (cast(parcel, torch.float16), state),
        lambda parcel, ctx: cast(parcel, torch.float32),
        lambda schema, ctx: schema._replace(
            leaves={name: spec._replace(dtype=torch.float16) for name, spec in schema.leaves.items()}
        ),
        name="rude",
        effect=Effect(),
    )
    nodes_hold_the_servers_model(method_of("fedavg")._replace(broadcast=Broadcast((rude,))))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", METHODS, ids=str)
def test_nodes_hold_the_servers_model_on_a_gpu(spec):
    nodes_hold_the_servers_model(method_of(spec), "cuda")


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["broadcast", [{"broadcast": {"by": "fp16"}}], [{"broadcast": {"by": SMALL}}]], ids=str
)
def test_the_server_keeps_at_most_two_models(spec):
    method, most = method_of(spec), 0
    cohorts = {t: [2] for t in range(1, 31)}
    for _, _, down, server, _ in federation(method, cohorts=cohorts):
        frames = {name: x for name, x in server.past.items() if name.startswith("frame/")}
        assert {name.partition("/")[2] for name in server.past if name.startswith("size/")} == {
            name.partition("/")[2] for name in frames
        }
        kept = sum(x.numel() for x in frames.values())
        assert kept < int(nbytes(down)[0])
        base = [name for name in server.past if name.startswith("base/")]
        assert len(base) == (len(down.leaves) if frames else 0)
        most = max(most, len(frames))
    assert most == 1 if "fp16" in str(spec) else 1 < most < 29, "the base moves on"


def missing_two(method):
    """A client that misses two updates: its node, ctx and download."""
    node = Node()
    for ctx, server, down, _, _ in federation(method, cohorts={1: [2, 4], 2: [4], 3: [2, 4], 4: [4], 5: [2, 4]}):
        if 2 in ctx.ids.tolist():
            one = ctx.at(slice(0, 1))
            data = write_download(method, server.past, pick_clients(down, slice(0, 1)), one)
            if ctx.round == 5:
                return node, one, data
            node.take_in(node.read(method, data, one), one)
    raise AssertionError


def test_broken_downloads_are_refused():
    method = method_of([{"broadcast": {"by": SMALL}}])
    node, ctx, data = missing_two(method)
    parts = [bytes(part) for part in split_parcels(data)]
    assert len(parts) == 3
    node.read(method, data, ctx)
    for end in range(len(data)):
        with pytest.raises(WireError):
            node.read(method, data[:end], ctx)
    for order in itertools.chain(itertools.permutations(range(3)), [(0, 2), (1, 2), (2,), (0, 0, 1, 2), (0, 1, 2, 2)]):
        if order != (0, 1, 2):
            with pytest.raises(WireError):
                node.read(method, b"".join(parts[i] for i in order), ctx)
    with pytest.raises(WireError, match="all that can be meant"):
        node.read(method, parts[0] * 1000, ctx)
    for place in range(0, len(data), 7):
        wrong = bytearray(data)
        wrong[place] ^= 1
        with pytest.raises(WireError):
            node.read(method, bytes(wrong), ctx)


def test_a_node_that_holds_something_else_is_told():
    method = method_of([{"broadcast": {"by": SMALL}}])
    node, ctx, data = missing_two(method)
    for other in (ctx._replace(round=6), changed(ctx, seed=1), changed(ctx, ids=ctx.ids + 1)):
        with pytest.raises(WireError):
            node.read(method, data, other)
    for held in (1, 2, 4):
        node.held = held
        with pytest.raises(WireError):
            node.read(method, data, ctx)
    node.held, node.copy = NEVER, {}
    with pytest.raises(WireError, match=r"behind the parcel"):
        node.read(method, data, ctx)


@pytest.mark.parametrize("spec", ["psfed+stc", "prune+broadcast", "local+broadcast"])
def test_who_holds_parts_gets_values_as_before(spec):
    method = method_of(spec)
    for ctx, server, down, _, _ in federation(method):
        behind_K, kinds = download_kinds(method, server.past, down, ctx)
        assert not bool(behind_K.any())
        assert torch.equal(torch.stack(list(kinds.values())).sum(0), nbytes(down))


def test_an_update_of_a_part_makes_the_next_download_whole():
    """A share that sends all down and, now and then, only a half up."""
    plain = method_of("broadcast")
    name = "3.weight"
    half = torch.zeros(1, *LAYOUT.shapes[name], dtype=torch.bool)
    half[:, :20] = True

    def up(got, ctx):
        return plain.share.up(got, ctx) | ({name: Cut(half)} if ctx.round % 4 == 0 else {})

    method = plain._replace(share=Share(plain.share.down, up))
    for ctx, server, down, after, _ in federation(method):
        behind_K, _ = download_kinds(method, server.past, down, ctx)
        if ctx.round % 4 == 0:
            still = ~half.expand_as(down.leaves[name].value)
            assert torch.equal(after.model[name][still], server.model[name][still])
        if ctx.round % 4 == 1:
            assert not bool(behind_K.any())
        if ctx.round in (2, 3):
            assert bool(behind_K.any())
