"""`sparing pfllib`: the flags people know from PFLlib, mapped to a study."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from sparing.cli.pfllib_names import DATA_NAMES, NEAREST_METHODS, NEAREST_MODELS, WITHOUT_MEANING, model_of_name
from sparing.core.errors import ConfigError, check_range, nearest_name
from sparing.runs.known_names import known_names
from sparing.runs.study import Study, apply_override, study_from

_USUAL_TOPK = 0.1
_USUAL_DECAY = 0.99
_PFLLIB_FOLDERS = ("dataset", "../dataset")
"""Where PFLlib's generators put what they make."""
_PFLLIB_SPLIT = {"dirichlet": 0.1}
"""How they share a dataset out, unless told otherwise."""

_FLAG_EXAMPLES = """examples:
  sparing pfllib -algo SR-FedAvg -data MNIST -gr 50 -le 5 -bs 512 -jr 0.5 -srbeta 0.9 -srwarmup 5 -topk 0.1 -go mine
  sparing pfllib -algo FedAvg -data MNIST -gr 50 -ls 5 -lbs 512 -jr 0.5 -t 3 -go mine
  sparing pfllib --algorithm SR-FedAvg --dataset pfllib:dataset/MNIST --global_rounds 50 task.validation=0.1

A name such as MNIST is one of `sparing data`, split by Dirichlet(0.1) as PFLlib's generator does, or the
folder dataset/MNIST that the generator made. Keys of a study may follow as key=value. Run folders go to runs/, and
DATASET_ALGORITHM_GOAL_RUN.h5 to results/: one file a run and one for all. The same command again continues where
it was stopped. PFLlib's other flags are taken too; each that has no meaning here is named in a line of its own.
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
    flag("-go", "--goal", default="test", help="label in the names of the files")
    flag("-gr", "--global_rounds", type=int, default=2000, help="rounds (2000)")
    flag(
        "-lr",
        "--local_learning_rate",
        "--learning_rate",
        dest="lr",
        type=float,
        default=0.005,
        help="learning rate (0.005)",
    )
    flag("-ld", "--learning_rate_decay", dest="decay", type=_true_or_false, help="lower the rate every round (False)")
    flag("-ldg", "--learning_rate_decay_gamma", dest="gamma", type=float, help="by this factor (0.99)")
    flag("-ls", "-le", "--local_epochs", dest="epochs", type=int, default=1, help="local epochs per round (1)")
    flag("-lbs", "-bs", "--batch_size", dest="batch", type=int, default=10, help="batch size (10)")
    flag("-jr", "--join_ratio", type=float, default=1.0, help="fraction of clients per round (1.0)")
    flag("-nc", "--num_clients", type=int, default=None, help="clients (20)")
    flag("-nnc", "--num_new_clients", type=int, default=0, help="held-out clients, which never train (0)")
    flag("-cdr", "--client_drop_rate", type=float, default=0.0, help="probability of dropout before the upload (0)")
    flag("-t", "--times", type=int, default=1, help="runs, each with the next seed (1)")
    flag("-dev", "--device", default="cuda", help="cpu, or cuda where there is one, or cuda:1 (cuda)")
    flag("-did", "--device_id", default="0", help="which GPU; of several the first (0)")
    flag("-fd", "--feature_dim", type=int, help="width of LSTM and Transformer (512)")
    flag("-mu", "--mu", type=float, help="FedProx: mu; Ditto: lam")
    flag("-pls", "--plocal_epochs", type=int, help="Ditto: epochs of the second model; FedRep: of the head")
    flag("-fte", "--fine_tuning_epochs", type=int, help="FedBABU: epochs of fine-tuning before evaluation")
    flag("-srbeta", "--srbeta", type=float, help="SR-FedAvg: 0.5 to 1 (0.9)")
    flag("-srwarmup", "--srwarmup", type=int, help="SR-FedAvg: 0 to 20 rounds (5)")
    flag(
        "-topk",
        "--topk",
        type=float,
        nargs="?",
        const=_USUAL_TOPK,
        help="top-k ratio, 0.01 to 1; off by default, 0.1 if no value is given",
    )
    for names in WITHOUT_MEANING:
        flag(*names.split(), dest=names, help=argparse.SUPPRESS)
    flag("--json", action="store_true", dest="as_json", help="print JSON and nothing else")
    flag("items", nargs="*", metavar="key=value", help="any key of a study")
    return p


def study_from_flags(words: Sequence[str]) -> PfllibStudy:
    """Flags to a study."""
    args = _make_parser().parse_intermixed_args(words)
    aside = {names.split()[0]: why for names, why in WITHOUT_MEANING.items() if getattr(args, names) is not None}
    notes = [f"{flag} has no meaning here: {why}" for flag, why in aside.items()]
    values: dict[str, Any] = {
        "task": _task_from_flags(args),
        "method": _method_from_flags(args, notes),
        "local": {"epochs": args.epochs, "batch": args.batch, "lr": args.lr} | _schedule_from_flags(args, notes),
        "rounds": args.global_rounds,
        "sample": args.join_ratio,
        "device": _device_from_flags(args, notes),
    }
    if args.num_new_clients:
        values["task"]["held_out"] = args.num_new_clients
        values["evaluate"] = {"who": ["global", "before", "new"]}
    if args.client_drop_rate:
        values["fleet"] = {"dropout": args.client_drop_rate}
    for item in args.items:
        apply_override(values, item)
    study = study_from(values, "the flags")
    if study.evaluate.every != 1:
        raise ConfigError(f"evaluate.every is {study.evaluate.every}, but H5 files need every round; leave it at 1")
    if args.times < 1:
        raise ConfigError(f"-t is {args.times}; at least one run is needed")
    return PfllibStudy(args.dataset, args.algorithm, args.goal, args.times, study, notes, args.as_json)


def _true_or_false(word: str) -> bool:
    """
    >>> _true_or_false("True"), _true_or_false("false")
    (True, False)
    """
    if word.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{word!r} is neither True nor False")
    return word.lower() in ("true", "1")


def _schedule_from_flags(args: argparse.Namespace, notes: list[str]) -> dict[str, Any]:
    """PFLlib's decay of the learning rate."""
    if args.decay:
        return {"schedule": {"exponential": {"factor": _USUAL_DECAY if args.gamma is None else args.gamma}}}
    if args.decay is False:
        notes.append("-ld False keeps the learning rate as it is; PFLlib takes any word after -ld as True")
    if args.gamma is not None:
        notes.append("-ldg has no effect without -ld True")
    return {}


def _device_from_flags(args: argparse.Namespace, notes: list[str]) -> str:
    """PFLlib's cuda is the CPU where there is none."""
    ids = args.device_id.split(",")
    if len(ids) > 1:
        notes.append(f"-did is {args.device_id}: a run takes one GPU, here {ids[0]}")
    if args.device != "cuda":
        return args.device
    if ids[0].strip() == "0":
        return "auto"
    from torch import cuda

    return f"cuda:{ids[0].strip()}" if cuda.is_available() else "auto"


def _task_from_flags(args: argparse.Namespace) -> dict[str, Any]:
    if (nearest := NEAREST_MODELS.get(args.model.lower())) is not None:
        raise ConfigError(f"-m is {args.model!r}, which sparing does not have; the nearest is {nearest}: -m {nearest}")
    model = model_of_name(args.model, args.feature_dim)
    places = [Path(place, args.dataset) for place in _PFLLIB_FOLDERS]
    made = next((f"pfllib:{place}" for place in places if (place / "config.json").is_file()), None)
    if made or args.dataset.startswith("pfllib:"):
        data = made or args.dataset
        return {"data": data, "clients": args.num_clients, "split": "client", "model": model}
    typed: str = args.dataset if ":" in args.dataset else args.dataset.lower().replace("_", "-")
    name = DATA_NAMES.get(typed, typed)
    if ":" not in name and name not in known_names().datasets:
        raise ConfigError(
            f"-data is {args.dataset!r}, but there is no folder dataset/{args.dataset} with a config.json; generate it "
            "with PFLlib, or name one of `sparing data`"
        )
    return {"data": name, "clients": args.num_clients or 20, "split": dict(_PFLLIB_SPLIT), "model": model}


def _known_method(algorithm: str) -> str:
    name = algorithm.lower().replace("_", "-")
    if name in known_names().methods:
        return name
    if name in NEAREST_METHODS:
        nearest, why = NEAREST_METHODS[name]
        raise ConfigError(
            f"-algo is {algorithm!r}, which sparing does not have; the nearest is {nearest} ({why}): -algo {nearest}"
        )
    known = known_names().methods
    raise ConfigError(f"-algo is {algorithm!r}, which is no method here; {nearest_name(name, known)}")


def _method_options(name: str, args: argparse.Namespace, notes: list[str]) -> dict[str, Any]:
    """The options that PFLlib's flags give a method."""
    given = {"-mu": args.mu, "-pls": args.plocal_epochs, "-fte": args.fine_tuning_epochs}
    used = {
        "fedprox": {"mu": "-mu"},
        "ditto": {"lam": "-mu", "epochs": "-pls"},
        "fedrep": {"head": "-pls"},
        "fedbabu": {"epochs": "-fte"},
    }.get(name, {})
    unused = [flag for flag, value in given.items() if value is not None and flag not in used.values()]
    if unused:
        notes.append(f"{args.algorithm} has no use for {' and '.join(unused)}")
    if "-mu" in used.values() and args.mu is None:
        notes.append(f"{args.algorithm} without -mu takes sparing's usual value; PFLlib's is 0, which changes nothing")
    options = {option: given[flag] for option, flag in used.items() if given[flag] is not None}
    if name == "fedrep":
        options = {"head": args.plocal_epochs or 1, "body": args.epochs}
    return options


def _method_from_flags(args: argparse.Namespace, notes: list[str]) -> list[Any]:
    name = _known_method(args.algorithm)
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
    options = _method_options(name, args, notes)
    method: list[Any] = [{name: options} if options else name]
    return method if args.topk is None else [*method, {"topk": {"ratio": args.topk}}]
