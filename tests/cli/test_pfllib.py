"""`sparing pfllib`: familiar flags, in both spellings, and what they are mapped to."""

import json
from pathlib import Path

import h5py
import pytest
import yaml
from typer.testing import CliRunner

from sparing.cli.app import app
from sparing.cli.pfllib_flags import study_from_flags
from sparing.core.errors import ConfigError
from sparing.runs.study import load_study

ROOT = Path(__file__).parents[2]
FAMILIAR = (
    "-algo SR-FedAvg -data MNIST -gr 50 -le 5 -bs 512 -jr 0.5 -srbeta 0.9 -srwarmup 5 -topk 0.1 -go comparison_sr"
)
TINY = ["-data", "digits", "-m", "DNN", "-nc", 4, "-gr", 2, "-jr", 0.5, "-lr", 0.05, "plan.threads=1"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def call(*args: object):
    return CliRunner().invoke(app, ["pfllib", *map(str, args)])


def test_the_familiar_command():
    said = study_from_flags(FAMILIAR.split())
    study = said.study
    assert (said.dataset, said.algorithm, said.goal, said.times) == ("MNIST", "SR-FedAvg", "comparison_sr", 1)
    assert study.method == [{"sr-fedavg": {"beta": 0.9, "warmup": 5, "topk": 0.1}}]
    assert (study.task.data, study.task.clients, study.task.model) == ("mnist", 20, {"fedavg-cnn": {"padding": 0}})
    assert (study.rounds, study.sample) == (50, 0.5)
    assert (study.local.epochs, study.local.batch, study.local.lr, study.local.momentum) == (5, 512, 0.005, 0)
    assert said.folder(2) == Path("runs/MNIST_SR-FedAvg_comparison_sr_2")
    assert said.of_run(2).seed == 2


SHORT = "-algo SR-FedAvg -data MNIST -m DNN -go g -gr 5 -lr 0.1 -ls 2 -lbs 8 -jr 0.3 -nc 7 -t 2 -dev cpu -srbeta 0.7"
SPELLINGS = [
    SHORT.replace("-ls", "-le").replace("-lbs", "-bs"),
    "--algorithm SR-FedAvg --dataset MNIST --model DNN --goal g --global_rounds 5 --local_learning_rate 0.1 "
    "--local_epochs 2 --batch_size 8 --join_ratio 0.3 --num_clients 7 --times 2 --device cpu --srbeta 0.7",
    "--learning_rate=0.1 --algorithm=SR_FedAvg -data=MNIST -m=dnn -go=g -gr=5 -ls=2 -lbs=8 -jr=0.3 -nc=7 -t=2 "
    "-dev=cpu -srbeta=0.7",
]


@pytest.mark.parametrize("words", SPELLINGS)
def test_every_spelling_means_the_same(words):
    one, other = study_from_flags(SHORT.split()), study_from_flags(words.split())
    assert other.study == one.study
    assert (other.times, other.goal, other.dataset) == (2, "g", "MNIST")


@pytest.mark.parametrize(
    ("words", "method"),
    [
        ("", ["fedavg"]),
        ("-topk", ["fedavg", {"topk": {"ratio": 0.1}}]),
        ("-topk 0.3", ["fedavg", {"topk": {"ratio": 0.3}}]),
        ("-algo SR-FedAvg", [{"sr-fedavg": {"beta": 0.9, "warmup": 5}}]),
        ("-algo SR-FedAvg -topk", [{"sr-fedavg": {"beta": 0.9, "warmup": 5, "topk": 0.1}}]),
        ("-algo SR-FedAvg -srwarmup 0 -srbeta 1", [{"sr-fedavg": {"beta": 1, "warmup": 0}}]),
        ("-algo SCAFFOLD", ["scaffold"]),
        ("-algo FedBABU", ["fedbabu"]),
    ],
)
def test_methods(words, method):
    assert study_from_flags(words.split()).study.method == method


@pytest.mark.parametrize(
    ("words", "word"),
    [
        ("-srbeta 0.4 -algo SR-FedAvg", "-srbeta is 0.4; it must lie between 0.5 and 1"),
        ("-srwarmup 21 -algo SR-FedAvg", "-srwarmup is 21; it must lie between 0 and 20"),
        ("-srbeta 3 -algo FedAvg", "-srbeta is 3.0; it must lie between 0.5 and 1"),
        ("-srwarmup -1 -algo FedAvg", "-srwarmup is -1; it must lie between 0 and 20"),
        ("-topk 0.001", "-topk is 0.001; it must lie between 0.01 and 1"),
        ("-algo FedAvgg", "'FedAvgg', which is no method here; did you mean 'fedavg'"),
        ("-gr ten", "invalid int value: 'ten'"),
        ("-gr 0", "rounds"),
        ("-foo 3", "-foo"),
        ("-algo pFedMe", "does not have; the nearest is ditto (where each client also trains a second model"),
        ("-algo FedDyn", "does not have; the nearest is scaffold"),
        ("-m GoogleNet", "does not have; the nearest is resnet18: -m resnet18"),
        ("-data Digit5", "there is no folder dataset/Digit5"),
        ("-data HAR", "there is no folder dataset/HAR with a config.json; generate it with PFLlib"),
        ("-jr 1.5", "sample is 1.5"),
        ("-t 0", "-t is 0"),
        ("evaluate.every=2", "H5 files need every round"),
        ("local.lrr=2", "did you mean 'lr'"),
    ],
)
def test_bad_flags_are_refused_in_one_line(words, word):
    result = call(*words.split())
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("sparing: ")
    assert result.stderr.count("\n") == 1
    assert word in result.stderr


def test_data_by_name_by_folder_and_by_key():
    assert study_from_flags(["-data", "FashionMNIST"]).study.task.data == "fashion-mnist"
    assert study_from_flags(["-data", "Cifar10", "task.split=iid"]).study.task.split == "iid"
    made = Path("dataset/MNIST")
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    task = study_from_flags(["-data", "MNIST"]).study.task
    assert (task.data, task.split, task.clients) == ("pfllib:dataset/MNIST", "client", None)
    assert study_from_flags(["-data", "pfllib:elsewhere"]).study.task.split == "client"


def test_it_says_the_study_runs_it_and_writes_the_files():
    result = call("-algo", "SR-FedAvg", *TINY, "-t", 2, "-go", "mine", "-topk", "-srwarmup", 1)
    assert result.exit_code == 0, result.output
    text = result.stdout.split("as a study:\n\n")[1].split("\n\n")[0]
    Path("said.yaml").write_text(text)
    assert (
        load_study("said.yaml")
        == study_from_flags(["-algo", "SR-FedAvg", *map(str, TINY), "-topk", "-srwarmup", "1"]).study
    )
    for i in (0, 1):
        begins = f"run {i + 1} of 2: 2 rounds, to runs/digits_SR-FedAvg_mine_{i}; a line follows every tenth of them"
        assert result.stdout.index(begins) < result.stdout.index("round 1/2" if i == 0 else f"mine_{i}.h5")
    for run, runs in ((0, 1), (1, 1), ("all", 2)):
        assert f"wrote results/digits_SR-FedAvg_mine_{run}.h5" in result.stdout
        with h5py.File(f"results/digits_SR-FedAvg_mine_{run}.h5") as file:
            assert file["test_acc"].shape == file["train_loss"].shape == (runs, 2)
            assert file["rs_test_acc"].shape == file["test_acc_std"].shape == (2,)
            assert dict(file.attrs) == {"algorithm": "SR-FedAvg", "dataset": "digits", "rounds": 2}
    seeds = [yaml.safe_load(Path(f"runs/digits_SR-FedAvg_mine_{i}/config.yaml").read_text())["seed"] for i in (0, 1)]
    assert seeds == [0, 1]


def test_the_same_command_goes_on_and_another_study_is_refused():
    first = json.loads(call(*TINY, "--json").stdout)
    Path("runs/digits_FedAvg_test_0/summary.json").unlink()
    again = json.loads(call(*TINY, "-t", 2, "--json").stdout)
    assert again["runs"][0]["model_sha256"] == first["runs"][0]["model_sha256"]
    assert again["runs"][0]["seconds"] == first["runs"][0]["seconds"], "it was not trained again"
    assert len(again["runs"]) == 2
    assert again["files"] == [f"results/digits_FedAvg_test_{i}.h5" for i in (0, 1, "all")]
    other = call(*TINY, "-lr", 0.1)
    assert other.exit_code == 2
    assert "another study; name this one differently with -go" in other.stderr


def test_flags_that_a_method_has_no_use_for_are_mentioned():
    assert study_from_flags(["-algo", "FedAvg", "-srbeta", "0.9", "-srwarmup", "5"]).notes == [
        "FedAvg has no use for -srbeta and -srwarmup"
    ]
    with pytest.raises(ConfigError):
        study_from_flags(["-srbeta"])


def test_help_shows_flags_and_examples():
    result = call("--help")
    assert result.exit_code == 0
    for word in ("-algo", "--join_ratio", "-le", "-bs", "-topk", "examples:"):
        assert word in result.stdout


def test_the_configurations_are_what_their_flags_mean():
    for name in ("sr-research", "sr-research-one", "sr-light"):
        text = (ROOT / "configs" / f"{name}.yaml").read_text()
        flags = text[text.index("sparing pfllib") :].split("\n\n")[0].replace("#", "").split()[2:]
        assert study_from_flags(flags).study == load_study(ROOT / "configs" / f"{name}.yaml"), name
    research, light = (load_study(ROOT / "configs" / f"sr-{name}.yaml") for name in ("research", "light"))
    assert (research.rounds, research.local.epochs, research.local.batch, research.local.lr) == (50, 5, 512, 0.01)
    assert (light.rounds, light.local.epochs, light.local.batch, light.sample) == (10, 2, 256, 0.5)
    assert load_study(ROOT / "configs" / "sr-research-one.yaml").sample == 0.1
