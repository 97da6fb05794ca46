"""From what was typed to a study."""

import re
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from sparing.cli.commands.shared import complain
from sparing.cli.wording import method_name
from sparing.core.errors import ConfigError
from sparing.data.options import name_and_options
from sparing.runs.known_names import refuse_unknown_methods, refuse_unknown_task
from sparing.runs.own_code import code_of_study, refuse_untrusted, trust_code
from sparing.runs.study import Study, apply_override, load_study, place_code, study_from
from sparing.tasks.code import CodeCall


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


def load_known_study(path: str | None, overrides: Sequence[str], without_sweep: bool = False) -> Study:
    """A study; what it names must exist, which is known before anything of it is imported."""
    study = load_study(path, overrides, without_sweep)
    refuse_unknown_methods([name_and_options("method", entry) for entry in study.method])
    refuse_unknown_task(study.task.data, study.task.model)
    return study


def study_from_items(items: Sequence[str] | None, trusts: bool = False, without_sweep: bool = False) -> Study:
    """The same, as it was typed, and free to run the code that it names."""
    path, overrides = split_items(items or [])
    study = load_known_study(path, overrides, without_sweep)
    admit_code(study, trusts, overrides)
    return study


def admit_code(study: Study, trusts: bool, typed: Sequence[str] = (), copies: Path | None = None) -> None:
    """Say which code of others will run. It must be known to this user, trusted now, or named on the command line."""
    calls = study.code().values()
    if not calls:
        return
    if trusts or all(call in _calls_typed(typed) for call in calls):
        trust_code(study, copies)
    refuse_untrusted(study, copies)
    for one in code_of_study(study, copies):
        complain(f"{one.key} runs {one.reference} ({one.path}, sha256 {one.sha256[:12]})")


def _calls_typed(overrides: Sequence[str]) -> list[CodeCall]:
    """The code that was named on the command line itself, with the options given there."""
    values: dict[str, Any] = {}
    for item in overrides:
        apply_override(values, item)
    place_code(values)
    return list(study_from({key: values[key] for key in ("task", "evaluate") if key in values}).code().values())


def free_run_folder(study: Study) -> Path:
    """runs/TASK-METHOD-SEED, numbered from the second on."""
    data = study.task.data if isinstance(study.task.data, str) else next(iter(study.task.data), "")
    data = "-".join(re.findall(r"[\w.]+", Path(data).name.replace(".py:", "-")))
    name = f"{data}-{method_name(study.method)}-{study.seed}"
    names = (Path("runs") / (name if i == 1 else f"{name}-{i}") for i in count(1))
    return next(path for path in names if not path.exists())
