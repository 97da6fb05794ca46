import math

import pytest
import torch

import sparing
from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError
from sparing.core.round import first_client
from sparing.core.tree import layout_of, tree_of, under
from sparing.models import build_network
from sparing.parts.share.adapter_gates import adapter_gates
from sparing.recipes.pfedsim import pfedsim
from support import accelerated, make_ctx

MODEL = build_network({"cnn": {"adapter": 16}}, (1, 8, 8), 10)
LAYOUT = layout_of(MODEL)
STUDY = {"rounds": 2, "sample": 4, "seed": 1, "local": {"epochs": 1, "batch": 32}}
TASK = {"clients": 8, "split": {"quantity": 0.5}, "model": {"cnn": {"adapter": 16}}}


def test_an_adapter_changes_nothing_at_first():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = build_network("cnn", (1, 8, 8), 10)
        torch.manual_seed(0)
        other = build_network({"cnn": {"adapter": 4}}, (1, 8, 8), 10)
    x = torch.randn(5, 1, 8, 8)
    assert torch.equal(plain(x), other(x))
    assert [name for name, _ in other.named_children()][-3:] == ["relu3", "adapter", "head"]


def test_the_width_grows_with_the_log_of_the_samples():
    method = compose(LAYOUT, pfedsim(adapter={"base": 1.0, "growth": 2.0}))
    assert method.share.private == {name for name in LAYOUT.shapes if name.startswith(("adapter", "head"))}
    counts = [1, 20, 300, 10**6]
    own = method.share.given(under("own", first_client(method, tree_of(MODEL))), make_ctx([0, 1, 2, 3], counts))
    gate = own["adapter.gate"]
    assert gate.sum(1).tolist() == [min(16, round(1 + 2 * math.log(n))) for n in counts] == [1, 7, 12, 16]
    assert all(row == sorted(row, reverse=True) for row in gate.tolist()), "the first places"


def test_a_client_trains_only_the_places_that_are_open():
    start = dict(tree_of(MODEL))
    start["adapter.gate"] = (torch.arange(16) < 3).float()[None]
    model = build_network({"cnn": {"adapter": 16}}, (1, 8, 8), 10)
    model.load_state_dict({name: x[0] for name, x in start.items()})
    torch.nn.init.normal_(model.adapter.up.weight)
    torch.nn.init.constant_(model.adapter.down.bias, 9.0)
    model(torch.randn(4, 1, 8, 8)).square().sum().backward()
    assert not model.adapter.up.weight.grad[:, 3:].any()
    assert not model.adapter.down.weight.grad[3:].any()
    assert model.adapter.up.weight.grad[:, :3].any()


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"path": "loop", "chunk": 3}, *accelerated({"path": "stacked"})])
def test_both_engines_agree(plan):
    method = [{"pfedsim": {"adapter": {"base": 1, "growth": 1}}}]
    plain = sparing.run(TASK, method, engine="debug", plan={"path": "loop"}, **STUDY)
    fast = sparing.run(TASK, method, plan=plan, **STUDY)
    assert (fast.up_bytes, fast.down_bytes) == (plain.up_bytes, plain.down_bytes)
    if plan["path"] == "loop":
        assert fast.model_sha256 == plain.model_sha256
        assert [r.personal_accuracy for r in fast.table] == [r.personal_accuracy for r in plain.table]
    narrow = sparing.run(TASK, [{"pfedsim": {"adapter": {"base": 1, "growth": 0}}}], plan=plan, **STUDY)
    assert narrow.model_sha256 != fast.model_sha256, "the width makes a difference"


def test_adapters_that_cannot_be_meant():
    with pytest.raises(MethodError, match="'adapter' matches no layer"):
        compose(layout_of(build_network("cnn", (1, 8, 8), 10)), pfedsim(adapter={}))
    with pytest.raises(MethodError, match="there is no adapter with a gate"):
        adapter_gates(layout_of(MODEL, static=True), frozenset(LAYOUT.shapes), 4, 2)
    with pytest.raises(MethodError, match=r"'adapter.gate' is shared, but its width differs"):
        compose(LAYOUT, pfedsim(layers=["head"], adapter={}))
    with pytest.raises(ConfigError, match=r"pfedsim.adapter is .*; write \{base: 4, growth: 2\}"):
        pfedsim(adapter={"width": 3})
    with pytest.raises(ConfigError, match="growth is -1"):
        compose(LAYOUT, pfedsim(adapter={"growth": -1}))
    with pytest.raises(ConfigError, match=r"cnn.adapter is 0; it is a width"):
        build_network({"cnn": {"adapter": 0}}, (1, 8, 8), 10)
    with pytest.raises(ConfigError, match="lstm is not a chain of layers"):
        build_network({"lstm": {"adapter": 4}}, (20,), 50)
