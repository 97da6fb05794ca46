"""`sparing pfllib`: the flags people know from PFLlib, mapped to a study."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from sparing.core.errors import ConfigError, check_range, nearest_name
from sparing.runs.known_names import known_names
from sparing.runs.study import Study, apply_override, study_from

_DATA_NAMES = {"fashionmnist": "fashion-mnist", "fmnist": "fashion-mnist"}
_MODEL_NAMES: dict[str, Any] = {
    "cnn": "fedavg-cnn",
    "dnn": {"mlp": {"hidden": [100]}},
    "mlr": {"mlp": {"hidden": []}},
    "resnet": "resnet18",
}
_USUAL_TOPK = 0.1
_PFLLIB_FOLDERS = ("dataset", "../dataset")
"""Where PFLlib's generators put what they make."""
_PFLLIB_SPLIT = {"dirichlet": 0.1}
"""How they share a dataset out, unless told otherwise."""

_FLAG_EXAMPLES = """examples:
  sparing pfllib -algo SR-FedAvg -data MNIST -gr 50 -le 5 -bs 512 -jr 0.5 -srbeta 0.9 -srwarmup 5 -topk 0.1 -go mine
  sparing pfllib -algo FedAvg -data MNIST -gr 50 -ls 5 -lbs 512 -jr 0.5 -t 3 -go mine
  sparing pfllib --algorithm SR-FedAvg --dataset pfllib:dataset/MNIST --global_rounds 50 task.validation=0.1

A name such as MNIST is one of `sparing data`, shared out by a Dirichlet law of 0.1 as PFLlib's generator does, or the
folder dataset/MNIST that the generator made. Keys of a study may follow as key=value. Run folders go to runs/, and
DATASET_ALGORITHM_GOAL_RUN.h5 to results/: one file a run and one for all. The same command again goes on where it
was stopped.
"""


class PfllibStudy(NamedTuple):
    """What the flags came to."""

    dataset: str  # as typed: these name the files
    algorithm: str
    goal: str
    times: int
    study: Study  # of the first run
    notes: list[str]
    as_json: bool

    def of_run(self, i: int) -> Study:
        return self.study.model_copy(update={"seed": self.study.seed + i})

    def folder(self, i: int) -> Path:
        from sparing.reports.h5_files import h5_file_name

        return Path("runs") / Path(h5_file_name(self.dataset, self.algorithm, self.goal, i)).stem


class _FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `sparing pfllib --help` lists the flags")


def _make_parser() -> _FlagParser:
    p = _FlagParser(
        prog="sparing pfllib",
        description="Run a study given by PFLlib's flags, and write its H5 result files.",
        epilog=_FLAG_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flag = p.add_argument
    flag("-algo", "--algorithm", default="FedAvg", help="FedAvg, SR-FedAvg, or any of `sparing methods`")
    flag("-data", "--dataset", default="MNIST", help="MNIST, FashionMNIST, Cifar10, ... or one of `sparing data`")
    flag("-m", "--model", default="CNN", help="CNN, DNN, MLR, ResNet18, ... or any network of sparing")
    flag("-go", "--goal", default="test", help="a word for the names of the files")
    flag("-gr", "--global_rounds", type=int, default=2000, help="rounds (2000)")
    flag("-lr", "--local_learning_rate", "--learning_rate", dest="lr", type=float, default=0.005, help="(0.005)")
    flag("-ls", "-le", "--local_epochs", dest="epochs", type=int, default=1, help="epochs on a client in a round (1)")
    flag("-lbs", "-bs", "--batch_size", dest="batch", type=int, default=10, help="(10)")
    flag("-jr", "--join_ratio", type=float, default=1.0, help="share of the clients in a round (1.0)")
    flag("-nc", "--num_clients", type=int, default=None, help="(20)")
    flag("-t", "--times", type=int, default=1, help="runs, each with the next seed (1)")
    flag("-dev", "--device", default="auto", help="cpu, cuda or auto (auto)")
    flag("-srbeta", "--srbeta", type=float, help="SR-FedAvg: 0.5 to 1 (0.9)")
    flag("-srwarmup", "--srwarmup", type=int, help="SR-FedAvg: 0 to 20 rounds (5)")
    flag(
        "-topk",
        "--topk",
        type=float,
        nargs="?",
        const=_USUAL_TOPK,
        help="top-k, 0.01 to 1; off without it, bare it is 0.1",
    )
    flag("--json", action="store_true", dest="as_json", help="print JSON and nothing else")
    flag("items", nargs="*", metavar="key=value", help="any key of a study")
    return p


def study_from_flags(words: Sequence[str]) -> PfllibStudy:
    """Flags to a study."""
    if any(word.partition("=")[0] in ("-did", "--device_id") for word in words):
        raise ConfigError("-did has no meaning here; name the device with -dev, such as -dev cuda:1")
    args = _make_parser().parse_intermixed_args(words)
    notes: list[str] = []
    values: dict[str, Any] = {
        "task": _task_from_flags(args),
        "method": _method_from_flags(args, notes),
        "local": {"epochs": args.epochs, "batch": args.batch, "lr": args.lr},
        "rounds": args.global_rounds,
        "sample": args.join_ratio,
        "device": args.device,
    }
    for item in args.items:
        apply_override(values, item)
    study = study_from(values, "the flags")
    if study.evaluate.every != 1:
        raise ConfigError(f"evaluate.every is {study.evaluate.every}, but H5 files need every round; leave it at 1")
    if args.times < 1:
        raise ConfigError(f"-t is {args.times}; at least one run is needed")
    return PfllibStudy(args.dataset, args.algorithm, args.goal, args.times, study, notes, args.as_json)


def _task_from_flags(args: argparse.Namespace) -> dict[str, Any]:
    model = _MODEL_NAMES.get(args.model.lower(), args.model.lower())
    places = [Path(place, args.dataset) for place in _PFLLIB_FOLDERS]
    made = next((f"pfllib:{place}" for place in places if (place / "config.json").is_file()), None)
    if made or args.dataset.startswith("pfllib:"):
        data = made or args.dataset
        return {"data": data, "clients": args.num_clients, "split": "client", "model": model}
    name = args.dataset if ":" in args.dataset else args.dataset.lower().replace("_", "-")
    return {
        "data": _DATA_NAMES.get(name, name),
        "clients": args.num_clients or 20,
        "split": dict(_PFLLIB_SPLIT),
        "model": model,
    }


def _method_from_flags(args: argparse.Namespace, notes: list[str]) -> list[Any]:
    name = args.algorithm.lower().replace("_", "-")
    if name not in known_names().methods:
        raise ConfigError(
            f"-algo is {args.algorithm!r}, which is no method here; {nearest_name(name, known_names().methods)}"
        )
    for flag, low, high in (("topk", 0.01, 1), ("srbeta", 0.5, 1), ("srwarmup", 0, 20)):
        if (value := getattr(args, flag)) is not None:
            check_range(f"-{flag}", value, low, high)
    if name == "sr-fedavg":
        beta, warmup = 0.9 if args.srbeta is None else args.srbeta, 5 if args.srwarmup is None else args.srwarmup
        options: dict[str, Any] = {"beta": beta, "warmup": warmup}
        return [{name: options | ({} if args.topk is None else {"topk": args.topk})}]
    unused = [f"-{flag}" for flag in ("srbeta", "srwarmup") if getattr(args, flag) is not None]
    if unused:
        notes.append(f"{args.algorithm} has no use for {' and '.join(unused)}")
    return [name] if args.topk is None else [name, {"topk": {"ratio": args.topk}}]
