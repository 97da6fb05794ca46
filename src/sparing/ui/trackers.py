"""Other people's dashboards, as loggers `(Record) -> None`.

    with tracking(["tensorboard"], "runs/first") as log:
        sparing.run("digits", out="runs/first", loggers=[log])

A tracker is opened with the first record, when the run folder is there: a study that is refused leaves no trace.
A resumed run goes on under the name it had: tracked.json in the run folder remembers it.
"""

import importlib
import json
import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from sparing.core.errors import ConfigError, nearest
from sparing.run.files import write_json
from sparing.run.folder import config_of
from sparing.run.loop import Logger
from sparing.run.results import Record

PROJECT, TRACKED = "sparing", "tracked.json"
Numbers = dict[str, float]


class Open(NamedTuple):
    """A tracker at work: what takes a round's numbers, what ends it, and the name it goes by from now on."""

    log: Callable[[Numbers, int], Any]
    close: Callable[[], Any]
    name: str = ""


class Where(NamedTuple):
    """What a tracker may want to know of a run."""

    folder: Path
    config: dict[str, Any]
    before: str | None  # the name it had, if it is resumed
    first: int  # round


def tensorboard(at: Where) -> Open:
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
        str(at.folder / "tensorboard"), purge_step=at.first
    )

    def log(values: Numbers, step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Open(log, writer.close)


def mlflow(at: Where) -> Open:
    module = importlib.import_module("mlflow")
    if at.before is None:
        module.set_experiment(PROJECT)
        run = module.start_run(run_name=at.folder.name)
        module.log_params(flat(at.config))
    else:
        run = module.start_run(run_id=at.before)
    return Open(lambda values, step: module.log_metrics(values, step=step), module.end_run, run.info.run_id)


def trackio(at: Where) -> Open:
    module = importlib.import_module("trackio")
    name = at.before or f"{at.folder.name}-{uuid.uuid4().hex[:8]}"
    run = module.init(project=PROJECT, name=name, config=at.config, resume="allow")
    return Open(lambda values, step: run.log(values, step=step), module.finish, name)


def wandb(at: Where) -> Open:
    module = importlib.import_module("wandb")
    name = at.before or uuid.uuid4().hex[:8]
    run = module.init(
        project=PROJECT, name=at.folder.name, id=name, resume="allow", config=at.config, dir=str(at.folder)
    )
    return Open(lambda values, step: run.log(values, step=step), run.finish, name)


TRACKERS = {"tensorboard": tensorboard, "mlflow": mlflow, "trackio": trackio, "wandb": wandb}


@contextmanager
def tracking(names: Sequence[str], folder: str | Path) -> Iterator[Logger]:
    """One logger that tells all of these trackers; they are closed in the end, however it comes."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"there is no tracker {name!r}; {nearest(name, TRACKERS)}")
        if find_spec(name) is None:
            raise ConfigError(f"{name} is not installed; pip install 'sparing[{name}]'")
    at_work: list[Open] = []
    with ExitStack() as stack:

        def log(record: Record) -> None:
            if not at_work:
                for name in names:
                    at_work.append(opened(name, Path(folder), record.round))
                    stack.callback(at_work[-1].close)
            for tracker in at_work:
                tracker.log(numbers(record), record.round)

        yield log


def opened(name: str, folder: Path, first: int) -> Open:
    path = folder / TRACKED
    try:
        before = json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        raise ConfigError(f"{path} is not as it was written; restore it from a copy, or delete it") from None
    tracker = TRACKERS[name](Where(folder, config_of(folder), before.get(name), first))
    if tracker.name:
        write_json(path, before | {name: tracker.name})
    return tracker


def numbers(record: Record) -> Numbers:
    """What was measured in a round, by name; what the method itself reports among it."""
    values = asdict(record)
    said = values.pop("metrics")
    return {k: float(v) for k, v in (values | said).items() if k != "round" and math.isfinite(v)}


def flat(config: dict[str, Any], above: str = "") -> dict[str, Any]:
    """
    >>> flat({"local": {"lr": 0.1}, "rounds": 5})
    {'local.lr': 0.1, 'rounds': 5}
    """
    out: dict[str, Any] = {}
    for key, value in config.items():
        out |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return out
