"""What to try next, as Optuna sees it: more accuracy and fewer bytes, by its tree-structured Parzen estimator.

A proposal follows from the seed, the number of the trial and the trials before it, and from nothing else: a search that
was stopped goes on as if it had not been.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from sparing.core.errors import ConfigError
from sparing.run.sweep import Range, Settings, Space, Sweep, fitting, key_of
from sparing.run.trials import Trial

PATIENCE = 30  # proposals in a row that were tried before, until there seems to be nothing new


def optuna_module() -> Any:
    try:
        return importlib.import_module("optuna")
    except ImportError:
        raise ConfigError(
            "sweep.trials asks for a search, which needs Optuna; pip install 'sparing[sweep]', or drop sweep.trials"
        ) from None


def propose(plan: Sweep, trials: Sequence[Trial], seed: int) -> Settings | None:
    """Settings that were not tried yet; None where no more can be found."""
    optuna = optuna_module()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spaces = {key: distribution(optuna, one) for key, one in plan.spaces.items()}
    study = optuna.create_study(directions=["maximize", "minimize"])
    for trial in trials:
        if trial.complete:
            params = {key: place(plan.spaces[key], value) for key, value in trial.settings.items()}
            values = [trial.over_seeds(name).mean for name in ("accuracy", "bytes")]
            of_these = {key: spaces[key] for key in params}
            study.add_trial(optuna.trial.create_trial(params=params, distributions=of_these, values=values))
    tried = {key_of(trial.settings) for trial in trials}
    for again in range(PATIENCE):
        study.sampler = optuna.samplers.TPESampler(seed=(seed * 1_000_003 + len(trials) * PATIENCE + again) % 2**32)
        params = study.ask(spaces).params
        settings = fitting(plan, {key: value_at(plan.spaces[key], params[key]) for key in spaces})
        if key_of(settings) not in tried:
            return settings
    return None


def distribution(optuna: Any, one: Space) -> Any:
    """A choice is by its place in the list, for Optuna knows only plain values."""
    if not isinstance(one, Range):
        return optuna.distributions.CategoricalDistribution(range(len(one)))
    if one.kind == "whole":
        return optuna.distributions.IntDistribution(one.low, one.high)
    return optuna.distributions.FloatDistribution(one.low, one.high, log=one.kind == "log")


def place(one: Space, value: Any) -> Any:
    return value if isinstance(one, Range) else one.index(value)


def value_at(one: Space, found: Any) -> Any:
    return found if isinstance(one, Range) else one[found]
