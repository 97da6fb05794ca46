"""`sparing wire`: what a parcel holds, with and without its schema."""

import json

import pytest
from typer.testing import CliRunner

import sparing
from sparing.cli.app import app
from sparing.core.errors import ConfigError
from sparing.runs.cost import run_cost_trial
from sparing.runs.files.kept_parcels import load_parcel
from sparing.wire import from_bytes, split_parcels, to_bytes

METHOD = [{"psfed": {"fraction": 0.7}}, "topk", "int8", "tight"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "r"
    study = {"engine": "debug", "plan": {"parcels": "kept"}, "rounds": 2, "sample": 3, "local": {"steps": 2}}
    result = sparing.run("digits", METHOD, out=folder, **study)
    return folder / "parcels", result


def asked(*words):
    return CliRunner().invoke(app, ["wire", *map(str, words)], terminal_width=200)


def test_a_run_keeps_every_parcel_and_they_add_up(kept):
    folder, result = kept
    for way, total in (("up", result.up_bytes), ("down", result.down_bytes)):
        files = sorted(folder.glob(f"round-*/client-*-{way}.spar"))
        assert len(files) == 6
        assert sum(len(file.read_bytes()) for file in files) == total


def test_what_was_kept_reads_back(kept):
    for file in kept[0].glob("round-0002/*.spar"):
        data, schemas = load_parcel(file)
        assert schemas
        parts = [
            to_bytes(from_bytes(part, s), 0, s.about) for part, s in zip(split_parcels(data), schemas, strict=True)
        ]
        assert b"".join(parts) == data


def test_every_byte_is_accounted_for(kept):
    file = next(kept[0].glob("round-0001/*up.spar"))
    said = json.loads(asked(file, "--json").output)
    assert said["version"] == 3
    assert said["bytes"] == sum(said["totals"].values()) == file.stat().st_size
    by_name = {leaf["name"]: leaf for leaf in said["leaves"]}
    conv = by_name["conv2.weight"]
    assert (conv["dtype"], conv["tight"], conv["shape"]) == ("int8", True, [32, 16, 3, 3])
    assert 0 < conv["sent"] < conv["entries"] == 32 * 16 * 9
    assert conv["bytes"] == conv["index"] + conv["scale"] + conv["value"] + 2  # a byte for each of two codes
    assert set(said["notes"]) == {"n", "loss"}
    text = asked(file).output
    assert "round 1, client" in text
    assert f"{said['bytes']:,} bytes, wire version 3" in text


@pytest.fixture(scope="module")
def broadcast(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "b"
    study = {"engine": "debug", "plan": {"parcels": "kept"}, "rounds": 3, "sample": 1.0, "local": {"steps": 1}}
    method = [{"broadcast": {"by": "randk+int8"}}]
    return folder / "parcels", sparing.run({"data": "digits", "clients": 4}, method, out=folder, **study)


def test_downloads_of_several_parcels(broadcast, tmp_path):
    folder, result = broadcast
    test_what_was_kept_reads_back(broadcast)
    files = sorted(folder.glob("round-0003/client-*-down.spar"))
    assert sum(file.stat().st_size for file in files) == result.table[2].down_bytes
    said = json.loads(asked(files[0], "--json").output)
    assert said["bytes"] == sum(part["bytes"] for part in said["parcels"]) == files[0].stat().st_size
    update, own = said["parcels"]
    assert update["about"].split("/")[1:] == ["2", "all", "update"]
    assert own["leaves"] == []
    assert {leaf["dtype"] for leaf in update["leaves"]} == {"int8"}
    text = asked(files[0]).output
    assert "in 2 parcels, one after another" in text
    assert "round 2, client all, update" in text
    assert "round 3, client 0, down" in text
    alone = tmp_path / "alone.spar"
    alone.write_bytes(files[0].read_bytes())
    assert asked(alone).output.count("only lengths are known") == 2
    alone.write_bytes(split_parcels(files[0].read_bytes())[0])
    alone.with_suffix(".schema").write_bytes(files[0].with_suffix(".schema").read_bytes())
    assert "1 parcels, but schemas of 2" in asked(alone).output


def test_without_a_schema_only_lengths(kept, tmp_path):
    file = next(kept[0].glob("round-0001/*down.spar"))
    alone = tmp_path / "alone.spar"
    alone.write_bytes(file.read_bytes())
    said = json.loads(asked(alone, "--json").output)
    assert sum(said["sections"]) < said["bytes"] == file.stat().st_size
    assert "only lengths are known" in asked(alone).output


def test_bad_files(kept, tmp_path):
    assert "cannot be read" in asked(tmp_path / "none.spar").output
    other = tmp_path / "other.spar"
    other.write_bytes(b"PK\3\4" + bytes(40))
    assert "not a parcel" in asked(other).output
    file = next(kept[0].glob("round-0001/*up.spar"))
    other.write_bytes(file.read_bytes())
    other.with_suffix(".schema").write_bytes(b"nonsense")
    assert "is not the schema of a parcel" in asked(other).output


@pytest.mark.parametrize(
    ("study", "words"),
    [({"engine": "vector", "out": True}, "only counts their bytes"), ({"engine": "debug"}, "has no folder")],
    ids=["vector", "no folder"],
)
def test_where_parcels_cannot_be_kept(study, words, tmp_path):
    out = tmp_path / "r" if study.pop("out", False) else None
    with pytest.raises(ConfigError, match=words):
        sparing.run("digits", "fedavg", rounds=1, out=out, plan={"parcels": "kept"}, **study)


def test_check_does_not_need_a_folder(monkeypatch):
    monkeypatch.setattr("sparing.runs.cost.check_study", run_cost_trial)
    result = CliRunner().invoke(app, ["check", "engine=debug", "plan.parcels=kept", "rounds=1", "sample=2", "--json"])
    assert json.loads(result.output)["plan"]["parcels"] == "kept"
