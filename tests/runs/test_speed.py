"""benchmarks/speed.py: the same work for all, the machine's limit, and what it prints."""

import importlib
import json
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FIXED = ["--plan", "path=implicit", "chunk=32", "threads=1"]


@pytest.fixture(scope="module", autouse=True)
def on_the_path():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        patch.setenv("XDG_CACHE_HOME", "")  # the benchmark sets it
        yield


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """One small run: our FedAvg in both precisions, and a method nobody knows."""
    import speed
    from peers import contest

    path = tmp_path_factory.mktemp("speed") / "speed.json"
    words = ["--shapes", "mlp", "--rounds", "1", "--repeats", "2", "--peers", "--methods", "nobodys"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contest, "LEAST", 0.0)
        patch.setattr(contest, "WARM", 1)
        speed.main([*words, *FIXED, "--json", str(path), "--plot", str(path.with_suffix(".png"))])
    return path


def test_what_a_contestant_took(kept):
    found = json.loads(kept.read_text())["shapes"]["mlp"]
    assert list(found["rows"]) == ["sparing", "sparing, bf16"]  # the unknown method is left out
    row, half = found["rows"].values()
    assert len(row["seconds"]) == len(row["cpu"]) == 2
    assert min(row["seconds"]) > 0
    assert 100 < row["start_mb"] < row["peak_mb"] + 1 < 5000
    assert row["plan"]["path"] == half["plan"]["path"] == "implicit"
    assert (row["plan"]["precision"], half["plan"]["precision"]) == ("float32", "bf16")
    assert found["apart"]["sparing"] == 0
    assert 1e-6 < found["apart"]["sparing, bf16"] < 1e-2
    assert kept.with_suffix(".png").stat().st_size > 5000


def test_contestants_take_turns(monkeypatch):
    from peers import contest as module

    asked, pace = [], {"a": 2.0, "b": 0.25}

    def ask(one, rounds):
        asked.append((one.name, rounds))
        return {"seconds": pace[one.name] * rounds, "cpu": rounds, "peak_mb": 9.0 - len(asked), "gpu_mb": 0.0}

    ready = [module.Contestant(name, None, None, {"plan": {}}) for name in ("a", "b")]  # type: ignore[arg-type]
    monkeypatch.setattr(module, "ready", lambda specs, rounds: ready)
    monkeypatch.setattr(module, "ask", ask)
    monkeypatch.setattr(module, "dismiss", lambda one: asked.append((one.name, "leaves")))
    rows = module.contest({}, rounds=3, repeats=2)
    assert asked[2:] == [("a", 3), ("b", 4), ("a", 3), ("b", 4), ("a", "leaves"), ("b", "leaves")]  # a second at least
    assert rows["a"]["seconds"] == [2.0, 2.0]  # a round
    assert rows["b"] == {"plan": {}, "seconds": [0.25, 0.25], "cpu": [1.0, 1.0], "peak_mb": 5.0, "gpu_mb": 0.0}


def after(by: str, shape, rounds: int) -> dict[str, torch.Tensor]:
    """The model of a contestant that runs here."""
    from peers.child import Spec

    models = []

    def serve(do, model, **told):
        do(rounds)
        models.append({name: x.clone() for name, x in model().items()})

    spec = Spec(by, shape, "cpu", seed=3, threads=1, plan={"threads": 1})
    importlib.import_module(f"peers.{by}").enter(spec, serve)
    return models[0]


def test_ours_and_the_plain_loop_do_the_same_work():
    from peers.shapes import shape_of

    few = {"clients": 3, "cohort": 3, "samples": 10, "epochs": 2, "dropout": False}
    for name in ("mlp", "cnn"):
        shape = shape_of(name, "cpu")._replace(**few)
        ours, plain, start = after("ours", shape, 2), after("plain", shape, 2), shape.model().state_dict()
        assert ours.keys() == plain.keys()
        for key in plain:
            assert (ours[key] - plain[key]).abs().max() < 1e-5
            assert (ours[key] - start[key]).abs().max() > 1e-4


def test_the_file_holds_what_was_printed(kept, capsys):
    import speed

    speed.main(["--table", str(kept)])
    text = capsys.readouterr().out
    assert "| sparing |" in text
    assert "100 of 1,000 clients x 20 samples a round" in text


def test_other_work_is_refused(kept):
    import speed

    found = json.loads(kept.read_text())
    found["shapes"]["mlp"]["apart"]["pfl"] = 2e-4
    other = kept.with_name("other.json")
    other.write_text(json.dumps(found))
    with pytest.raises(SystemExit, match="not the same work: mlp: pfl is 2e-04 away"):
        speed.main(["--table", str(other)])


def test_ratios_are_taken_within_a_repetition(kept):
    from peers import table

    found = json.loads(kept.read_text())["shapes"]["mlp"]
    del found["rows"]["sparing, bf16"]
    for who, seconds in {"sparing": [1.0, 2.0, 10.0], "plain": [3.0, 6.0, 10.0]}.items():
        found["rows"][who] = found["rows"]["sparing"] | {"seconds": seconds, "cpu": [1.0]}
    text = table.shape_table("mlp", found | {"floor": 0.5})
    assert "| sparing | 2 | 1 - 10 | 1x | 1 | 25.0% |" in text
    assert "| plain | 6 | 3 - 10 | 3x | 1 | 8.3% |" in text


def test_arithmetic_of_a_round():
    from peers import limit
    from peers.shapes import shape_of

    mlp = shape_of("mlp", "cpu")
    first, others = 784 * 200, 200 * 200 + 200 * 10
    assert limit.flops(mlp) == 100 * 20 * 2 * (2 * first + 3 * others)  # nobody needs the gradient of the input
    assert limit.weight_bytes(mlp) == 2 * 4 * 199_210 * 100 * 2
    able = {"flops": 1e12, "bytes": 1e9}
    assert limit.floor(mlp, "cpu", able) == limit.flops(mlp) / 1e12
    assert limit.floor(mlp, "cuda", able) == limit.weight_bytes(mlp) / 1e9


def test_shapes_are_those_of_the_page():
    from peers.shapes import shape_of

    page = (BENCHMARKS.parent / "docs" / "speed.md").read_text()
    for name in ("cnn", "mlp", "resnet18"):
        shape = shape_of(name, "cpu")._replace(clients=2)
        model = shape.model()
        assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in page
        x, y = shape.data(0)
        assert model(x[0, :2]).shape == (2, 10)
        assert y.shape == (2, shape.samples)
    still = shape_of("cnn", "cpu")._replace(dropout=False).model().train()
    x = torch.ones(1, 3, 32, 32)
    assert torch.equal(still(x), still(x))
