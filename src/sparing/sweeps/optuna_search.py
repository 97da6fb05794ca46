"""What to try next, as Optuna sees it: better results and fewer bytes, by its tree-structured Parzen estimator.

A proposal follows from the seed, the number of the trial and the trials before it, and from nothing else: a search that
was stopped goes on as if it had not been.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from sparing.core.errors import ConfigError
from sparing.sweeps.folder import Trial
from sparing.sweeps.spec import SettingRange, SettingSpace, SweepSpec, TrialSettings, fitting_settings, settings_key

_PATIENCE = 30  # proposals in a row that were tried before, until there seems to be nothing new


def import_optuna() -> Any:
    try:
        return importlib.import_module("optuna")
    except ImportError:
        raise ConfigError(
            "sweep.trials asks for a search, which needs Optuna; pip install 'sparing[sweep]', or drop sweep.trials"
        ) from None


def propose_settings(plan: SweepSpec, trials: Sequence[Trial], seed: int) -> TrialSettings | None:
    """Settings that were not tried yet; None where no more can be found."""
    optuna = import_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spaces = {key: _optuna_distribution(optuna, one) for key, one in plan.spaces.items()}
    study = optuna.create_study(directions=["maximize", "minimize"])
    for trial in trials:
        if trial.complete:
            params = {key: _optuna_value(plan.spaces[key], value) for key, value in trial.settings.items()}
            values = [trial.merit, trial.over_seeds("bytes").mean]
            of_these = {key: spaces[key] for key in params}
            study.add_trial(optuna.trial.create_trial(params=params, distributions=of_these, values=values))
    tried = {settings_key(trial.settings) for trial in trials}
    for again in range(_PATIENCE):
        study.sampler = optuna.samplers.TPESampler(seed=(seed * 1_000_003 + len(trials) * _PATIENCE + again) % 2**32)
        params = study.ask(spaces).params
        settings = fitting_settings(plan, {key: _setting_value(plan.spaces[key], params[key]) for key in spaces})
        if settings_key(settings) not in tried:
            return settings
    return None


def _optuna_distribution(optuna: Any, one: SettingSpace) -> Any:
    """A choice is by its place in the list, for Optuna knows only plain values."""
    if not isinstance(one, SettingRange):
        return optuna.distributions.CategoricalDistribution(range(len(one)))
    if one.kind == "whole":
        return optuna.distributions.IntDistribution(one.low, one.high)
    return optuna.distributions.FloatDistribution(one.low, one.high, log=one.kind == "log")


def _optuna_value(one: SettingSpace, value: Any) -> Any:
    return value if isinstance(one, SettingRange) else one.index(value)


def _setting_value(one: SettingSpace, found: Any) -> Any:
    return found if isinstance(one, SettingRange) else one[found]
