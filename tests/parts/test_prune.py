import pytest
import torch
from torch import nn

import sparing
from sparing.core.compose import compose
from sparing.core.context import context
from sparing.core.errors import ConfigError, MethodError
from sparing.core.method import Local, Phase
from sparing.core.optimiser import Optimiser
from sparing.core.registry import find_recipe
from sparing.core.round import first_client, first_server, outgoing, schema_down, starting_models
from sparing.core.tree import Layout, expand_rows, layout_of, tree_of
from sparing.data.clients import Clients
from sparing.parts.share import prune
from sparing.tasks.build import build_task
from sparing.train.local import train
from support import accelerated, changed, make_ctx, small_layout, small_net

LAYOUT = small_layout()
MODEL = tree_of(small_net(), LAYOUT)
STUDY = {"rounds": 3, "sample": 4, "seed": 1, "evaluate": {"every": 3}}
LOCAL = {
    "plain": {"steps": 4},
    "everything": {"steps": 4, "momentum": 0.9, "weight_decay": 0.01, "clip": 1.0, "prox": 0.1},
    "adam": {"steps": 4, "optimiser": "adam", "lr": 0.01},
}


def weights(model):
    return {name: x for name, x in model.items() if x.ndim > 1}


def test_the_largest_of_every_layer_stay_and_vectors_are_left_alone():
    part = prune.prune_by_magnitude(LAYOUT, 0.25)
    first = part.first(MODEL)
    assert set(first) == {"0.weight", "3.weight"} == part.names
    for name, x in first.items():
        kept = x != 0
        assert int(kept.sum()) == -(-x.numel() // 4)
        assert torch.equal(x[kept], MODEL[name][kept])
        assert MODEL[name][kept].abs().min() >= MODEL[name][~kept].abs().max()
    assert prune.prune_by_magnitude(LAYOUT, 0.25).share.init(MODEL | first).keys() == first.keys()


def test_over_the_model_layers_compete_and_masks_of_the_pruned_model_are_the_same():
    part = prune.prune_by_magnitude(LAYOUT, 0.3, over="model")
    first = part.first(MODEL)
    size = sum(x.numel() for x in first.values())
    assert sum(int((x != 0).sum()) for x in first.values()) == -(-size * 3 // 10)
    again = part.share.init(MODEL | first)
    assert all(torch.equal(again[name], x != 0) for name, x in first.items())


def test_the_receiver_knows_the_mask_from_the_initial_model_and_fills_up_with_zeros():
    method = compose(LAYOUT, find_recipe("prune").make(keep=0.25))
    server, ctx = first_server(method, MODEL, 50), changed(make_ctx([3, 7]), first=torch.tensor([True, True]))
    schema = schema_down(method, MODEL, ctx.at(slice(1)))
    down = outgoing(method, server, ctx)
    for name in ("0.weight", "3.weight"):
        assert torch.equal(schema.leaves[name].scope, down.leaves[name].scope)
        assert not schema.leaves[name].told
    state = expand_rows(first_client(method, MODEL), 2)
    assert not state, "clients keep nothing"
    start = starting_models(method, server, state, ctx)
    assert all(torch.equal(start[name], server.model[name]) for name in LAYOUT.shapes)


@pytest.mark.parametrize("path", ["loop", *accelerated("loop-fast", "stacked")])
@pytest.mark.parametrize("local", LOCAL)
def test_pruned_weights_are_zero_for_good(local, path):
    study = STUDY | {"local": LOCAL[local], "plan": {"path": path}}
    result = sparing.run({"data": "digits", "model": "mlp"}, [{"prune": {"keep": 0.3}}], **study)
    start = build_task("digits", model="mlp", seed=STUDY["seed"]).build(STUDY["seed"]).state_dict()
    for name, x in weights(result.model).items():
        assert int((x != 0).sum()) == -(-3 * x.numel() // 10)
        assert not torch.equal(x[x != 0], start[name][x != 0]), "the others have learned"
        assert start[name][x != 0].abs().min() >= start[name][x == 0].abs().max()


@pytest.mark.parametrize("path", ["loop", *accelerated("loop-fast", "stacked")])
def test_training_is_that_of_a_network_without_those_connections(path):
    torch.manual_seed(0)
    net = nn.Linear(5, 3)
    mask = torch.rand(3, 5) < 0.5
    start = {
        "weight": (net.weight * mask).detach()[None].expand(2, -1, -1),
        "bias": net.bias.detach()[None].expand(2, -1),
    }
    x, y = torch.randn(8, 5), torch.randint(3, (8,))
    data = Clients.of([(x, y), (x[:5], y[:5])])
    phase = Phase(
        steps=3,
        batch=8,
        optimiser=Optimiser(lr=0.1, momentum=0.5, weight_decay=0.1, clip=0.3),
        holds=frozenset({"weight"}),
    )
    ctx = context(0, 1, 1, torch.arange(2), data.count, 2, 13)
    after, _ = train(net, nn.CrossEntropyLoss(reduction="none"), data, Local((phase,)), start, ctx, path)
    for k, count in enumerate((8, 5)):
        weight, bias = (start[n][k].clone().requires_grad_() for n in ("weight", "bias"))
        sgd = torch.optim.SGD([weight, bias], lr=0.1, momentum=0.5, weight_decay=0.1)
        for _ in range(3):
            sgd.zero_grad()
            nn.functional.cross_entropy(nn.functional.linear(x[:count], weight * mask, bias), y[:count]).backward()
            torch.nn.utils.clip_grad_norm_([weight, bias], 0.3)
            sgd.step()
        assert torch.allclose(after["weight"][k], weight.detach(), atol=1e-6)
        assert torch.allclose(after["bias"][k], bias.detach(), atol=1e-6)
        assert not after["weight"][k][~mask].any()


@pytest.mark.slow
def test_with_partial_sharing_copies_of_their_own_are_pruned_too_and_less_travels():
    method = compose(LAYOUT, find_recipe("psfed").make(), find_recipe("prune").make(keep=0.25))
    state = first_client(method, MODEL)
    for name in ("0.weight", "3.weight"):
        x = state[f"own/{name}"]
        assert int((x != 0).sum()) == -(-x.numel() // 4)
    runs = {}
    for order in ("psfed", "prune", "psfed+prune", "prune+psfed"):
        study = STUDY | {"local": {"steps": 3}, "plan": {"path": "loop", "chunk": 3}}
        fast, plain = (sparing.run("digits", order, engine=e, **study) for e in ("vector", "debug"))
        assert fast.model_sha256 == plain.model_sha256
        assert (fast.up_bytes, fast.down_bytes) == (plain.up_bytes, plain.down_bytes)
        runs[order] = fast
    assert runs["psfed+prune"].model_sha256 == runs["prune+psfed"].model_sha256
    assert runs["psfed+prune"].up_bytes < 0.6 * min(runs["psfed"].up_bytes, runs["prune"].up_bytes)
    assert runs["psfed+prune"].down_bytes < 0.6 * runs["psfed"].down_bytes
    for x in weights(runs["psfed+prune"].model).values():
        assert int((x != 0).sum()) == -(-x.numel() // 2)


def test_what_makes_no_sense_is_refused():
    for options, words in (({"keep": 0.0}, "prune.keep is"), ({"over": "all"}, "prune.over is")):
        with pytest.raises(ConfigError, match=words):
            prune.prune_by_magnitude(LAYOUT, **options)
    with pytest.raises(MethodError, match="prune would prune nothing"):
        prune.prune_by_magnitude(Layout({"b": (3,)}, {"b": torch.float32}))
    deep = layout_of(nn.Sequential(*(nn.Linear(20, 20) for _ in range(4))))
    for order in (["prune", "fedhm"], ["fedhm", "prune"]):
        with pytest.raises(MethodError, match="prune cannot go with models of several sizes"):
            compose(deep, *(find_recipe(name).make() for name in order))


def test_at_keep_one_it_is_fedavg():
    runs = [sparing.run("digits", m, **STUDY | {"local": {"steps": 3}}) for m in ("fedavg", [{"prune": {"keep": 1.0}}])]
    assert runs[0].model_sha256 == runs[1].model_sha256
    assert runs[0].up_bytes == runs[1].up_bytes
