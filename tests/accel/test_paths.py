"""What accelerators do is what the plain path does: within rounding, and bit for bit where they are switched off."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import sparing
from sparing.core.context import context
from sparing.core.errors import ConfigError
from sparing.core.method import Local, Phase
from sparing.core.optimiser import Optimiser
from sparing.core.tree import take_rows, tree_of, tree_sha256
from sparing.data.clients import Clients
from sparing.models import build_network
from sparing.runs.plan import settle
from sparing.train.local import train
from sparing.train.losses import cross_entropy
from sparing.train.paths import PATHS

MODELS = {
    "digits CNN": lambda: build_network("cnn", (1, 8, 8), 10),
    "MLP": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    "BatchNorm and dropout": lambda: nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(288, 10),
    ),
}  # fmt: skip


def cohort() -> Clients:
    g = torch.Generator().manual_seed(0)
    counts = (33, 9, 20)
    return Clients.of([(torch.randn(n, 1, 8, 8, generator=g), torch.randint(10, (n,), generator=g)) for n in counts])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "phase",
    [
        Phase(epochs=2, batch=8, optimiser=Optimiser(lr=0.05)),
        Phase(epochs=1, batch=8, optimiser=Optimiser(lr=0.05, momentum=0.9)),
    ],
)
def test_the_plain_loop_and_the_fast_one_agree(name, phase):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = MODELS[name]()
    data, ids = cohort(), torch.tensor([2, 0, 1])
    ctx = context(seed=5, round=2, rounds=9, ids=ids, n=data.count[ids], clients=3, samples=62)
    how = (model, cross_entropy, data, Local((phase,)), tree_of(model))
    (plain, said), (fast, told) = (train(*how, ctx, path) for path in ("loop", "loop-fast"))
    assert torch.allclose(said["loss"], told["loss"], rtol=1e-4)
    for key, x in plain.items():
        assert torch.allclose(fast[key], x, rtol=1e-4, atol=1e-5), key
    for path, whole in (("loop", plain), ("loop-fast", fast)):
        single, _ = train(*how, ctx.at(slice(1, 2)), path)
        assert tree_sha256(dict(single)) == tree_sha256(take_rows(dict(whole), slice(1, 2))), (
            "a row depends on nobody else"
        )


def test_the_plain_loop_is_for_float32():
    model, data = MODELS["MLP"](), cohort()
    ctx = context(seed=5, round=2, rounds=9, ids=torch.tensor([0]), n=data.count[:1], clients=3, samples=62)
    with pytest.raises(ConfigError, match="path 'loop' trains in float32, but precision is bf16: use 'loop-fast'"):
        train(model, cross_entropy, data, Local(), tree_of(model), ctx, precision="bf16")
    with pytest.raises(ConfigError, match=r"plan\.path is loop, on a CPU for float32 alone.*use loop-fast"):
        sparing.run("digits", rounds=1, sample=2, plan={"path": "loop", "precision": "bf16"})


TASK = {"data": "digits", "clients": 8, "model": "cnn"}
STUDY = {"rounds": 2, "sample": 3, "seed": 1, "local": {"steps": 4}}
SCRIPT = """
import json, sys, warnings
warnings.simplefilter("ignore")
import sparing
from sparing.train.paths import PATHS
out = {"paths": list(PATHS)}
for engine in ("vector", "debug"):
    for path in ("auto", "loop-fast"):
        folder = f"{sys.argv[1]}/{engine}-{path}"
        got = sparing.run(json.loads(sys.argv[2]), "topk+int8", engine=engine, plan={"path": path}, out=folder,
                          **json.loads(sys.argv[3]))
        out[f"{engine} {path}"] = [got.model_sha256, got.up_bytes, got.down_bytes]
print(json.dumps(out))
"""


def without_accelerators(folder) -> dict:
    env = {**os.environ, "SPARING_PLAIN": "1", "OMP_NUM_THREADS": "1"}
    args = [sys.executable, "-c", SCRIPT, str(folder), json.dumps(TASK), json.dumps(STUDY)]
    done = subprocess.run(args, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_without_accelerators_the_plain_loop_is_all_there_is(tmp_path):
    got = without_accelerators(tmp_path)
    assert got.pop("paths") == ["loop"]
    here = [sparing.run(TASK, "topk+int8", engine=e, plan={"path": "loop"}, **STUDY) for e in ("vector", "debug")]
    wanted = {(one.model_sha256, one.up_bytes, one.down_bytes) for one in here}
    assert len(wanted) == 1
    assert {tuple(values) for values in got.values()} == wanted
    for folder in tmp_path.iterdir():
        assert "path: loop\n" in (folder / "config.yaml").read_text(), "what really ran"


@pytest.fixture
def plain(monkeypatch):
    for name in [name for name in PATHS if name != "loop"]:
        monkeypatch.delitem(PATHS, name)


def test_a_study_that_names_another_path_is_told(plain):
    with pytest.warns(UserWarning, match="plan.path is stacked, but SPARING_PLAIN is set, so the run takes path loop"):
        result = sparing.run(TASK, plan={"path": "stacked"}, **STUDY)
    assert result.model_sha256 == sparing.run(TASK, plan={"path": "loop"}, **STUDY).model_sha256
    with pytest.raises(ConfigError, match=r"plan\.precision is bf16, which takes accelerators, but SPARING_PLAIN"):
        sparing.run(TASK, plan={"precision": "bf16"}, **STUDY)


def test_a_run_by_another_path_does_not_go_on_without_it(tmp_path, monkeypatch):
    sparing.run(TASK, plan={"path": "loop-fast"}, out=tmp_path / "a", **STUDY)
    for name in [name for name in PATHS if name != "loop"]:
        monkeypatch.delitem(PATHS, name)
    with (
        pytest.warns(UserWarning, match="takes path loop"),
        pytest.raises(ConfigError, match="was run by path loop-fast, which SPARING_PLAIN switches off; unset it"),
    ):
        sparing.resume(tmp_path / "a")


def test_measured_without_accelerators_there_is_nothing_to_compare(plain, monkeypatch):
    monkeypatch.setattr(settle, "LONG_RUN_SECONDS", 0.0)
    sparing.run(TASK, **STUDY)
