"""What `explain` and `check` say of secure aggregation is what a run's ledger counts."""

import pytest
import torch

import sparing
from secure_round.studies import COMMON, SHARED, ledger_of
from sparing.core.errors import ConfigError, MethodError
from sparing.models import build_network
from sparing.runs.cost import run_cost_trial
from sparing.runs.explanation import explain_method
from sparing.runs.files.ledger import ALL_BYTE_KINDS
from sparing.runs.study import study_from
from sparing.secure_round.planned_sum import SECURE_KINDS

TASK = {"data": "digits", "clients": 8, "model": {"mlp": {"hidden": [12]}}}
STUDY = {"rounds": 2, "sample": 6, "local": {"steps": 1}, "evaluate": {"every": 2, "clients": 1}, "seed": 3}
METHODS = ["fedavg", ["psfed", COMMON, "memory"], [SHARED, "memory"], "fedsim", ["personal", "scaffold"]]


def sum_of(rows, way: str) -> int:
    return sum(int(row[kind]) for row in rows if row["direction"] == way for kind in ALL_BYTE_KINDS)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("secure", [True, {"colluding": 1}], ids=str)
def test_check_says_what_the_ledger_counts(method, secure, tmp_path):
    cost = run_cost_trial(study_from({"task": TASK, "method": method, "secure": secure, **STUDY}))
    price = cost.secure
    sparing.run(TASK, method, secure=secure, out=tmp_path / "run", **STUDY)
    rows = [row for row in ledger_of(tmp_path / "run") if row["round"] == "1"]
    for row in rows:
        way = row["direction"]
        assert [int(row[kind]) for kind in SECURE_KINDS] == [getattr(price, f"{way}_{kind}") for kind in SECURE_KINDS]
        if way == "up":
            assert int(row["value"]) + int(row["header"]) == price.up_values
    assert sum_of(rows, "up") == cost.up_bytes == 6 * price.up
    assert sum_of(rows, "down") == cost.first_bytes
    assert cost.down_bytes == cost.open_down_bytes + 6 * price.down


def test_without_it_there_is_no_price():
    cost = run_cost_trial(study_from({"task": TASK, **STUDY}))
    assert cost.secure is None
    assert (cost.up_bytes, cost.down_bytes) == (cost.open_up_bytes, cost.open_down_bytes)


@pytest.mark.parametrize("method", [["fedavg"], [COMMON], ["psfed"]], ids=str)
def test_explain_says_what_the_ledger_counts(method, tmp_path):
    """Of as many clients, who have 100 samples each."""
    found = explain_method(method, "mlp", (1, 8, 8), 10, secure=True, sample=6)
    x, y = torch.zeros(800, 1, 8, 8), torch.zeros(800, dtype=torch.int64)
    parts = [(x[i : i + 100], y[i : i + 100]) for i in range(0, 800, 100)]
    task = sparing.Task(lambda: build_network("mlp", (1, 8, 8), 10), train=parts, test=(x[:9], y[:9]))
    sparing.run(task, method, secure=True, out=tmp_path / "run", **STUDY)
    up, down = ([r for r in ledger_of(tmp_path / "run") if r["direction"] == way] for way in ("up", "down"))
    price = found.secure
    assert {(int(r["keys"]), int(r["shares"]), int(r["unmask"])) for r in up} == {
        (price.up_keys, price.up_shares, price.up_unmask)
    }
    assert {(int(r["keys"]), int(r["shares"]), int(r["unmask"])) for r in down} == {
        (price.down_keys, price.down_shares, price.down_unmask)
    }
    assert {int(r["value"]) + int(r["header"]) for r in up} == {price.up_values}


@pytest.mark.filterwarnings("ignore:round .* counts for nobody")
@pytest.mark.parametrize("sample", [3, 6, 8])
def test_a_round_counts_up_to_the_drop_outs_that_are_said(sample):
    task = TASK | {"clients": 8}
    study = STUDY | {"sample": sample, "rounds": 12, "evaluate": {"every": 12, "clients": 1}, "secure": True}
    lost = run_cost_trial(study_from({"task": task, **study})).secure.lost
    fleet = {"dropout": 0.3}
    masked = sparing.run(task, fleet=fleet, **study)
    plain = sparing.run(task, fleet=fleet, **study | {"secure": False})
    for one, other in zip(masked.table, plain.table, strict=True):
        assert one.clients == (other.clients if sample - other.clients <= lost else 0)


def test_explain_refuses_what_does_not_add_up():
    with pytest.raises(MethodError, match=r"use \{int8: \{common: true\}\}"):
        explain_method(["int8"], "mlp", (1, 8, 8), 10, secure=True, sample=6)
    with pytest.raises(ConfigError, match="takes 3 to"):
        explain_method(["fedavg"], "mlp", (1, 8, 8), 10, secure=True, sample=2)
    assert explain_method(["int8"], "mlp", (1, 8, 8), 10).secure is None
