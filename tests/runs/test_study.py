from itertools import pairwise

import pytest
import yaml

from sparing.core.errors import ConfigError
from sparing.runs.study import Study, load_study, method_list, study_from

STUDY = """
task:    {data: digits, clients: 20, split: {dirichlet: 0.3}, model: cnn}
method:  [psfed, {topk: {ratio: 0.1}}, int8]
local:   {epochs: 1, batch: 32, lr: 0.05}
rounds:  20
sample:  0.5
engine:  vector
device:  auto
seed:    0
"""


def test_a_study_file_with_overrides(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    study = load_study(path, ["local.lr=0.1", "task.split=iid", "method=psfed+int8", "rounds=3"])
    assert study.local.lr == 0.1
    assert study.local.batch == 32
    assert study.task.split == "iid"
    assert study.method == ["psfed", "int8"]
    assert study.rounds == 3


def test_every_key_is_optional_and_a_study_survives_yaml():
    study = study_from({})
    assert study == Study()
    assert study_from(yaml.safe_load(yaml.safe_dump(study.model_dump()))) == study


def test_lists_and_plus_are_the_same():
    assert method_list("psfed+topk+int8") == method_list(["psfed", "topk+int8"]) == ["psfed", "topk", "int8"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"round": 3}, "unknown key 'round'; did you mean 'rounds'"),
        ({"local": {"learning_rate": 1}}, "unknown key 'local.learning_rate'; known: batch, buffers"),
        ({"task": {"client": 3}}, "unknown key 'task.client'; did you mean 'clients'"),
        ({"rounds": -1}, r"rounds: .*greater than 0 \(seen: -1\)"),
        ({"rounds": "many"}, r"rounds: .*integer.*\(seen: 'many'\)"),
        ({"sample": 1.5}, "sample is 1.5; a share lies between 0 and 1"),
        ({"sample": -2}, "sample: .*greater than 0"),
        ({"sample": 0}, "sample: .*greater than 0"),
        ({"task": {"clients": -5}}, r"task.clients: .*greater than 0 \(seen: -5\)"),
        ({"local": {"lr": -0.1}}, "local.lr: .*greater than 0"),
        ({"local": {"momentum": 1}}, "local.momentum: .*less than 1"),
        ({"local": {"optimiser": "sdg"}}, "local.optimiser: no optimiser is called 'sdg': did you mean 'sgd'"),
        ({"engine": "fast"}, "engine: .*'vector', 'debug' or 'network'"),
        ({"method": ""}, "name at least one"),
        ({"method": []}, "name at least one"),
        ({"method": 7}, "method is 7: write a name"),
        ({"method": [{"topk": 0.1}]}, r"method is \{'topk': 0.1\}: write a name"),
        ({"local": 3}, r"local is 3; it has keys of its own, such as \{epochs: ...\}"),
        ({"sample": True}, "sample is true"),
        ({"local": {"lr": float("inf")}}, "local.lr: .*finite"),
        ({"seed": 10**30}, "seed: .*less than"),
    ],
)
def test_mistakes_become_one_sentence(values, words):
    with pytest.raises(ConfigError, match=words) as caught:
        study_from(values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [("a: [", "not valid YAML"), ("- a\n- b", "holds a list; a study is a mapping"), ("\x00", "not valid YAML")],
)
def test_a_broken_file_says_so(tmp_path, text, words):
    path = tmp_path / "study.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_study(path)


def test_an_empty_file_is_the_default_study(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text("")
    assert load_study(path) == Study()


@pytest.mark.parametrize("item", ["rounds", "=3", "rounds=[", "local.x.y=1"])
def test_bad_overrides_are_refused(item):
    with pytest.raises(ConfigError):
        load_study(None, [item])


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"there is no study file 'nowhere.yaml'"):
        load_study("nowhere.yaml")


LAUGHS = "a: &a [x, x]\n" + "".join(f"{c}: &{c} [{', '.join([f'*{b}'] * 9)}]\n" for b, c in pairwise("abcdefghij"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LAUGHS, "is not valid YAML: it holds more than 1,000,000 values"),
        ("task: &a {data: *a}", "is not valid YAML: it holds more than"),
        ("[" * 10_000, "is not valid YAML: it is nested too deeply"),
        ("rounds: 2001-99-99", "is not valid YAML: month must be in 1..12"),
        ("rounds: 0b_", "is not valid YAML: invalid literal"),
        ("rounds: {\ufeff", "is not valid YAML"),
        ("fleet: {" + "a" * 900 + ": " + "9" * 9000 + "}", "is not valid YAML|unknown key 'fleet.aaa"),
        ("rounds: !!python/object/apply:os.getcwd []", "is not valid YAML: could not determine a constructor"),
    ],
)
def test_studies_made_to_do_harm(tmp_path, text, words):
    path = tmp_path / "study.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words) as error:
        load_study(path)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1500


def test_an_override_that_is_no_date():
    with pytest.raises(ConfigError, match="the value in 'rounds=2001-99-99' is not valid YAML; quote it"):
        load_study(None, ["rounds=2001-99-99"])
