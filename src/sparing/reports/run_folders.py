"""Run folders as things to compare: found, read, and grouped by everything but the seed."""

import glob
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sparing.core.errors import ConfigError
from sparing.core.registry import known_recipes
from sparing.data.options import name_and_options
from sparing.reports.ranking import Ranking, ranking_of_run
from sparing.runs.files.run_folder import (
    CONFIG_FILE,
    FAILED_FILE,
    LEDGER_FILE,
    METRICS_FILE,
    ROUNDS_FILE,
    SUMMARY_FILE,
    read_checkpoint_meta,
    read_config,
    refuse_altered_files,
)
from sparing.runs.own_code import CODE_FOLDER, edited_since
from sparing.runs.results import Record, read_metric_rows, read_round_row
from sparing.runs.study import OWN_TASK, SecureSection, Study, study_from
from sparing.tasks.code import copy_name, is_code

_NOT_SETTINGS = ("seed", "engine", "device", "plan", "checkpoint", "record", "keep_secret")
"""What does not make it another experiment: the seed, and where and how it was run."""
_QUESTION = (
    "task.data",
    "task.fingerprint",
    "task.clients",
    "task.split",
    "task.test",
    "task.held_out",
    "evaluate.set",
)
_SHOWN_LETTERS = 8  # of a fingerprint
_Parsed = TypeVar("_Parsed")


class StoredRun(NamedTuple):
    """One run, as its folder tells it."""

    folder: Path
    data: str  # the dataset's name, or that of a Task given in Python
    name: str  # of the method
    seed: int
    settings: dict[str, Any]  # everything but the seed, flat: "local.lr", "method.topk.ratio"
    table: list[Record]
    value_bytes: list[int]  # up, a round: the values alone, without index, scale and header
    finished: bool
    failed: str = ""  # why training broke down, where it did
    ranking: Ranking = Ranking()


class RunGroup(NamedTuple):
    """Runs that differ in nothing but the seed, one for each seed, in its order."""

    label: str  # the method, and its task where there are several
    runs: list[StoredRun]
    method: str = ""  # with the options and settings by which it differs from others on the same task
    task: str = ""  # the data's name, and by what it differs from others of that name


def find_run_folders(places: Sequence[str | Path]) -> list[Path]:
    """The run folders at these places: run folders, folders of run folders, or patterns such as runs/digits-*.

    A run folder that holds others is taken with them.
    """
    found: list[Path] = []
    for place in map(str, places):
        hits = [Path(place)] if Path(place).exists() else sorted(map(Path, glob.glob(place)))
        inside = [folder for hit in hits for folder in (hit, *sorted(hit.glob("*"))) if _is_run_folder(folder)]
        if not inside:
            raise ConfigError(
                f"{place} holds no run: there is no {CONFIG_FILE} in it or in its folders; check the path"
            )
        found += [folder for folder in inside if folder not in found]
    return found


def _is_run_folder(path: Path) -> bool:
    return (path / CONFIG_FILE).is_file()


def read_run_folder(path: Path) -> StoredRun:
    """What a run folder holds so far."""
    found = study_from(read_config(path), str(path / CONFIG_FILE))
    refuse_altered_files(path, found.fingerprint())
    study = found.model_dump()
    table = _read_records(path)
    summary = _parse_run_file(path / SUMMARY_FILE, _read_summary) if (path / SUMMARY_FILE).is_file() else {}
    name = "+".join(name_and_options("method", entry)[0] for entry in study["method"])
    done = bool(table) and summary.get("rounds") == len(table)
    values = _parse_run_file(path / LEDGER_FILE, lambda ledger: _value_bytes_up(ledger, len(table)))
    broken = (path / FAILED_FILE).is_file() and not done
    failed = _parse_run_file(path / FAILED_FILE, Path.read_text).strip() or "training broke down" if broken else ""
    settings = flat_settings(study)
    data, known = name_and_options("data", study["task"]["data"])
    if data == OWN_TASK:
        data = known.get("name", OWN_TASK)
        settings["task.fingerprint"] = settings["task.fingerprint"] or _fingerprint_of_samples(path)
    elif found.code():
        data = _short_reference(data)
        settings["task.fingerprint"] = _fingerprint_of_code(path, found)
    failed, ranking = failed or _diverged(table), ranking_of_run(summary, study["evaluate"]["metrics"], table)
    return StoredRun(path, data, name, study["seed"], settings, table, values, done, failed, ranking)


def _fingerprint_of_samples(path: Path) -> str:
    """Of a run that was written before tasks had a fingerprint: by the samples that its checkpoint vouches for."""
    known = (read_checkpoint_meta(path) or {}).get("identity", {})
    said = "|".join(str(known.get(name)) for name in ("train", "test", "validation", "probe", "held out"))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def _fingerprint_of_code(path: Path, study: Study) -> str:
    """Of a run on code that its study names: by the copies of the files, which are read and never run.

    Modules are not copied, so that they count by name alone.
    """
    digest = hashlib.sha256()
    for key, call in study.code().items():
        copy = path / CODE_FOLDER / copy_name(call.place)
        digest.update(f"|{key}|{call.reference.rpartition(':')[2]}|".encode())
        if call.is_file and copy.is_file():
            digest.update(_parse_run_file(copy, Path.read_bytes))
    return digest.hexdigest()[:16]


def _short_reference(data: str) -> str:
    """
    >>> _short_reference("/somewhere/my_file.py:load"), _short_reference("npz:a/b")
    ('my_file.py:load', 'npz:a/b')
    """
    return Path(data).name if is_code(data) else data


def _diverged(table: Sequence[Record]) -> str:
    """Where the last evaluation came to no finite loss though one was measured; else nothing."""
    seen = [r for r in table if r.accuracy == r.accuracy or r.loss == r.loss]
    measured = any(math.isfinite(r.loss) or math.isinf(r.loss) for r in seen)
    if not measured or math.isfinite(seen[-1].loss):
        return ""
    return f"the loss is {seen[-1].loss} after round {seen[-1].round}"


def holds_study(study: Study, folder: Path, fix: str = "choose another folder") -> bool:
    """Whether the folder holds this study, to go on with; a run of another study there is refused."""
    if not _is_run_folder(folder):
        return False
    there = study_from(read_config(folder), str(folder / CONFIG_FILE))
    if there.seed != study.seed or flat_settings(there.model_dump()) != flat_settings(study.model_dump()):
        raise ConfigError(f"{folder} holds a run of another study; {fix}")
    if edited := edited_since(study, folder):
        raise ConfigError(f"{folder} holds a run with another {edited}, which was edited since; {fix}")
    return True


def _read_records(path: Path) -> list[Record]:
    """The rounds up to the last checkpoint."""
    said = _parse_run_file(path / METRICS_FILE, lambda file: read_metric_rows(read_whole_lines(file)))

    def rows(file: Path) -> list[Record]:
        table = [read_round_row(line, said) for line in read_whole_lines(file).splitlines()[1:]]
        if [record.round for record in table] != list(range(1, len(table) + 1)):
            raise ValueError("a round is missing")
        return table

    return _parse_run_file(path / ROUNDS_FILE, rows)


def _parse_run_file(path: Path, read: Callable[[Path], _Parsed]) -> _Parsed:
    """What a file of a run says; one that is not there or makes no sense is refused."""
    try:
        return read(path)
    except FileNotFoundError:
        said = "is missing"
    except (OSError, ValueError, TypeError, IndexError):
        said = "is not as it was written"
    raise ConfigError(f"{path} {said}; restore it from a copy, or leave this run out")


def read_whole_lines(path: Path) -> str:
    """The lines of a table that a checkpoint vouches for; of a folder without one, those that are written whole."""
    mark = ((read_checkpoint_meta(path.parent) or {}).get("files") or {}).get(path.name)
    text = path.read_bytes()[: mark["bytes"] if mark else None].decode()
    return text[: text.rfind("\n") + 1]


def _read_summary(path: Path) -> dict[str, Any]:
    summary = json.loads(path.read_text())
    if not isinstance(summary, dict):
        raise TypeError("no summary")
    return summary


def _value_bytes_up(path: Path, rounds: int) -> list[int]:
    """Bytes of values sent up in each round, as the ledger has them."""
    head, *lines = (line.split(",") for line in read_whole_lines(path).splitlines())
    way, value, total = head.index("direction"), head.index("value"), [0] * rounds
    for cells in lines:
        t, size = int(cells[0]), int(cells[value])
        if len(cells) != len(head) or t < 1:
            raise ValueError(cells)
        if cells[way] == "up" and t <= rounds:
            total[t - 1] += size
    return total


def flat_settings(study: dict[str, Any]) -> dict[str, Any]:
    """A study without its seed, flat, options of the method that are at their default left out.

    >>> flat_settings({"seed": 3, "rounds": 5, "local": {"lr": 0.1}, "method": ["psfed", {"topk": {"ratio": 0.1}}]})
    {'rounds': 5, 'local.lr': 0.1, 'method': 'psfed+topk'}
    >>> flat_settings({"rounds": 5, "secure": {"clients": 3, "colluding": 1, "least": None}, "method": ["fedavg"]})
    {'rounds': 5, 'secure': True, 'secure.colluding': 1, 'method': 'fedavg'}
    """
    out: dict[str, Any] = {}

    def put(key: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                put(f"{key}.{name}" if key else name, inner)
        else:
            out[key] = value

    kept = {key: value for key, value in study.items() if key not in (*_NOT_SETTINGS, "method", "secure")}
    put("", kept | ({"task": _task_settings(kept["task"])} if "task" in kept else {}))
    if (precision := study.get("plan", {}).get("precision", "float32")) != "float32":  # all else of a plan is aside
        out["plan.precision"] = precision
    if (secure := study.get("secure")) is not None:
        usual = SecureSection().model_dump()
        out["secure"] = True
        out |= {f"secure.{key}": value for key, value in secure.items() if value != usual.get(key)}
    entries = [name_and_options("method", entry) for entry in study["method"]]
    out["method"] = "+".join(name for name, _ in entries)
    for name, options in entries:
        usual = _recipe_defaults(name)
        for key, value in options.items():
            if key not in usual or usual[key] != value:
                out[f"method.{name}.{key}"] = value
    return out


def _task_settings(task: dict[str, Any]) -> dict[str, Any]:
    """The task section; of a Task given in Python, its name as the data's, and its fingerprint."""
    name, known = name_and_options("data", task.get("data", ""))
    if name != OWN_TASK:
        return task
    return task | {"data": known.get("name", OWN_TASK), "fingerprint": known.get("fingerprint", "")}


def _recipe_defaults(name: str) -> dict[str, Any]:
    entry = known_recipes().get(name)
    return {p.name: p.default for p in inspect.signature(entry.make).parameters.values()} if entry else {}


def group_runs(runs: Sequence[StoredRun]) -> tuple[list[RunGroup], list[str]]:
    """Groups in the order their first run was given, each with a name of its own, and what there is to say."""
    notes = [f"{run.folder} failed and is left out: {run.failed.splitlines()[0]}" for run in runs if run.failed]
    if notes and len(notes) == len(runs):
        raise ConfigError(f"every run here failed, so there is nothing to compare; {notes[0]}")
    sets: dict[str, list[StoredRun]] = {}
    for run in runs:
        if run.failed:
            continue
        have = sets.setdefault(json.dumps(run.settings, sort_keys=True), [])
        twin = next((other for other in have if other.seed == run.seed), None)
        if twin is None:
            have.append(run)
        elif run.finished and not twin.finished:
            have[have.index(twin)] = run
            notes.append(f"{twin.folder} is unfinished and {run.folder} is the same study: the first is left out")
        else:
            notes.append(f"{run.folder} is the same study and seed as {twin.folder}: it is left out")
    members = [sorted(have, key=lambda run: run.seed) for have in sets.values()]
    tasks = [_task_label(have[0], [others[0] for others in members]) for have in members]
    groups = []
    for have, task in zip(members, tasks, strict=True):
        method = _method_label(have[0], [others[0] for others, on in zip(members, tasks, strict=True) if on == task])
        groups.append(RunGroup(f"{method} on {task}" if len(set(tasks)) > 1 else method, have, method, task))
    return groups, notes + _same_name_notes(groups)


def _same_name_notes(groups: Sequence[RunGroup]) -> list[str]:
    """Tasks given in Python under one name that are not the same."""
    kinds: dict[str, set[str]] = {}
    for group in groups:
        if known := group.runs[0].settings.get("task.fingerprint"):
            kinds.setdefault(group.runs[0].data, set()).add(known)
    return [
        f"{len(found)} different tasks are called {name!r}: they differ in data, model, loss or metric, and are not "
        "averaged; give each a name of its own, Task(name=...), or its file"
        for name, found in kinds.items()
        if len(found) > 1
    ]


def question(run: StoredRun) -> dict[str, Any]:
    """What must be the same for runs to be ranked: whose samples, shared out how, evaluated on which."""
    inside = tuple(f"{key}." for key in _QUESTION)
    return {key: value for key, value in run.settings.items() if key in _QUESTION or key.startswith(inside)}


def _task_label(run: StoredRun, firsts: Sequence[StoredRun]) -> str:
    """The name of the data, with that by which it differs from other tasks of that name."""
    like = [question(other) for other in firsts if other.data == run.data]
    mine, apart = question(run), differing_keys(like)
    if "task.fingerprint" in apart:
        apart = ["task.fingerprint", *(key for key in apart if key == "evaluate.set")]
    said = ", ".join(_setting_of_task(key, mine[key]) for key in apart if key in mine)
    return f"{run.data} ({said})" if said else run.data


def _setting_of_task(key: str, value: Any) -> str:
    text = setting_text(value)
    return f"{key.removeprefix('task.')}={text[:_SHOWN_LETTERS] if key == 'task.fingerprint' else text}"


def _method_label(run: StoredRun, firsts: Sequence[StoredRun]) -> str:
    """The method's name, with its options and the settings by which it differs from others of that name and task."""
    apart = differing_keys([other.settings for other in firsts if other.name == run.name])
    keys = [key for key in run.settings if key in apart or key.startswith("method.")]
    short = [key.removeprefix("method.").removeprefix(f"{run.name}.") for key in keys]
    said = ", ".join(f"{name}={setting_text(run.settings[key])}" for name, key in zip(short, keys, strict=True))
    return f"{run.name} ({said})" if said else run.name


def differing_keys(settings: Sequence[dict[str, Any]]) -> list[str]:
    """The keys that are not the same everywhere."""
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if any(one.get(key) != settings[0].get(key) for one in settings)]


def setting_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
