"""dp and obfuscate in real runs: both engines, resuming, what they combine with and what they refuse."""

import re
from pathlib import Path

import pytest
import torch

import sparing
from sparing.core.compose import compose, remake_model
from sparing.core.context import context
from sparing.core.errors import ConfigError, MethodError
from sparing.core.method import Local
from sparing.core.parcel import Schema
from sparing.core.registry import known_recipes
from sparing.core.tree import layout_of
from sparing.parts.code.privacy import notes_of
from sparing.recipes.dp import dp
from sparing.runs.explanation import explain_method
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.study import method_list
from support import small_layout, small_net

DEEP = torch.nn.Sequential(
    torch.nn.Conv2d(2, 4, 3), torch.nn.Conv2d(4, 4, 1), torch.nn.Flatten(), torch.nn.Linear(16, 3)
)
SECRET = bytes(range(32))
METHODS = [
    "dp",
    [{"dp": {"mode": "local", "noise": 0.1}}],
    [{"dp": {"adaptive": True}}, "int8"],
    ["personal", "psfed", "dp", "topk", "int8", "memory", "fedavgm"],
    [{"psfed": {"per_client": True}}, {"dp": {"mode": "local"}}, "topk", "qsgd"],
    ["dp", "eden"],
    ["fedscr", "dp", "int4"],
    [{"dp": {"mode": "local", "noise": 0.01}}, "median"],
    [{"obfuscate": {"noise": 0.1}}],
    [{"psfed": {"per_client": True}}, {"obfuscate": {"rotate": True}}, "topk", "int8", "memory"],
    ["personal", "dp", {"obfuscate": {"noise": 0.1, "rotate": True}}, "sign"],
]


def name(method):
    return "+".join(
        method_list(method)[i] if isinstance(e, str) else next(iter(e)) for i, e in enumerate(method_list(method))
    )


@pytest.mark.parametrize("method", METHODS, ids=name)
def test_both_engines_agree(method):
    study = {"rounds": 2, "sample": 5, "seed": 2, "local": {"steps": 2}, "fleet": {"dropout": 0.2}}
    fast, plain = (
        sparing.run(
            "digits",
            method,
            engine=engine,
            plan={"path": "loop", "chunk": 3},
            evaluate={"every": 2},
            secret=SECRET,
            **study,
        )
        for engine in ("vector", "debug")
    )
    assert fast.model_sha256 == plain.model_sha256
    assert [(r.up_bytes, r.down_bytes, r.metrics) for r in fast.table] == [
        (r.up_bytes, r.down_bytes, r.metrics) for r in plain.table
    ]


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    "method", [[{"dp": {"adaptive": True}}], ["psfed", {"dp": {"mode": "local"}}, "topk"]], ids=["adaptive", "local"]
)
def test_a_broken_run_resumes_to_the_same_bits(tmp_path, method):
    study = {"rounds": 4, "sample": 4, "seed": 1, "local": {"steps": 1}, "checkpoint": 2}

    def breaks(record):
        if record.round == 3:
            raise Stop

    whole = sparing.run("digits", method, secret=SECRET, **study)
    with pytest.raises(Stop):
        sparing.run("digits", method, out=tmp_path / "a", loggers=[breaks], secret=SECRET, **study)
    resumed = sparing.resume(tmp_path / "a")
    assert resumed.model_sha256 == whole.model_sha256
    assert resumed.epsilon == whole.epsilon
    assert [r.metrics for r in resumed.table] == [r.metrics for r in whole.table]


def even_task():
    """Clients with equally many samples, for whom weights by samples are equal weights."""
    g = torch.Generator().manual_seed(0)
    clients = [(torch.randn(8, 2, 4, 4, generator=g), torch.randint(0, 3, (8,), generator=g)) for _ in range(6)]
    return sparing.Task(lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(32, 3)), clients, clients[0])


def test_without_noise_and_with_a_wide_bound_it_is_fedavg_with_equal_weights():
    study = {"rounds": 3, "sample": 3, "seed": 1, "local": {"steps": 2}, "plan": {"path": "loop"}}
    plain = sparing.run(even_task(), "fedavg", **study)
    quiet = [{"dp": {"noise": 0, "clip": 1e6, "source": "seed"}}]
    assert sparing.run(even_task(), quiet, **study).model_sha256 == plain.model_sha256
    quiet = [{"dp": {"noise": 0, "clip": 1e6, "mode": "local"}}]
    assert sparing.run(even_task(), quiet, **study).model_sha256 == plain.model_sha256


def test_a_client_that_cheats_is_clipped_by_the_server():
    """A stage behind dp that makes updates a thousand times as long moves the model no further than the bound."""

    def louder(method):
        codec = method.up[-1]

        def encode(parcel, state, view):
            out, state = codec.encode(parcel, state, view)
            leaves = {n: x._replace(value=x.value * 1000) for n, x in out.leaves.items()}
            return out._replace(leaves=leaves), state

        return method._replace(up=(*method.up[:-1], codec._replace(encode=encode)))

    from reference import drive
    from sparing.core.tree import Layout

    layout = Layout({"w": (3,)}, {"w": torch.float32})
    method = compose(layout, dp(noise=0, clip=0.5), louder)
    zero = {"w": torch.zeros(1, 3)}
    (played,), _ = drive.play(method, zero, [{0: {"w": [3.0, 4.0, 0.0]}, 1: {"w": [0.0, 0.0, 0.0]}}], [1, 1])
    assert float(played.up.leaves["w"].value[0].norm()) > 400
    assert float(played.server.model["w"].norm()) == pytest.approx(0.25, rel=1e-6)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("fedsim+dp", "'fedsim' weighs them"),
        ("dp+fedsim", "both say how much a client counts"),
        ("dp+median", "drop the robust blend"),
        ([{"norm-bound": {"bound": 1.0}}, "dp"], "drop the robust blend"),
        ("dp+stein", "'stein' looks at single updates"),
        ("stein+dp", "'stein' looks at single updates"),
        ("pfedsim+dp", "weighs them"),
        ("int8+dp", "dp must come before"),
        ("eden+dp", "cannot work on values in another basis"),
        ("fp16+dp", "dp must come before"),
        (["topk", {"dp": {"mode": "local"}}], "dp must come before"),
        ([{"dp": {"mode": "local"}}, "topk", "memory"], "larger than the update"),
        ([{"fedscr": {"adaptive": True}}, "dp"], "'fedscr' sends 'divergence' as it is"),
        ([{"dp": {"mode": "local"}}, {"fedsim": {"at": "client"}}], "sends 'similarity' as it is"),
        ([{"pfedsim": {"mode": "published"}}, {"dp": {"mode": "local"}}], "goes up as it is"),
        ([{"fedhm": {"weighting": "samples"}}, "dp"], "clients of one size"),
        ("dp+ef21", "weights by samples"),
        ("dp+memory", "nothing to remember"),
    ],
    ids=str,
)
def test_what_would_break_the_guarantee_is_refused(method, said):
    layout = layout_of(DEEP)
    with pytest.raises(MethodError, match=said):
        compose(layout, *recipes_from_entries(method_list(method)))


def test_one_dp_is_enough():
    with pytest.raises(MethodError, match="dp stands twice"):
        compose(layout_of(DEEP), dp(), dp(mode="local"))


def test_shared_buffers_are_refused_and_own_ones_are_not():
    with pytest.raises(MethodError, match=r"dp does not share buffers such as '1.num_batches_tracked'"):
        compose(small_layout(), dp())
    compose(small_layout(), dp(), local=Local(buffers="own"))
    compose(layout_of(small_net(), static=True), dp(mode="local"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"noise": -1}, "dp.noise is -1"),
        ({"clip": 0}, "dp.clip is 0"),
        ({"epsilon": 0}, "dp.epsilon is 0"),
        ({"delta": 1}, "dp.delta is 1; it must be above 0 and below 1"),
        ({"quantile": 2}, "dp.quantile is 2"),
        ({"adaptive": True, "mode": "local"}, "use mode: central"),
    ],
    ids=str,
)
def test_options_that_cannot_be_meant(options, said):
    with pytest.raises(ConfigError, match=said):
        dp(**options)


def test_every_stage_there_is_can_be_asked_which_notes_it_adds():
    layout = layout_of(DEEP)
    adding = set()
    needs = {"memory": ["topk", "memory"], "tight": ["topk", "tight"], "norm-bound": [{"norm-bound": {"bound": 1.0}}]}
    needs |= {"split-mix": [{"split-mix": {"ratio": 0.5}}], "lora": [{"lora": {"targets": ["0"], "rank": 1}}]}
    needs |= {"obfuscate": [{"obfuscate": {"noise": 1.0, "rotate": True}}]}
    for recipe_name in known_recipes():
        made = recipes_from_entries(needs.get(recipe_name, [recipe_name]))
        method = compose(layout_of(remake_model(DEEP, made)), *made)
        adding |= {codec.name for codec in method.up if notes_of(codec)}
    assert adding <= {"fedscr"}
    one = torch.ones(1, dtype=torch.int64)
    adaptive = compose(layout, dp(adaptive=True)).up[0]
    assert adaptive.schema(Schema({}, {}), context(0, 1, 1, one, one, 1, 1)).notes == {"within": 1}


@pytest.mark.parametrize("source", [{}, {"source": "secret"}, {"source": "system"}], ids=str)
def test_noise_from_a_secret_is_never_the_same(source):
    study = {"rounds": 1, "sample": 3, "seed": 1, "local": {"steps": 1}}
    for method in ({"dp": source}, {"dp": source | {"mode": "local"}}, {"obfuscate": source | {"noise": 0.1}}):
        runs = [sparing.run("digits", [method], **study).model_sha256 for _ in range(2)]
        assert runs[0] != runs[1]


@pytest.mark.parametrize("name", ["dp", "obfuscate"])
def test_noise_from_the_seed_can_be_drawn_again(name):
    study = {"rounds": 1, "sample": 3, "seed": 1, "local": {"steps": 1}}
    method = [{name: {"source": "seed"} | ({"noise": 0.1} if name == "obfuscate" else {})}]
    runs = [sparing.run("digits", method, **study).model_sha256 for _ in range(2)]
    assert runs[0] == runs[1]


def test_it_can_be_explained():
    said = explain_method([{"dp": {"adaptive": True}}, "int8"], "cnn", (3, 32, 32), 10)
    assert said.stages == ["dp", "int8"]
    assert said.steps == ["dp"]
    assert said.weighing == "uniform"
    assert said.sizes[0].down.notes == ["clip"]
    assert "within" in said.sizes[0].up.notes


def test_what_the_page_shows_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    rounds, spent, why = capsys.readouterr().out.split(maxsplit=2)
    assert int(rounds) < 30
    assert float(spent) <= 1
    assert "more than dp.epsilon 1" in why
