"""One study, one result: simulated and over the loopback, the same model, the same ledger, the same clients."""

from typing import Any

import pytest
import torch

from net.federation import Federated, QuickClock, Simulated, same_states, study_with
from sparing.core.registry import known_recipes
from sparing.net.holdings import trusted_call
from sparing.net.node import Node
from sparing.net.store import Store
from sparing.net.terms import OwnCode

MLP = {"data": "digits", "clients": 5, "split": {"dirichlet": 0.5}, "model": {"mlp": {"hidden": [12, 10]}}}
CNN = MLP | {"model": "cnn"}
STUDY = {"task": MLP, "rounds": 3, "sample": 3, "evaluate": {"every": 3}, "local": {"steps": 2, "lr": 0.05}}

OPTIONS: dict[str, Any] = {
    "budget": {"budget": "900B"},
    "lora": {"lora": {"targets": ["head"]}},
    "norm-bound": {"norm-bound": {"bound": 0.5}},
    "obfuscate": {"obfuscate": {"noise": 0.1}},
    "psfed": {"psfed": {"fraction": 0.3}},
    "stein": {"stein": {"warmup": 1}},
}
BEFORE = {"tight": ["topk", "int8"], "memory": ["topk"]}  # what a recipe needs before it
CONVOLUTIONS = {"fedscr", "fedhm"}

COMBINATIONS: list[Any] = [
    ["psfed", "topk", "int8", "memory"],
    [{"psfed": {"per_client": True, "fraction": 0.3}}, "int8"],
    [{"psfed": {"selector": "magnitude"}}, "topk", "memory"],
    [{"psfed": {"selector": "gradient"}}, "personal"],
    ["ecsq", "memory", {"broadcast": {"by": "ecsq"}}],
    ["lowrank", "memory", "broadcast"],
    ["scaffold", "topk", "int8", "memory"],
    [{"stein": {"warmup": 1}}, "topk", "memory"],
    [{"pfedsim": {"mode": "published", "warmup": 0.4}}],
    ["personal", "fedsim", "int8", "tight"],
    ["fedadam", "randk", "fp16"],
    [{"dp": {"mode": "local", "noise": 0.1}}],
    [{"dp": {"adaptive": True}}, "int8"],
    [{"obfuscate": {"rotate": True}}],
    [{"norm-bound": {"bound": 0.5}}, "trimmed-mean", "int8"],
    ["fedrep", "psfed", "topk", "memory"],
    ["ditto", "topk", "int8", "memory"],
    [{"lora": {"targets": ["head"], "ranks": [4, 1], "keep": "all"}}, "int8"],
    [{"lora": {"targets": ["dense1", "head"], "rank": 1, "blend": "exact"}}, "psfed", "topk", "memory"],
    [{"lora": {"targets": ["head"], "ranks": [2, 1], "blend": "stack"}}, "int8"],
]


def check(method: Any, tmp_path, **other: Any) -> None:
    study = study_with(method, **(STUDY | other))
    alone = Simulated(study, tmp_path / "simulated")
    federated = Federated(study, tmp_path / "federated")
    result = federated.run()
    assert result.model_sha256 == alone.result.model_sha256
    assert federated.ledger == alone.ledger
    assert same_states(federated, alone)
    assert result.accuracy == alone.result.accuracy


@pytest.mark.parametrize("name", sorted(known_recipes()))
def test_every_recipe(name, tmp_path):
    task = CNN if name in CONVOLUTIONS else MLP
    check([*BEFORE.get(name, []), OPTIONS.get(name, name)], tmp_path, task=task)


@pytest.mark.parametrize("method", COMBINATIONS, ids=str)
def test_combinations(method, tmp_path):
    check(method, tmp_path)


@pytest.mark.parametrize("method", [["fedhm", "int8"], ["fedscr", "memory"]], ids=str)
def test_combinations_over_convolutions(method, tmp_path):
    check(method, tmp_path, task=CNN)


def test_capacities_come_from_the_roster(tmp_path):
    """Whoever declares a rank trains at that rank, as in a simulation with the same numbers in a file."""
    ranks = [1.0, 0.5, 0.25, 0.5, 1.0]
    table = "client,rank\n" + "".join(f"{i},{x}\n" for i, x in enumerate(ranks))
    (tmp_path / "capacity.csv").write_text(table)
    study = study_with("fedhm", **(STUDY | {"task": CNN, "fleet": {"capacity": str(tmp_path / "capacity.csv")}}))
    alone = Simulated(study, tmp_path / "simulated")
    bare = study_with("fedhm", **(STUDY | {"task": CNN}))
    federated = Federated(bare, tmp_path / "federated", capacity={"rank": torch.tensor(ranks)})
    assert federated.run().model_sha256 == alone.result.model_sha256
    assert federated.ledger == alone.ledger


def test_momentum_that_clients_keep(tmp_path):
    check("fedavg", tmp_path, local={"steps": 2, "lr": 0.05, "momentum": 0.9, "velocity": "kept"})


def test_the_probe_set_is_the_servers(tmp_path):
    method = [{"psfed": {"selector": "gradient", "source": "probe"}}]
    check(method, tmp_path, task=MLP | {"probe": 20})


def test_several_clients_on_one_node(tmp_path):
    """One process, one folder, a file of state for each client."""
    study = study_with("psfed+topk+int8+memory", **STUDY)
    alone = Simulated(study, tmp_path / "simulated")
    federated = Federated(study, tmp_path / "federated")
    for node in federated.nodes.values():
        node.store.close()
    for some in ([0, 1, 2], [3, 4]):
        node = Node(Store(tmp_path / f"site-{some[0]}"), {who: federated.holding(who) for who in some})
        federated.nodes |= dict.fromkeys(some, node)
    assert federated.run().model_sha256 == alone.result.model_sha256
    assert federated.ledger == alone.ledger
    assert same_states(federated, alone)
    assert federated.nodes[0].store.clients() == [0, 1, 2]


def test_code_of_ones_own_is_every_nodes_own(tmp_path, monkeypatch):
    """The model is a file of the study's; nodes name their own copy, and another one is refused."""
    monkeypatch.chdir(tmp_path)
    text = "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    for name in ("server.py", "node.py"):
        (tmp_path / name).write_text(text)
        trusted_call(f"{name}:net")
    study = study_with("topk+memory", **(STUDY | {"task": MLP | {"model": "server.py:net"}}))
    alone, federated = Simulated(study, tmp_path / "simulated"), Federated(study, tmp_path / "federated")
    for node in federated.nodes.values():
        node.own = OwnCode(model="node.py:net")
    assert federated.run().model_sha256 == alone.result.model_sha256
    (tmp_path / "node.py").write_text(text + "# changed\n")
    trusted_call("node.py:net")
    other = Federated(study, tmp_path / "other")
    other.nodes[0].own = OwnCode(model="node.py:net")
    with pytest.raises(AssertionError, match="waits"):
        other.run(clock=QuickClock(5))
    for node in federated.nodes.values():
        node.store.close()
