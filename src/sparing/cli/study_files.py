"""What the command line needs to know of study files and run folders."""

import re
import shlex
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from sparing.cli.wording import method_name
from sparing.core.errors import CheckpointError, ConfigError
from sparing.runs.files.run_folder import CONFIG_FILE, ROUNDS_FILE, read_config, saved_round
from sparing.runs.results import Record, read_round_row
from sparing.runs.study import Study, study_from


def split_items(items: Sequence[str]) -> tuple[str | None, list[str]]:
    """The study file, if there is one, and the overrides, in whatever order they were typed.

    >>> split_items(["rounds=5", "study.yaml", "seed=1"])
    ('study.yaml', ['rounds=5', 'seed=1'])
    """
    overrides = [item for item in items if "=" in item and not Path(item).is_file()]
    files = [item for item in items if item not in overrides]
    if len(files) > 1:
        raise ConfigError(f"{files[0]!r} and {files[1]!r} both look like study files; give one, the rest as key=value")
    return (files[0] if files else None), overrides


def free_run_folder(study: Study) -> Path:
    """runs/TASK-METHOD-SEED, numbered from the second on."""
    data = study.task.data if isinstance(study.task.data, str) else next(iter(study.task.data), "")
    data = "-".join(re.findall(r"[\w.]+", Path(data).name.replace(".py:", "-")))
    name = f"{data}-{method_name(study.method)}-{study.seed}"
    names = (Path("runs") / (name if i == 1 else f"{name}-{i}") for i in count(1))
    return next(path for path in names if not path.exists())


def study_in_folder(folder: Path) -> Study:
    return study_from(read_config(folder), str(folder / CONFIG_FILE))


def earlier_rounds(folder: Path) -> list[Record]:
    """The records up to the last checkpoint; none if they cannot be read, which resuming itself will say better."""
    done = saved_round(folder)
    try:
        return [read_round_row(line, {}) for line in (folder / ROUNDS_FILE).read_text().splitlines()[1 : 1 + done]]
    except (OSError, ValueError):
        return []


def where_it_stands(folder: Path, rounds: int) -> str:
    """What to tell someone who stopped a run."""
    try:
        done = saved_round(folder)
    except CheckpointError as error:
        return str(error)
    if not (folder / CONFIG_FILE).exists():
        return "nothing was written yet"
    saved = f"round {done} of {rounds} is saved" if done else "no round is saved yet"
    return f"{saved}, go on with: sparing resume {shlex.quote(str(folder))}"
