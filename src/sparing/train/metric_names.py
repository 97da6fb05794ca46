"""Metrics by name, and which way each is better: without torch, so that a mistake in a name is answered at once.

What computes them is in `named_metrics`.
"""

from sparing.core.errors import ConfigError, nearest_name

HIGHER_IS_BETTER = {
    "accuracy": True,
    "loss": False,
    "auc": True,
    "top5": True,
    "macro_f1": True,
    "multilabel_accuracy": True,
    "multilabel_f1": True,
    "mse": False,
    "mae": False,
    "r2": True,
    "perplexity": False,
}


def metric_column(given: str) -> str:
    """What the metric that somebody names is called in tables; of code, its function.

    >>> metric_column("Macro-F1"), metric_column("top-5"), metric_column("my_file.py:Error")
    ('macro_f1', 'top5', 'Error')
    """
    place, _, name = given.rpartition(":")
    return name if place else name.lower().replace("-", "_").replace("top_", "top")


def known_metric(given: str) -> str:
    """The column of a metric that there is; another one is refused."""
    name = metric_column(given)
    if name not in HIGHER_IS_BETTER:
        raise ConfigError(f"no metric is called {given!r}: {nearest_name(name, HIGHER_IS_BETTER)}")
    return name
