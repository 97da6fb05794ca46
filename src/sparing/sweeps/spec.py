"""What a sweep tries: a study with a `sweep` section, which names settings and the values they may take.

sweep:
  local.lr: [0.01, 0.03, 0.1]              # every combination of lists, or,
  trials: 40                               # with a number of trials, what Optuna proposes, from lists and
  method.topk.ratio: {log: [0.01, 1]}      # ranges: log, linear, or whole for whole numbers
  seeds: 3                                 # of every trial: so many from the study's own on, or a list
  final: 5                                 # with which --final trains the winner
  judge: personal_accuracy                 # on the validation samples; else the task's first metric, mostly accuracy
  prune: true                              # stop trials below the median of the others: see sweeps.pruning
"""

import copy
import json
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from sparing.core.errors import ConfigError, nearest_name
from sparing.data.options import name_and_options
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.study import SCIENTIFIC_NUMBER, Study, apply_override, method_list, place_code, read_yaml, study_from
from sparing.sweeps.judge import Judge, asked_judge
from sparing.tasks.code import code_in

TrialSettings = dict[str, Any]
_SWEEP_KEYS = ("trials", "seeds", "final", "judge", "prune")
_RANGE_KINDS = ("log", "linear", "whole")
_FINAL_SEEDS = 3  # seeds


class SettingRange(NamedTuple):
    """From low to high, both included."""

    kind: str
    low: float
    high: float


SettingSpace = list[Any] | SettingRange


class SweepSpec(NamedTuple):
    base: dict[str, Any]  # the study as it was written, without its sweep section
    spaces: dict[str, SettingSpace]
    trials: int | None  # None: every combination
    seeds: list[int]
    final: list[int]
    judge: Judge
    prune: bool = False


def load_sweep(path: str | Path, overrides: list[str]) -> SweepSpec:
    """A study file with a sweep section, and `key=value` changes to either."""
    values = read_yaml(Path(path))
    for item in overrides:
        apply_override(values, item)
    place_code(values, path)
    return sweep_from(values, str(path))


def sweep_from(values: dict[str, Any], where: str = "study") -> SweepSpec:
    """Validate plain values: whatever can be refused is refused here, before anything runs."""
    base = {key: value for key, value in values.items() if key != "sweep"}
    section = values.get("sweep")
    if not isinstance(section, dict) or not section.keys() - set(_SWEEP_KEYS):
        raise ConfigError(f"{where} says nothing to try; add a section such as sweep: {{local.lr: [0.01, 0.1]}}")
    study = study_from(base, where)
    if isinstance(base.get("evaluate"), dict) and base["evaluate"].get("set") == "test":
        raise ConfigError(f"{where}: evaluate.set is test, but settings are chosen on validation samples; drop it")
    if not study.task.validation:
        raise ConfigError(f"{where}: task.validation is 0, so there is nothing to choose settings by; set it to 0.2")
    spaces = {key: _read_space(key, value) for key, value in _dotted_keys(section).items() if key not in _SWEEP_KEYS}
    trials, judge = section.get("trials"), asked_judge(section.get("judge"), study.evaluate.metrics)
    if trials is not None and (type(trials) is not int or trials < 1):
        raise ConfigError(f"sweep.trials is {trials!r}; give a whole number, or leave it out to try every combination")
    ranges = [key for key, one in spaces.items() if isinstance(one, SettingRange)]
    if ranges and trials is None:
        raise ConfigError(f"sweep.{ranges[0]} is a range, which has no end of values; say how many: sweep.trials=40")
    prune = section.get("prune", trials is not None)
    if not isinstance(prune, bool):
        raise ConfigError(f"sweep.prune is {prune!r}; use true or false")
    seeds = _read_seeds("seeds", section.get("seeds", 1), study.seed)
    plan = SweepSpec(
        base, spaces, trials, seeds, _read_seeds("final", section.get("final", _FINAL_SEEDS), study.seed), judge, prune
    )
    _refuse_bad_settings(plan)
    return plan


def _dotted_keys(section: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Dotted keys, however the section is nested.

    >>> _dotted_keys({"local": {"lr": [1, 2]}, "task.split.dirichlet": {"log": [0.1, 1]}})
    {'local.lr': [1, 2], 'task.split.dirichlet': {'log': [0.1, 1]}}
    """
    out: dict[str, Any] = {}
    for key, value in section.items():
        inner = isinstance(value, dict) and not value.keys() & set(_RANGE_KINDS)
        out |= _dotted_keys(value, f"{above}{key}.") if inner else {f"{above}{key}": value}
    return out


def _read_space(key: str, value: Any) -> SettingSpace:
    if key.split(".")[0] == "seed":
        raise ConfigError("sweep.seed would choose a lucky draw; a sweep repeats its trials with sweep.seeds")
    if key.startswith("evaluate."):
        raise ConfigError(f"sweep.{key} would judge its trials differently; set {key} for the whole study")
    named = [one for one in value if code_in({key.removeprefix("task."): one})] if isinstance(value, list) else []
    if named:
        raise ConfigError(f"sweep.{key} names code; name it in the study itself, and try options of it")
    if isinstance(value, list) and value:
        values = [_read_number(one) for one in value]
        if any(one in values[:i] for i, one in enumerate(values)):
            raise ConfigError(f"sweep.{key} is {value!r}, which names a value twice; keep one")
        return values
    if isinstance(value, dict) and len(value) == 1:
        kind, ends = next(iter(value.items()))
        ends = [_read_number(end) for end in ends] if isinstance(ends, list) else []
        real = len(ends) == 2 and all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends)
        if kind in _RANGE_KINDS and real and ends[0] < ends[1]:
            if kind == "log" and ends[0] <= 0:
                raise ConfigError(f"sweep.{key} is a log range from {ends[0]}; it has to start above 0")
            if kind == "whole" and not all(isinstance(end, int) for end in ends):
                raise ConfigError(f"sweep.{key} is a range of whole numbers from {ends[0]} to {ends[1]}; use linear")
            return SettingRange(kind, *ends)
    raise ConfigError(f"sweep.{key} is {value!r}; write a list of values, or a range such as {{log: [0.001, 0.1]}}")


def _read_number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and SCIENTIFIC_NUMBER.fullmatch(value) else value


def _read_seeds(name: str, value: Any, first: int) -> list[int]:
    """A list, or so many from the first on.

    >>> _read_seeds("seeds", 3, 10), _read_seeds("seeds", [4, 2], 10)
    ([10, 11, 12], [4, 2])
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return list(range(first, first + value))
    whole = isinstance(value, list) and all(type(seed) is int and seed >= 0 for seed in value)
    if isinstance(value, list) and value and whole and len(set(value)) == len(value):
        return value
    raise ConfigError(f"sweep.{name} is {value!r}; write how many, or a list of different seeds such as [0, 1, 2]")


def _refuse_bad_settings(plan: SweepSpec) -> None:
    """Every value of every list and both ends of every range must make a study; so must the method with each."""
    names = {name for method in _names_in_methods(plan) for name in method}
    for key in plan.spaces:
        words = key.split(".")
        if words[0] == "method" and len(words) > 1:
            if len(words) != 3:
                raise ConfigError(f"sweep.{key}: write method.NAME.option, such as method.topk.ratio")
            if words[1] not in names:
                raise ConfigError(f"sweep.{key}: the method has no part {words[1]!r}; {nearest_name(words[1], names)}")
    for settings in corner_settings(plan):
        study = trial_study(plan, settings, plan.seeds[0])
        recipes_from_entries(study.method, study.personalization.options())


def corner_settings(plan: SweepSpec) -> list[TrialSettings]:
    """Settings to check beforehand: all of a grid; of a search, each value and end beside the first of the others."""
    if plan.trials is None:
        return grid_settings(plan)
    first = {key: _space_ends(one)[0] for key, one in plan.spaces.items()}
    methods = plan.spaces.get("method", [None])
    starts = [first | {"method": method} if method is not None else first for method in _space_ends(methods)]
    tried = [start | {key: v} for start in starts for key, one in plan.spaces.items() if key != "method"
             for v in _space_ends(one)]  # fmt: skip
    return [fitting_settings(plan, settings) for settings in tried or starts]


def _names_in_methods(plan: SweepSpec) -> list[list[str]]:
    """The names in each method that is tried."""
    tried = plan.spaces.get("method") or [plan.base.get("method", "fedavg")]
    if isinstance(tried, SettingRange):
        raise ConfigError("sweep.method is a range; write a list of methods")
    return [[name_and_options("method", entry)[0] for entry in method_list(method)] for method in tried]


def _space_ends(one: SettingSpace) -> list[Any]:
    return [one.low, one.high] if isinstance(one, SettingRange) else one


def grid_settings(plan: SweepSpec) -> list[TrialSettings]:
    """Every combination, in the order written; those that come to the same study once."""
    combined = [
        dict(zip(plan.spaces, values, strict=True)) for values in product(*map(_space_ends, plan.spaces.values()))
    ]
    return list(
        {settings_key(one): one for one in (fitting_settings(plan, settings) for settings in combined)}.values()
    )


def fitting_settings(plan: SweepSpec, settings: TrialSettings) -> TrialSettings:
    """Without the options of parts that this trial's method does not have."""
    method = method_list(settings.get("method", plan.base.get("method", "fedavg")))
    have = {name_and_options("method", entry)[0] for entry in method}
    return {k: v for k, v in settings.items() if not k.startswith("method.") or k.split(".")[1] in have}


def settings_key(settings: TrialSettings) -> str:
    return json.dumps(settings, sort_keys=True)


def trial_study(plan: SweepSpec, settings: TrialSettings, seed: int, final: bool = False) -> Study:
    """One run of a trial: on one thread, for there are others beside it; judged on validation or, at last, on test."""
    values = copy.deepcopy(plan.base)
    for key in sorted(settings, key=lambda key: key != "method"):  # its options after it
        _put_setting(values, key.split("."), settings[key])
    _put_setting(values, ["seed"], seed)
    _put_setting(values, ["evaluate", "set"], "test" if final else "validation")
    _put_setting(values, ["plan", "threads"], 1)
    said = ", ".join(f"{key}={value}" for key, value in settings.items())
    return study_from(values, f"the trial {said}")


def _put_setting(values: dict[str, Any], words: list[str], value: Any) -> None:
    """Set one dotted key; an option of a part goes to where the method names it."""
    if words[0] == "method" and len(words) == 3:
        entries = [name_and_options("method", entry) for entry in method_list(values.get("method", "fedavg"))]
        changed = [(name, {**said, words[2]: value} if name == words[1] else said) for name, said in entries]
        values["method"] = [{name: said} if said else name for name, said in changed]
        return
    *parents, last = words
    for parent in parents:
        inner = values.get(parent)
        values[parent] = dict(inner) if isinstance(inner, dict) else {}
        values = values[parent]
    values[last] = value
