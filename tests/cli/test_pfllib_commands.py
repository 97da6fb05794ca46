"""PFLlib's commands: every flag, model and method of its main.py, and its example lines on folders as it makes them."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sparing.cli.app import app
from sparing.cli.pfllib_flags import study_from_flags
from sparing.cli.pfllib_names import NEAREST_METHODS, NEAREST_MODELS, WITHOUT_MEANING
from sparing.core.errors import ConfigError
from sparing.models import MODELS, build_network
from sparing.runs.known_names import known_names

FLAGS = """
-go --goal mine; -dev --device cpu; -did --device_id 0; -data --dataset MNIST; -ncl --num_classes 10; -m --model CNN;
-lbs --batch_size 10; -lr --local_learning_rate 0.005; -ld --learning_rate_decay True;
-ldg --learning_rate_decay_gamma 0.99; -gr --global_rounds 2; -tc --top_cnt 100; -ls --local_epochs 1;
-algo --algorithm FedAvg; -jr --join_ratio 1.0; -rjr --random_join_ratio True; -nc --num_clients 20; -pv --prev 0;
-t --times 1; -eg --eval_gap 1; -sfn --save_folder_name items; -ab --auto_break True; -dlg --dlg_eval True;
-dlgg --dlg_gap 100; -bnpc --batch_num_per_client 2; -nnc --num_new_clients 1; -ften --fine_tuning_epoch_new 1;
-fd --feature_dim 512; -vs --vocab_size 80; -ml --max_len 200; -fs --few_shot 0; -cdr --client_drop_rate 0.1;
-tsr --train_slow_rate 0.1; -ssr --send_slow_rate 0.1; -ts --time_select True; -tth --time_threthold 10000;
-bt --beta 0.0; -lam --lamda 1.0; -mu --mu 0.1; -K --K 5; -lrp --p_learning_rate 0.01; -M --M 5; -itk --itk 4000;
-alk --alphaK 1.0; -sg --sigma 1.0; -al --alpha 1.0; -pls --plocal_epochs 1; -tau --tau 1.0;
-fte --fine_tuning_epochs 10; -dlr --dr_learning_rate 0.0; -L --L 1.0; -nd --noise_dim 512;
-glr --generator_learning_rate 0.005; -hd --hidden_dim 512; -se --server_epochs 1000;
-lf --localize_feature_extractor False; -slr --server_learning_rate 1.0; -et --eta 1.0; -s --rand_percent 80;
-p --layer_idx 2; -mlr --mentee_learning_rate 0.005; -Ts --T_start 0.95; -Te --T_end 0.98; -mo --momentum 0.1;
-klw --kl_weight 0.0; -fsb --first_stage_bound 0; -ca --fedcross_alpha 0.99;
-cmss --collaberative_model_select_strategy 1
"""
"""Of main.py, each in both spellings and with a value."""
METHODS = (
    "FedAvg Local FedMTL PerAvg pFedMe FedProx FedFomo FedAMP APFL FedPer Ditto FedRep FedPHP FedBN FedROD FedProto "
    "FedDyn MOON FedBABU APPLE FedGen SCAFFOLD FD FedALA FedPAC LG-FedAvg FedGC FML FedKD FedPCL FedCP GPFL "
    "FedNTD FedGH FedDBE FedCAC PFL-DA FedLC FedAS FedCross"
)
NETWORKS = (
    "MLR CNN DNN ResNet18 ResNet10 ResNet34 AlexNet GoogleNet MobileNet LSTM BiLSTM fastText TextCNN Transformer "
    "AmazonMLP HARCNN"
)
LINES = {
    "-data MNIST -m CNN -algo FedAvg -gr 2000 -did 0 # using the MNIST dataset, FedAvg, and the 4-layer CNN": [],
    "-data MNIST -m CNN -algo FedAvg -gr 2000 -did 0,1,2,3 # running on multiple GPUs": ["a run takes one GPU, here 0"],
    "-data HAR -m HARCNN -algo FedAvg -ncl 6 -nc 4 -jr 1": ["-ncl has no meaning here: the data says"],
    "-data MNIST -m DNN -algo FedProx -mu 0.01 -dev cpu -did 0 -ab True": ["-ab has no meaning here: every run goes"],
    "-data MNIST -m MLR -algo Ditto -mu 0.1 -pls 2 -eg 5": ["-eg has no meaning here"],
    "-data MNIST -m DNN -algo FedRep -ls 2 -pls 1 -cdr 0.2": [],
    "-data MNIST -m DNN -algo FedBABU -fte 2 -nnc 1": [],
    "-data MNIST -m DNN -algo SCAFFOLD -slr 1.0 -tsr 0.1": ["-slr has no meaning here", "-tsr has no meaning here"],
    "-data MNIST -m DNN -algo Local -t 2 -go twice": [],
    "-data MNIST -m DNN -algo LG-FedAvg -ld True -ldg 0.99": [],
    "-data MNIST -m DNN -algo FedPer -lam 1": ["-lam has no meaning here"],
}
"""Of its README and website first, then one of each kind; what is said about each."""


def make_folder(name: str, shape: tuple[int, ...], classes: int, clients: int = 4) -> None:
    """As its generators do: a dict of arrays, pickled in an npz."""
    rng, folder = np.random.default_rng(0), Path("dataset", name)
    for half, n in (("train", 12), ("test", 4)):
        (folder / half).mkdir(parents=True)
        for i in range(clients):
            x, y = rng.normal(size=(n, *shape)).astype(np.float32), np.arange(n) % classes
            held = np.empty((), dtype=object)
            held[()] = {"x": x, "y": y}
            np.savez_compressed(folder / half / f"{i}.npz", data=held)
    config = {"num_clients": clients, "num_classes": classes, "non_iid": True, "balance": False, "partition": "dir"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make_folder("MNIST", (1, 28, 28), 10)
    make_folder("HAR", (9, 1, 128), 6)


@pytest.mark.parametrize("line", LINES)
def test_a_line_runs_as_it_stands(line):
    words = shlex.split(line, comments=True)
    done = CliRunner().invoke(app, ["pfllib", *words, "rounds=2", "plan.threads=1"])
    assert done.exit_code == 0, done.output
    assert "wrote results/" in done.stdout
    for note in LINES[line]:
        assert note in done.stderr
    assert done.stderr.count("note:") == len(done.stderr.splitlines())


@pytest.mark.parametrize("flag", [flag.strip() for flag in FLAGS.split(";")])
def test_every_flag_is_mapped_or_named_in_a_line(flag):
    short, long, value = flag.split()
    plain = study_from_flags(["-algo", "FedAvg"])
    said = [study_from_flags([spelling, value]) for spelling in (short, long)]
    assert said[0] == said[1]
    if any(short == names.split()[0] for names in WITHOUT_MEANING):
        assert said[0].study == plain.study
        assert [note for note in said[0].notes if note.startswith(f"{short} has no meaning here: ")] == said[0].notes
        assert len(said[0].notes) == 1


@pytest.mark.parametrize("name", METHODS.split())
def test_every_method_is_here_or_the_nearest_is_named(name):
    if name.lower() in known_names().methods:
        assert next(iter(study_from_flags(["-algo", name]).study.method)) is not None
        return
    nearest, why = NEAREST_METHODS[name.lower()]
    assert nearest in known_names().methods
    with pytest.raises(ConfigError, match="does not have; the nearest is") as error:
        study_from_flags(["-algo", name])
    assert f"{nearest} ({why}): -algo {nearest}" in str(error.value)
    study_from_flags(["-algo", nearest])


@pytest.mark.parametrize("name", NETWORKS.split())
def test_every_model_is_here_or_the_nearest_is_named(name):
    if name.lower() in NEAREST_MODELS:
        assert NEAREST_MODELS[name.lower()] in MODELS
        with pytest.raises(ConfigError, match=f"the nearest is {NEAREST_MODELS[name.lower()]}"):
            study_from_flags(["-m", name])
        return
    model = study_from_flags(["-m", name, "-fd", "16"]).study.task.model
    assert model is not None
    shape = {"HARCNN": (9, 1, 256), "LSTM": (5,), "Transformer": (5,)}.get(name, (3, 32, 32))
    assert build_network(model, shape, 10) is not None


def test_what_methods_take_from_their_flags():
    def method(words: str):
        return study_from_flags(words.split()).study.method

    assert method("-algo FedProx -mu 0.3") == [{"fedprox": {"mu": 0.3}}]
    assert method("-algo Ditto -mu 0.3 -pls 2") == [{"ditto": {"lam": 0.3, "epochs": 2}}]
    assert method("-algo FedRep -ls 3") == [{"fedrep": {"head": 1, "body": 3}}]
    assert method("-algo FedBABU -fte 4 -topk") == [{"fedbabu": {"epochs": 4}}, {"topk": {"ratio": 0.1}}]
    said = study_from_flags(["-algo", "FedAvg", "-mu", "0.1", "-nnc", "2", "-cdr", "0.25"])
    assert said.notes == ["FedAvg has no use for -mu"]
    assert (said.study.task.held_out, said.study.fleet.dropout) == (2, 0.25)
    assert "new" in said.study.evaluate.who
    assert "PFLlib's is 0" in study_from_flags(["-algo", "FedProx"]).notes[0]


def test_decay_of_the_learning_rate_is_a_schedule():
    def said(words: str):
        found = study_from_flags(words.split())
        return found.study.local.schedule, found.notes

    assert said("-ld True") == ({"exponential": {"factor": 0.99}}, [])
    assert said("--learning_rate_decay True -ldg 0.9") == ({"exponential": {"factor": 0.9}}, [])
    assert said("-ldg 0.9") == ("constant", ["-ldg has no effect without -ld True"])
    kept, notes = said("-ld False")
    assert (kept, len(notes)) == ("constant", 1)
    assert "PFLlib takes any word after -ld as True" in notes[0]
    with pytest.raises(ConfigError, match=r"-ld.*'maybe' is neither True nor False"):
        said("-ld maybe")


def test_devices(monkeypatch):
    assert study_from_flags(["-dev", "cpu", "-did", "3"]).study.device == "cpu"
    assert study_from_flags(["-dev", "cuda", "-did", "0"]).study.device == "auto"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert study_from_flags(["-did", "3"]).study.device == "cuda:3"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert study_from_flags(["-did", "3,1"]).study.device == "auto"


@pytest.mark.parametrize(("shape", "features"), [((1, 28, 28), 1024), ((3, 32, 32), 1600)])
def test_the_cnn_is_of_the_same_size(shape, features):
    model = study_from_flags(["-m", "CNN"]).study.task.model
    assert model is not None
    assert build_network(model, shape, 10).get_submodule("dense").in_features == features
