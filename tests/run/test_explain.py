"""What `explain` says is what a run then does."""

import json

import pytest
from typer.testing import CliRunner

import sparing
from sparing.core.errors import ConfigError
from sparing.run.explain import explain
from sparing.ui.cli import app

DIGITS = ((1, 8, 8), 10)
STUDY = {"task": "digits", "sample": 4, "rounds": 3, "local": {"steps": 2}, "seed": 0}


def told(method, model: str | dict = "cnn"):
    return explain(method, model, *DIGITS).sizes[0]


@pytest.mark.parametrize("method", ["fedavg", "psfed", "personal+int8", "fp16", "randk", "local", "stein"])
def test_bytes_are_those_of_a_run_where_the_method_fixes_them(method):
    size = told(method)
    assert size.down.exact
    assert size.up.exact
    table = sparing.run(method=method, **STUDY).table
    assert table[0].down_bytes == 4 * size.first_bytes
    for row in table:  # a mask falls on the layers differently every round, which can change the length of a length
        assert abs(row.up_bytes - 4 * size.up.bytes) <= (8 * 4 if method == "psfed" else 0)


@pytest.mark.parametrize("method", ["topk", "topk+int8+memory", [{"psfed": {"selector": "magnitude"}}]])
def test_bytes_are_a_bound_where_the_data_decides(method):
    size = told(method)
    assert not (size.down.exact and size.up.exact)
    result = sparing.run(method=method, **STUDY)
    ups = [row.up_bytes / 4 for row in result.table]
    assert 0.6 * size.up.bytes < max(ups) <= size.up.bytes
    assert all(row.down_bytes / 4 <= max(size.down.bytes, size.first_bytes) for row in result.table)


def test_what_travels_and_what_stays():
    e = explain("psfed+personal+topk+memory", "cnn", *DIGITS)
    assert e.private == ["head"]
    assert e.own == ["conv1", "conv2", "dense"]
    assert e.stages == ["topk"]
    assert e.memory
    assert set(e.client_bytes) == {"own", "up/residual"}
    down, up = e.sizes[0].down, e.sizes[0].up
    assert (down.positions, up.positions) == ("free", "paid")
    assert up.sent < up.parameters == down.parameters < e.parameters
    assert explain("fedavgm", "cnn", *DIGITS).server_bytes == {"fedavgm": 8 * e.parameters}


def test_a_full_sync_is_not_taken_for_an_ordinary_round():
    plain = told("psfed").up.bytes
    for sync in (2, 5, 20):
        assert abs(told([{"psfed": {"sync": sync}}]).up.bytes - plain) <= 8
    assert not told([{"psfed": {"selector": "layers"}}]).up.exact


def test_multiply_adds_are_counted():
    assert told("fedavg", {"mlp": {"hidden": [20]}}).multiply_adds == 64 * 20 + 20 * 10
    conv = 8 * 8 * 16 * 9 + 4 * 4 * 16 * 32 * 9 + 32 * 4 * 64 + 64 * 10
    assert told("fedavg").multiply_adds == conv


@pytest.mark.parametrize(("fraction", "megabytes"), [(1.0, "102.2"), (0.5, "51.1"), (0.1, "10.2")])
def test_psfed_on_resnet50(fraction, megabytes):
    call = [
        "explain",
        f"[{{psfed: {{fraction: {fraction}}}}}]",
        "--model",
        "resnet50",
        "--shape",
        "3x224x224",
        "--classes",
        "1000",
        "--json",
    ]
    found = json.loads(CliRunner().invoke(app, call).output)
    assert found["parameters"] == 25_557_032
    size = found["sizes"][0]
    assert f"{size['down']['bytes'] / 1e6:.1f}" == f"{size['up']['bytes'] / 1e6:.1f}" == megabytes


@pytest.mark.parametrize(
    ("model", "classes", "factors", "millions"),
    [
        ("resnet34", 100, (1, 2, 4, 8, 12), ("21.328", "8.401", "4.985", "3.277", "2.708")),
        ("resnet18", 10, (1, 2, 4, 8), ("11.174", "4.158", "2.210", "1.236")),
    ],
)
def test_fedhm_on_resnets(model, classes, factors, millions):
    ratios = ", ".join(str(1 / factor) for factor in factors)
    call = ["explain", f"[{{fedhm: {{ratios: [{ratios}]}}}}]", "--model", model, "--classes", str(classes), "--json"]
    found = json.loads(CliRunner().invoke(app, call).output)
    assert tuple(f"{size['parameters'] / 1e6:.3f}" for size in found["sizes"]) == millions
    costs = [size["multiply_adds"] for size in found["sizes"]]
    assert costs == sorted(costs, reverse=True)


def test_a_head_that_goes_up_only_is_said():
    e = explain([{"pfedsim": {"mode": "published"}}], "cnn", *DIGITS)
    assert e.values == e.own == ["head"]
    assert e.sizes[0].up.parameters > e.sizes[0].down.parameters
    assert e.row_bytes > 0


def test_the_page_a_person_reads():
    out = CliRunner().invoke(app, ["explain", "psfed+topk+int8+memory"]).output
    for words in ("goes down", "goes up", "stays home", "a client keeps", "the server keeps", "multiply-adds", "≤"):
        assert words in out


def test_bad_input():
    assert CliRunner().invoke(app, ["explain", "psfed", "--shape", "3xx"]).exit_code == 2
    with pytest.raises(ConfigError, match="takes tokens"):
        explain("fedavg", "transformer", (3, 8, 8), 10)
    assert CliRunner().invoke(app, ["explain", "psfet"]).exit_code == 2
