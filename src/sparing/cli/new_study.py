"""`sparing new`: a folder with a study to start from."""

import shlex
from pathlib import Path

from sparing.core.errors import ConfigError

_STUDY_TEXT = """\
# A study. Every key is optional; change any of them on the command line:
#   sparing run study.yaml rounds=60 local.lr=0.05

task:
  data: digits                # `sparing data` lists what there is, your own files included
  clients: 20
  split: {dirichlet: 0.3}     # label skew: 0.1 is very non-IID, 100 nearly IID; or iid
  model: cnn                  # or mlp, lenet5, resnet18, ... or with options: {mlp: {hidden: [200, 200]}}
  test: 0.25                  # fraction of each client's samples used as test set, where there is no official one
  # validation: 0.2           # the same for choosing hyperparameters: evaluate.set=validation

method: fedavg                # `sparing methods` lists them; or psfed+topk+int8+memory, in order of execution;
                              # with options: [psfed, {topk: {ratio: 0.1}}, int8, memory]

local:                        # local training
  epochs: 3
  batch: 16
  lr: 0.1
  momentum: 0.9

rounds: 30
sample: 0.5                   # fraction of clients per round, or a count
device: auto                  # auto | cpu | cuda
seed: 0                       # of the split, the initial model and all sampling

evaluate:
  every: 1                    # rounds
  who: [global, personalized] # which models: docs/evaluation.md
"""

_README_TEXT = """\
# {name}

`study.yaml` says what is trained: the data, the clients, the method. Check it, run it, compare:

    sparing check study.yaml                        # memory, bytes and time, before anything runs
    sparing run study.yaml seed=0                   # writes runs/digits-fedavg-0
    sparing run study.yaml seed=1
    sparing run study.yaml method=topk+memory seed=0
    sparing run study.yaml method=topk+memory seed=1
    sparing compare runs --target 0.9

Continue an interrupted run with `sparing resume FOLDER`. The same study and seed give the same model.
"""


_FEDERATION_STUDY_TEXT = """\
# A study for real machines: `sparing serve` plays it with nodes, `sparing run` simulates it, with the same result.

task:
  data: digits                # for `sparing run`; on a network every node names its own samples
  clients: 4
  model: cnn

method: [topk, int8, memory, {norm-bound: {bound: 10}}]   # norm-bound: what one client can do to the model is bounded

local: {epochs: 1, batch: 16, lr: 0.1}
rounds: 20
sample: 4
seed: 0
plan: {path: loop}            # the plain step, which gives the same bits on all machines of a kind

network:                      # docs/network.md
  deadline: 600               # seconds that a round waits for uploads
  quorum: 0.75                # of `sample`, with which a round counts at its deadline
  retries: 3                  # deadlines more, before the run stops
"""


def write_federation_study(folder: Path) -> Path | None:
    """The study of a federation, unless there is one already."""
    path = folder / "study.yaml"
    if path.exists():
        return None
    path.write_text(_FEDERATION_STUDY_TEXT)
    return path


def write_new_study(path: Path) -> list[Path]:
    """A folder that was not there before, with a study file and a README."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{path} is already there and is left as it is; choose another name") from None
    except OSError as error:
        raise ConfigError(f"cannot make {path} ({error.strerror}); choose another place") from None
    files = {path / "study.yaml": _STUDY_TEXT, path / "README.md": _README_TEXT.format(name=path.resolve().name)}
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")
    return list(files)


def next_steps(path: Path) -> str:
    return f"next: cd {shlex.quote(str(path))} && sparing check study.yaml && sparing run study.yaml"
