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
from typing import TYPE_CHECKING, Any, NamedTuple

from sparing.core.errors import ConfigError, nearest_name
from sparing.storage.atomic import write_json

if TYPE_CHECKING:
    from sparing.runs.loop import Logger
    from sparing.runs.results import Record

_PROJECT, _TRACKED_FILE = "sparing", "tracked.json"
_Numbers = dict[str, float]


class _OpenTracker(NamedTuple):
    """A tracker at work: what takes a round's numbers, what ends it, and the name it goes by from now on."""

    log: Callable[[_Numbers, int], Any]
    close: Callable[[], Any]
    name: str = ""


class _TrackedRun(NamedTuple):
    """What a tracker may want to know of a run."""

    folder: Path
    config: dict[str, Any]
    before: str | None  # the name it had, if it is resumed
    first: int  # round


def _open_tensorboard(at: _TrackedRun) -> _OpenTracker:
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(
        str(at.folder / "tensorboard"), purge_step=at.first
    )

    def log(values: _Numbers, step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return _OpenTracker(log, writer.close)


def _open_mlflow(at: _TrackedRun) -> _OpenTracker:
    module = importlib.import_module("mlflow")
    if at.before is None:
        module.set_experiment(_PROJECT)
        run = module.start_run(run_name=at.folder.name)
        module.log_params(_flat_config(at.config))
    else:
        run = module.start_run(run_id=at.before)
    return _OpenTracker(lambda values, step: module.log_metrics(values, step=step), module.end_run, run.info.run_id)


def _open_trackio(at: _TrackedRun) -> _OpenTracker:
    module = importlib.import_module("trackio")
    name = at.before or f"{at.folder.name}-{uuid.uuid4().hex[:8]}"
    run = module.init(project=_PROJECT, name=name, config=at.config, resume="allow")
    return _OpenTracker(lambda values, step: run.log(values, step=step), module.finish, name)


def _open_wandb(at: _TrackedRun) -> _OpenTracker:
    module = importlib.import_module("wandb")
    name = at.before or uuid.uuid4().hex[:8]
    run = module.init(
        project=_PROJECT, name=at.folder.name, id=name, resume="allow", config=at.config, dir=str(at.folder)
    )
    return _OpenTracker(lambda values, step: run.log(values, step=step), run.finish, name)


TRACKERS = {"tensorboard": _open_tensorboard, "mlflow": _open_mlflow, "trackio": _open_trackio, "wandb": _open_wandb}


@contextmanager
def tracking(names: Sequence[str], folder: str | Path) -> "Iterator[Logger]":
    """One logger that tells all of these trackers; they are closed in the end, however it comes."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"there is no tracker {name!r}; {nearest_name(name, TRACKERS)}")
        if find_spec(name) is None:
            raise ConfigError(f"{name} is not installed; pip install 'sparing[{name}]'")
    at_work: list[_OpenTracker] = []
    with ExitStack() as stack:

        def log(record: "Record") -> None:
            if not at_work:
                for name in names:
                    at_work.append(_open_tracker(name, Path(folder), record.round))
                    stack.callback(at_work[-1].close)
            for tracker in at_work:
                tracker.log(_record_numbers(record), record.round)

        yield log


def _open_tracker(name: str, folder: Path, first: int) -> _OpenTracker:
    from sparing.runs.files.run_folder import read_config

    path = folder / _TRACKED_FILE
    try:
        before = json.loads(path.read_text()) if path.exists() else {}
    except ValueError:
        raise ConfigError(f"{path} is not as it was written; restore it from a copy, or delete it") from None
    tracker = TRACKERS[name](_TrackedRun(folder, read_config(folder), before.get(name), first))
    if tracker.name:
        write_json(path, before | {name: tracker.name})
    return tracker


def _record_numbers(record: "Record") -> _Numbers:
    """What was measured in a round, by name; what the method itself reports among it."""
    values = asdict(record)
    said = values.pop("metrics")
    return {k: float(v) for k, v in (values | said).items() if k != "round" and math.isfinite(v)}


def _flat_config(config: dict[str, Any], above: str = "") -> dict[str, Any]:
    """
    >>> _flat_config({"local": {"lr": 0.1}, "rounds": 5})
    {'local.lr': 0.1, 'rounds': 5}
    """
    out: dict[str, Any] = {}
    for key, value in config.items():
        out |= _flat_config(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
    return out
