"""Help, completion and mistakes need no torch; what is imported late is all there once it is asked for."""

import os
import subprocess
import sys

import pytest

import sparing
from sparing.core.errors import SparingError
from sparing.core.method import Phase
from sparing.core.optimiser import Optimiser
from sparing.data import load_dataset
from sparing.models import build_network
from sparing.runs import known_names
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.study import LocalSection, method_list
from sparing.train.torch_optimisers import check_optimiser

TELL = """
import atexit, sys
atexit.register(lambda: sys.stderr.write("torch loaded" if "torch" in sys.modules else "torch not loaded"))
from sparing.cli.app import main
sys.argv = ["sparing", *sys.argv[1:]]
main()
"""


def typed(*words: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", TELL, *words], capture_output=True, text=True, env={**os.environ, **env}, check=False
    )


MISTAKES = {
    "rnu": "No such command 'rnu'",
    "run --roundz 3": "No such option: --roundz",
    "run methd=psfed": "unknown key 'methd'; did you mean 'method'?",
    "run local.lrr=3": "unknown key 'local.lrr'; did you mean 'lr'?",
    "run rounds=few": "rounds: input should be",
    "run plan.memory=much": "plan.memory is 'much'",
    "run method=psfedd": "unknown method 'psfedd'; did you mean 'psfed'?",
    "run task.data=digitz": "no data is called 'digitz'; did you mean 'digits'?",
    "run task.model=cnm": "no model is called 'cnm': did you mean 'cnn'?",
    "check method=tpok": "unknown method 'tpok'; did you mean 'topk'?",
    "bench method=tpok": "unknown method 'tpok'",
    "explain nothing": "unknown method 'nothing'",
    "explain psfed --shape 3xx": "--shape is '3xx'",
    "data digits clients=no": "task.clients",
    "pfllib -algo Nope": "-algo is 'Nope'",
    "sweep": "a sweep needs a study file",
    "compare runs --csv --json": "choose one",
    "export runs/a": "add --peft FOLDER, --merged FOLDER, or both",
    "run local.optimiser=sdg": "local.optimiser: no optimiser is called 'sdg': did you mean 'sgd'?",
    "run local.optimizer=adgrad": "did you mean 'adagrad'?",
    "check local.optimiser=adagrad local.options.lr_decya=0.1": "adagrad knows no 'lr_decya': did you mean 'lr_decay'?",
    "run evaluate.metrics=macrof1": "no metric is called 'macrof1': did you mean 'macro_f1'?",
    "report runs --format wrong": "--format has 'wrong'; use png, svg, pdf",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_answered_without_torch(words):
    done = typed(*words.split())
    assert done.returncode == 2
    assert MISTAKES[words] in " ".join(done.stderr.split())
    assert done.stderr.endswith("torch not loaded")


@pytest.mark.parametrize("words", ["--help", "--version", "run --help", "pfllib --help", "methods", "methods --json"])
def test_what_there_is_is_told_without_torch(words):
    done = typed(*words.split())
    assert done.returncode == 0
    assert done.stderr == "torch not loaded"
    assert done.stdout


def test_a_wrong_option_of_a_method_is_answered_without_torch():
    done = typed("run", "method=[{topk: {ratoi: 0.1}}]")
    assert done.returncode == 2
    assert "method 'topk' has no option 'ratoi'; did you mean 'ratio'?" in done.stderr
    assert done.stderr.endswith("torch not loaded")


OFFERS = {"run method=psf": "method=psfed", "explain top": "topk", "ru": "run"}


@pytest.mark.parametrize("words", OFFERS)
def test_completion_needs_no_torch(words):
    done = typed(_SPARING_COMPLETE="complete_bash", COMP_WORDS=f"sparing {words}", COMP_CWORD=str(len(words.split())))
    assert OFFERS[words] in done.stdout.split()
    assert done.stderr == "torch not loaded"


def test_a_study_with_a_sweep_of_unknown_methods_is_answered_without_torch(tmp_path):
    study = tmp_path / "study.yaml"
    study.write_text("method: tpok\ntask: {validation: 0.2}\nsweep: {local.lr: [0.1, 0.2]}\n")
    done = typed("sweep", str(study))
    assert "unknown method 'tpok'; did you mean 'topk'?" in done.stderr
    assert done.stderr.endswith("torch not loaded")


def test_the_table_of_names_is_what_the_code_has():
    assert known_names.NAMES_FILE.read_text() == known_names.names_table(), "run: python docs/reference/write.py"


@pytest.mark.parametrize("method", ["psfedd", [{"topk": {"ratoi": 1}}], [{"int8": {"some": 1}}]])
def test_the_table_says_what_the_code_says(method, monkeypatch):
    entries = method_list(method)
    with pytest.raises(SparingError) as by_code:
        recipes_from_entries(entries)
    monkeypatch.setattr(known_names, "_table_suffices", lambda: True)
    with pytest.raises(SparingError) as by_table:
        recipes_from_entries(entries)
    assert str(by_code.value) == str(by_table.value)


def test_the_table_says_of_tasks_what_the_code_says(monkeypatch):
    with pytest.raises(SparingError) as bad_data:
        load_dataset("digitz")
    with pytest.raises(SparingError) as bad_model:
        build_network({"cnm": {}}, (1, 8, 8), 10)
    monkeypatch.setattr(known_names, "_table_suffices", lambda: True)
    for by_code, task in ((bad_data, ("digitz", "cnn")), (bad_model, ("digits", {"cnm": {}}))):
        with pytest.raises(type(by_code.value)) as by_table:
            known_names.refuse_unknown_task(*task)
        assert str(by_code.value) == str(by_table.value)
    known_names.refuse_unknown_task("my_file.py:load", "my_file.py:Net")
    known_names.refuse_unknown_task("npz:somewhere", None)


def test_the_table_says_of_optimisers_what_torch_says(monkeypatch):
    wrong = [Optimiser("sdg"), Optimiser("adagrad", options=(("lr_decya", 1),)), Optimiser("adagrad", momentum=0.9)]
    for one in wrong:
        with pytest.raises(SparingError) as by_code:
            check_optimiser(one, "here: ")
        with monkeypatch.context() as late:
            late.setattr(known_names, "_table_suffices", lambda: True)
            with pytest.raises(SparingError) as by_table:
                known_names.refuse_misspelt_optimiser(one, "here: ")
            late.setattr(known_names, "version", lambda package: "99.0")
            known_names.refuse_misspelt_optimiser(one, "here: ")  # another torch may know it
        assert str(by_code.value) == str(by_table.value)


def test_an_installed_package_that_brings_methods_is_asked(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    assert known_names._table_suffices()
    monkeypatch.setattr(known_names, "entry_points", lambda group: [group])
    assert not known_names._table_suffices()


def test_a_study_and_a_phase_agree_on_what_is_usual():
    usual, phase = LocalSection(), Phase()
    assert (usual.epochs, usual.batch, usual.lr) == (phase.epochs, phase.batch, phase.optimiser.lr)


LATE = """
import os, sys, sparing
assert "torch" not in sys.modules
from sparing.core import ops
from sparing.core.tree import Layout
assert "sparing.accel" not in sys.modules
from sparing.train.paths import PATHS, path_called
for asks in sys.argv[1:]:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, asks
        continue
    assert "sparing.accel" not in sys.modules
    exec(asks)
    from sparing.accel import tree_bodies
    assert ops.clear.body is tree_bodies.fast_clear
    assert sorted(PATHS) == ["compiled", "implicit", "loop", "loop-fast", "stacked"]
    print(asks)
    break
"""
ASKS = [
    "assert ops.clear({}, {}) == {}",
    "path_called('stacked')",
    "sparing.run",
    "from sparing.core.operation import register; register(ops.overlay, ops.overlay.plain)",
]


def test_accelerators_are_there_before_anything_runs():
    """Whatever is asked first: an operation, a path, a public name, another registration."""
    done = subprocess.run([sys.executable, "-c", LATE, *ASKS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ASKS


def test_public_names_are_listed_and_found():
    assert set(sparing.__all__) <= set(dir(sparing))
    for name in sparing.__all__:
        assert getattr(sparing, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'sparing' has no attribute 'runn'"):
        _ = sparing.runn
