"""What `explain_method` says is what a run then does."""

import functools
import json

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import sparing
from sparing.cli.app import app
from sparing.core.errors import ConfigError
from sparing.parts.factors import FactoredConv
from sparing.runs.explanation import _split_the_other_way, explain_method

DIGITS = ((1, 8, 8), 10)
STUDY = {"task": "digits", "sample": 4, "rounds": 3, "local": {"steps": 2}, "seed": 0}


def told(method, model: str | dict = "cnn"):
    return explain_method(method, model, *DIGITS).sizes[0]


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
    e = explain_method("psfed+personal+topk+memory", "cnn", *DIGITS)
    assert e.private == ["head"]
    assert e.own == ["conv1", "conv2", "dense"]
    assert e.stages == ["topk"]
    assert e.memory
    assert set(e.client_bytes) == {"own", "up/residual"}
    down, up = e.sizes[0].down, e.sizes[0].up
    assert (down.positions, up.positions) == ("free", "paid")
    assert up.sent < up.parameters == down.parameters < e.parameters
    assert explain_method("fedavgm", "cnn", *DIGITS).server_bytes == {"fedavgm": 8 * e.parameters}


def test_a_full_sync_is_not_taken_for_an_ordinary_round():
    plain = told("psfed").up.bytes
    for sync in (2, 5, 20):
        found = told([{"psfed": {"sync": sync}}]).up
        assert abs(found.about - plain) <= 8
        assert 0 <= found.bytes - plain <= 24, "but for the lengths of lengths"
        assert found.most == told("fedavg").up.bytes
    assert not told([{"psfed": {"selector": "layers"}}]).up.exact


def test_multiply_adds_are_counted():
    assert told("fedavg", {"mlp": {"hidden": [20]}}).multiply_adds == 64 * 20 + 20 * 10
    conv = 8 * 8 * 16 * 9 + 4 * 4 * 16 * 32 * 9 + 32 * 4 * 64 + 64 * 10
    assert told("fedavg").multiply_adds == conv


def test_psfed_on_resnet50():
    """Less than all of it is in tests/recipes/test_psfed.py."""
    shape = ["--shape", "3x224x224", "--classes", "1000"]
    call = ["explain", "[{psfed: {fraction: 1.0}}]", "--model", "resnet50", *shape, "--json"]
    found = json.loads(CliRunner().invoke(app, call).output)
    assert found["parameters"] == 25_557_032
    size = found["sizes"][0]
    assert f"{size['down']['bytes'] / 1e6:.1f}" == f"{size['up']['bytes'] / 1e6:.1f}" == "102.2"


def any_basis(x):
    """In place of eigenvectors, whose search is long: nothing that is counted depends on them."""
    basis = torch.eye(x.shape[-1], dtype=x.dtype).expand_as(x).clone()
    return torch.return_types.linalg_eigh((torch.ones(x.shape[:-1], dtype=x.dtype), basis))


@functools.cache
def fedhm_on(model, classes, factors):
    ratios = ", ".join(str(1 / factor) for factor in factors)
    call = ["explain", f"[{{fedhm: {{ratios: [{ratios}]}}}}]", "--model", model, "--classes", str(classes), "--json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", any_basis)
        return json.loads(CliRunner().invoke(app, call).output)["sizes"]


@pytest.mark.parametrize(
    ("model", "classes", "factors", "millions"),
    [
        ("resnet34", 100, (1, 2, 4, 8, 12), ("21.328", "8.401", "4.985", "3.277", "2.708")),
        ("resnet18", 10, (1, 2, 4, 8), ("11.174", "4.158", "2.210", "1.236")),
    ],
)
def test_fedhm_on_resnets(model, classes, factors, millions):
    sizes = fedhm_on(model, classes, factors)
    assert tuple(f"{size['parameters'] / 1e6:.3f}" for size in sizes) == millions
    costs = [size["multiply_adds"] for size in sizes]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("factor", [2, 4, 8])
def test_the_cost_of_factored_layers_is_that_of_the_formula(factor):
    """Of ResNet-18 on 32 x 32, layer by layer, in both splits."""
    full, *thin = fedhm_on("resnet18", 10, (1, 2, 4, 8))
    layers = [(64, 64, 32, 32)] * 2  # outputs, inputs, height before and after; the first block stays whole
    for m, side in ((128, 16), (256, 8), (512, 4)):
        layers += [(m, m // 2, 2 * side, side)] + [(m, m, side, side)] * 3
    k, plain, ours, other = 3, np.zeros(2, int), np.zeros(2, int), np.zeros(2, int)
    for m, n, seen, made in layers:
        r, places = m // factor, made * made
        plain += m * n * k * k, m * n * k * k * places
        ours += r * k * (m + n), r * n * k * seen * made + m * r * k * places
        other += r * (n * k * k + m), r * (n * k * k + m) * places
    size = thin[(2, 4, 8).index(factor)]
    whole = np.array([full["parameters"], full["multiply_adds"]]) - plain
    assert [size["parameters"], size["multiply_adds"]] == (whole + ours).tolist()
    assert [size["other_parameters"], size["other_multiply_adds"]] == (whole + other).tolist()
    assert (full["other_parameters"], full["other_multiply_adds"]) == (None, None)


@pytest.mark.parametrize("how", [{"stride": 2, "padding": (1, 2)}, {"dilation": (2, 1), "padding": "same"}], ids=str)
def test_the_other_split_is_the_same_layer(how):
    """Kernels that are not square, strides, paddings, biases: the same output shape, and torch's own count."""
    conv = nn.Conv2d(6, 8, (3, 5), **how)
    other = _split_the_other_way(nn.Sequential(FactoredConv(conv, 4)))
    x = torch.zeros(1, 6, 12, 16)
    assert other is not None
    assert other(x).shape == conv(x).shape
    assert sum(p.numel() for p in other.parameters()) == 4 * (6 * 15 + 8) + 8
    assert _split_the_other_way(conv) is None


def test_a_probe_set_is_said():
    method = [{"psfed": {"selector": "gradient", "source": "probe"}}]
    e, plain = (
        explain_method(method, "cnn", *DIGITS),
        explain_method([{"psfed": {"selector": "gradient"}}], "cnn", *DIGITS),
    )
    assert (e.probe, plain.probe) == (True, False)
    assert e.sizes[0].up.parameters == plain.sizes[0].up.parameters
    assert abs(e.sizes[0].up.bytes - plain.sizes[0].up.bytes) <= 8, "but for the length of a length"
    assert e.sizes[0].down.positions == "paid"
    out = CliRunner().invoke(app, ["explain", json.dumps(method)]).output
    assert "server data" in out
    assert "task.probe" in out


def test_a_head_that_goes_up_only_is_said():
    e = explain_method([{"pfedsim": {"mode": "published"}}], "cnn", *DIGITS)
    assert e.values == e.own == ["head"]
    assert e.sizes[0].up.parameters > e.sizes[0].down.parameters
    assert e.row_bytes > 0


def test_the_page_a_person_reads():
    out = CliRunner().invoke(app, ["explain", "psfed+topk+int8+memory"]).output
    for words in ("download", "upload", "stays local", "client state", "server state", "MACs", "≤"):
        assert words in out


def test_bad_input():
    assert CliRunner().invoke(app, ["explain", "psfed", "--shape", "3xx"]).exit_code == 2
    with pytest.raises(ConfigError, match="takes tokens"):
        explain_method("fedavg", "transformer", (3, 8, 8), 10)
    assert CliRunner().invoke(app, ["explain", "psfet"]).exit_code == 2


@pytest.mark.parametrize(
    ("method", "updates"),
    [("broadcast", True), ("personal+stc", True), ("psfed+stc", False), ("prune+broadcast", False), ("fedavg", False)],
)
def test_whether_updates_go_down(method, updates):
    found = explain_method(method, "cnn", (1, 8, 8), 10)
    assert found.updates == updates
    assert found.broadcast == ([] if method == "fedavg" else ["stc" if "stc" in method else "ecsq"])
    assert found.sizes[0].down.exact != updates, "at most the whole model"
    assert ("its last download" in found.client_bytes) == updates
    shown = " ".join(CliRunner().invoke(app, ["explain", method], terminal_width=500).output.split())
    assert ("updates since a client's last round" in shown) == updates
    assert ("but clients download values" in shown) == (method in ("psfed+stc", "prune+broadcast"))
