"""`plan.memory` bounds what a step keeps; what was chosen is written down, and changes no run that fits."""

import pytest
import torch
import yaml
from torch import nn

import sparing
from sparing.core.errors import ConfigError
from sparing.models.text import Transformer
from sparing.runs.study import study_from

LENGTH, WORDS = 24, 40
LOCAL = {"epochs": 1, "batch": 8, "lr": 0.3}


def sentences(client):
    g = torch.Generator().manual_seed(client)
    x = (torch.randint(WORDS, (12, 1), generator=g) + torch.arange(LENGTH + 1)) % WORDS
    beyond = torch.arange(LENGTH) >= torch.randint(3, LENGTH + 1, (12, 1), generator=g)
    return x[:, :-1], x[:, 1:].masked_fill(beyond, -100)


def speaker():
    return Transformer(WORDS, LENGTH, 16, 3, 2, last=False)


def task(model=speaker):
    return sparing.Task(model, [sentences(i) for i in range(4)], sentences(9), metric="perplexity")


def run(folder, given=None, **plan):
    result = sparing.run(
        given or task(), rounds=2, sample=3, seed=1, local=LOCAL, out=folder, plan={"threads": 1, **plan}
    )
    return result, yaml.safe_load((folder / "config.yaml").read_text())["plan"]


@pytest.mark.accel
def test_less_memory_is_smaller_pieces_and_the_same_result(tmp_path):
    sizes = ("1GB", "800kB", "450kB", "380kB")
    runs = [run(tmp_path / size, memory=size, path="loop-fast") for size in sizes]
    assert [plan["microbatch"] for _, plan in runs] == ["whole", 4, 1, 2]
    assert [plan["recompute"] for _, plan in runs] == [False, False, False, True]
    whole = runs[0][0]
    for other, _ in runs[1:]:
        for name, x in whole.model.items():
            torch.testing.assert_close(other.model[name], x, rtol=1e-3, atol=1e-5)
        assert other.up_bytes == whole.up_bytes


@pytest.mark.accel
def test_a_run_in_pieces_goes_on_as_it_was(tmp_path):
    plan = {"path": "loop", "microbatch": 3, "recompute": True, "logits": "chunked"}
    whole, _ = run(tmp_path / "whole", **plan)
    sparing.run(task(), rounds=1, sample=3, seed=1, local=LOCAL, out=tmp_path / "half", plan=plan | {"threads": 1})
    config = tmp_path / "whole" / "config.yaml"
    assert sparing.resume(tmp_path / "whole", task=task()).model_sha256 == whole.model_sha256
    assert yaml.safe_load(config.read_text())["plan"]["microbatch"] == 3


def test_one_that_does_not_fit_is_refused():
    plan = {"memory": "380kB", "path": "loop", "threads": 1, "recompute": False}
    with pytest.raises(ConfigError, match=r"memory is 380kB, but .* one sample alone takes .* bytes of activations"):
        sparing.run(task(), rounds=1, sample=2, local=LOCAL, plan=plan)


def chain(*layers):
    return lambda: nn.Sequential(nn.Embedding(WORDS, LENGTH), *layers)


@pytest.mark.parametrize(
    ("model", "plan", "says"),
    [
        (speaker, {"path": "stacked", "microbatch": 2}, r"microbatch is 2, but path stacked takes whole steps"),
        (chain(nn.Linear(LENGTH, WORDS)), {"recompute": True}, r"recompute is true, but the model has no repeated"),
        (chain(nn.Linear(LENGTH, WORDS), nn.Tanh()), {"logits": "chunked"}, r"chunked, which is for language models"),
        (
            chain(nn.BatchNorm1d(LENGTH), nn.Linear(LENGTH, WORDS)),
            {"microbatch": 2},
            r"microbatch is 2, but the model looks at whole batches",
        ),
    ],
)
@pytest.mark.accel
def test_what_cannot_be_taken_in_pieces(model, plan, says):
    with pytest.raises(ConfigError, match=says):
        sparing.run(task(model), rounds=1, sample=2, local=LOCAL, plan={"path": "loop"} | plan)


@pytest.mark.accel
def test_asking_for_pieces_takes_a_path_that_has_them(tmp_path):
    assert run(tmp_path / "a", microbatch=2)[1]["path"] == "loop-fast"
    assert (
        run(tmp_path / "b", microbatch=8)[0].model_sha256
        == run(tmp_path / "c", path="loop-fast", microbatch=8)[0].model_sha256
    )


def test_whole_steps_are_the_study_of_before():
    """A run of before these keys can go on: they are in its fingerprint only where they say something."""
    plain = study_from({"plan": {"path": "loop"}})
    said = study_from({"plan": {"path": "loop", "microbatch": "whole", "recompute": False, "logits": "whole"}})
    assert (
        plain.fingerprint()
        == said.fingerprint()
        != study_from({"plan": {"path": "loop", "microbatch": 2}}).fingerprint()
    )
