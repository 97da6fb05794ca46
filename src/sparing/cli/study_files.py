"""From what was typed to a study."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from sparing.cli.wording import method_name
from sparing.core.errors import ConfigError
from sparing.data.options import name_and_options
from sparing.runs.known_names import refuse_unknown_methods, refuse_unknown_task
from sparing.runs.study import Study, load_study


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


def load_known_study(path: str | None, overrides: Sequence[str]) -> Study:
    """A study; what it names must exist, which is known before anything of it is imported."""
    study = load_study(path, overrides)
    refuse_unknown_methods([name_and_options("method", entry) for entry in study.method])
    refuse_unknown_task(study.task.data, study.task.model)
    return study


def study_from_items(items: Sequence[str] | None) -> Study:
    """The same, as it was typed."""
    return load_known_study(*split_items(items or []))


def free_run_folder(study: Study) -> Path:
    """runs/TASK-METHOD-SEED, numbered from the second on."""
    name = f"{study.task.data}-{method_name(study.method)}-{study.seed}"
    names = (Path("runs") / (name if i == 1 else f"{name}-{i}") for i in count(1))
    return next(path for path in names if not path.exists())
