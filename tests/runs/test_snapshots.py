"""pictures.jsonl: what it says is so, recording changes nothing, and a broken run leaves the same file."""

import itertools
import json

import numpy as np
import pytest
import torch
from torch import nn

import sparing
from sparing.core.errors import ConfigError
from sparing.core.tree import Kind
from sparing.runs.snapshots import (
    _HEAT_MAP_SIDE,
    _MOST_HEAT_MAPS,
    _filters_and_channels,
    _intraclass_correlation,
    _layer_snapshots,
    _shuffled_correlation,
    is_snapshot_round,
)
from sparing.runs.start import task_from_study
from sparing.runs.study import study_from

TASK = {"data": "digits", "clients": 5, "model": {"mlp": {"hidden": [8, 8]}}}
OPTIONS = {"rounds": 4, "sample": 3, "local": {"steps": 2}, "record": ["updates", "similarity"]}
OPTIONS |= {"plan": {"path": "loop", "chunk": 2, "threads": 1}}
PUBLISHED = [{"pfedsim": {"mode": "published", "warmup": 0.0}}]


def conv_task() -> sparing.Task:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 2, 4, 4, generator=draw), torch.randint(0, 3, (40,), generator=draw)

    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3))

    return sparing.Task(model, [(x[i : i + 10], y[i : i + 10]) for i in range(0, 40, 10)], (x, y))


def kept(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "pictures.jsonl").read_text().splitlines()]


def of_kind(folder, kind) -> list[dict]:
    return [picture for picture in kept(folder) if picture["kind"] == kind]


def test_which_rounds_are_shown():
    assert [t for t in range(1, 21) if is_snapshot_round(t, 20)] == [1, 3, 10, 20]
    assert [t for t in range(1, 3) if is_snapshot_round(t, 2)] == [1, 2]
    assert is_snapshot_round(1, 1)


def test_an_update_is_the_one_that_the_client_sends(tmp_path):
    """One client a round and nothing compressed: the server's model moves by just that."""
    result = sparing.run(conv_task(), rounds=1, sample=1, record=["updates"], out=tmp_path / "a", plan={"path": "loop"})
    moved = (result.model["0.weight"] - dict(conv_task().build(0).state_dict())["0.weight"]).double().abs()
    (picture,) = of_kind(tmp_path / "a", "updates")
    assert (picture["layer"], picture["shape"], picture["round"]) == ("0.weight", [4, 2, 3, 3], 1)
    np.testing.assert_allclose(picture["values"], moved.mean((2, 3)).numpy(), rtol=2e-3)
    assert picture["filter"][0] == pytest.approx(pairwise(moved.flatten(1).numpy()), abs=2e-3)
    assert picture["channel"][0] == pytest.approx(pairwise(moved.transpose(0, 1).flatten(1).numpy()), abs=2e-3)


def pairwise(rows: np.ndarray) -> float:
    """The intraclass correlation from its definition, as an analysis of variance."""
    k, n = rows.shape
    between = n * sum((row.mean() - rows.mean()) ** 2 for row in rows) / (k - 1)
    inside = sum((x - row.mean()) ** 2 for row in rows for x in row) / (k * (n - 1))
    return (between - inside) / (between + (n - 1) * inside)


def test_the_correlation_is_that_of_two_entries_of_one_row():
    """Rows with a mean of their own of variance 1 and noise of variance 3: one quarter. Shuffled: nothing."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(400, 1, generator=draw).double() + 3**0.5 * torch.randn(400, 50, generator=draw).double()
    assert _intraclass_correlation(rows) == pytest.approx(0.25, abs=0.03)
    assert _intraclass_correlation(rows) == pytest.approx(pairwise(rows.numpy()))
    both = np.array([pair for row in rows.numpy() for pair in itertools.permutations(row[:12], 2)])
    assert _intraclass_correlation(rows[:, :12]) == pytest.approx(np.corrcoef(both.T)[0, 1], abs=0.01)
    assert abs(_shuffled_correlation(rows, 0)) < 0.005
    assert _intraclass_correlation(torch.ones(3, 3)) != _intraclass_correlation(torch.ones(3, 3)), (
        "nothing varies: no number"
    )
    assert _intraclass_correlation(torch.rand(1, 5)) != _intraclass_correlation(torch.rand(1, 5)), (
        "one row has no other to differ from"
    )


def test_channels_of_a_grouped_convolution_are_counted_by_group():
    size = torch.arange(4 * 2 * 3.0).reshape(4, 2, 3)
    _, channels = _filters_and_channels(size, 2)
    assert channels.tolist() == [[*size[g, c].tolist(), *size[g + 1, c].tolist()] for g in (0, 2) for c in (0, 1)]


def test_large_layers_are_drawn_small_and_few():
    many = {f"conv{i}.weight": Kind("conv") for i in range(9)}
    update = {name: torch.rand(1, 3 * _HEAT_MAP_SIDE, 5, 3, 3).double() for name in many}
    found = _layer_snapshots(
        update | {"head.weight": torch.rand(1, 3, 3).double()}, many | {"head.weight": Kind("linear")}, 0
    )
    drawn = [one for one in found if "values" in one]
    assert len(found) == 9, "all convolutions have their numbers; a dense layer beside them has not"
    assert [one["layer"] for one in drawn] == ["conv0.weight", "conv4.weight", "conv8.weight"]
    assert len(drawn) == _MOST_HEAT_MAPS
    values = np.array(drawn[1]["values"])
    assert values.shape == (_HEAT_MAP_SIDE, 5)
    whole = update["conv4.weight"][0].abs().mean((2, 3)).numpy()
    np.testing.assert_allclose(values, whole.reshape(_HEAT_MAP_SIDE, 3, 5).mean(1), rtol=2e-3)


def test_recording_changes_nothing(tmp_path):
    plain = sparing.run(TASK, "psfed+topk+memory", **{**OPTIONS, "record": []}, out=tmp_path / "plain")
    watched = sparing.run(TASK, "psfed+topk+memory", **OPTIONS, out=tmp_path / "watched")
    assert watched.model_sha256 == plain.model_sha256
    for name in ("ledger.csv", "clients.csv", "metrics.csv"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "watched" / name).read_bytes()
    assert {p["kind"] for p in kept(tmp_path / "plain")} == {"split"}
    assert {p["kind"] for p in kept(tmp_path / "watched")} == {"split", "updates", "cosines"}
    assert sorted({p["round"] for p in kept(tmp_path / "watched")}) == [1, 2, 4]


@pytest.mark.parametrize(("after", "every"), [(3, 2), (1, 2)])
def test_a_broken_run_leaves_the_same_pictures(tmp_path, after, every):
    options = {**OPTIONS, "checkpoint": every}

    def stop(record) -> None:
        if record.round == after:
            raise KeyboardInterrupt

    sparing.run(TASK, PUBLISHED, **options, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        sparing.run(TASK, PUBLISHED, **options, out=tmp_path / "broken", loggers=[stop])
    with open(tmp_path / "broken/pictures.jsonl", "a") as file:
        file.write('{"kind": "half a li')
    sparing.resume(tmp_path / "broken")
    assert (tmp_path / "broken/pictures.jsonl").read_bytes() == (tmp_path / "whole/pictures.jsonl").read_bytes()


def test_the_split_counts_every_training_sample(tmp_path):
    sparing.run(TASK, **{**OPTIONS, "rounds": 1, "record": []}, out=tmp_path / "a")
    (picture,) = of_kind(tmp_path / "a", "split")
    task = task_from_study(study_from({"task": TASK}))
    for i, counts in zip(picture["ids"], picture["values"], strict=True):
        assert counts == np.bincount(task.train.client(i)[1].numpy(), minlength=10).tolist()
    assert picture["total"] == sum(picture["samples"]) == int(task.train.count.sum())


def test_sizes_are_those_of_the_method(tmp_path):
    sparing.run(TASK, "fedhm", **{**OPTIONS, "record": ["updates"]}, out=tmp_path / "a")
    (picture,) = of_kind(tmp_path / "a", "sizes")
    assert len(picture["sizes"]) == 5
    assert len(picture["names"]) == len(picture["parameters"]) > 1
    assert picture["parameters"] == sorted(picture["parameters"], reverse=True)
    assert np.array(list(picture["layers"].values())).sum(0).tolist() == picture["parameters"]


def test_cosines_are_of_the_clients_of_that_round(tmp_path):
    sparing.run(TASK, **OPTIONS, out=tmp_path / "a")
    ledger = [line.split(",") for line in (tmp_path / "a/ledger.csv").read_text().splitlines()[1:]]
    for picture in of_kind(tmp_path / "a", "cosines"):
        values = np.array(picture["values"])
        assert picture["ids"] == sorted({int(i) for t, i, *_ in ledger if int(t) == picture["round"]})
        np.testing.assert_allclose(np.diag(values), 1, atol=1e-3)
        np.testing.assert_array_equal(values, values.T)
        assert np.abs(values).max() <= 1


def test_pfedsims_similarities_are_the_servers(tmp_path):
    result = sparing.run(TASK, PUBLISHED, **{**OPTIONS, "sample": 5, "record": []}, out=tmp_path / "a")
    values = np.array(of_kind(tmp_path / "a", "similarity")[-1]["values"], dtype=float)
    pairs = values[np.triu_indices(5, 1)]
    assert np.nanmean(np.nan_to_num(pairs)) == pytest.approx(result.metric("avg_similarity")[-1], abs=0.05)
    assert (pairs[~np.isnan(pairs)] > 0).all()


def test_updates_of_several_sizes_are_not_compared():
    with pytest.raises(ConfigError, match=r"record has similarity.*drop it"):
        sparing.run(TASK, "fedhm", rounds=1, record=["similarity"])
    with pytest.raises(ConfigError, match="record"):
        sparing.run(TASK, rounds=1, record=["everything"])
