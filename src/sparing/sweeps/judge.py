"""By what a sweep chooses: a number of every run, and which way is better."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sparing.core.errors import ConfigError, nearest_name
from sparing.train.metric_names import metric_column

if TYPE_CHECKING:
    from sparing.train.named_metrics import Metric

_ACCURACIES = ("accuracy", "personal_accuracy", "after_accuracy", "worst_decile")
_KINDS = ("", "personal_", "after_")
"""Of the global model, of the clients' own, and of those after local training."""


class Judge(NamedTuple):
    """A column of rounds.csv or a metric, of which the last value counts."""

    column: str = "accuracy"  # "": the task's first metric, which is known once the task is
    higher_is_better: bool = True

    @property
    def by_accuracy(self) -> bool:
        return self.column in _ACCURACIES

    @property
    def sign(self) -> int:
        return 1 if self.higher_is_better else -1

    @property
    def scale(self) -> int:
        return 100 if self.by_accuracy else 1

    @property
    def unit(self) -> str:
        return " %" if self.by_accuracy else ""

    def number(self, value: float, digits: int = 2) -> str:
        """A value without its unit.

        >>> Judge().number(0.1234), Judge("mse", False).number(0.12344)
        ('12.34', '0.1234')
        """
        return f"{100 * value:.{digits}f}" if self.by_accuracy else f"{value:.4g}"


def asked_judge(word: object, metrics: Sequence[str]) -> Judge:
    """As a sweep names it, before anything is loaded. `metrics`: those that its study names."""
    if word is None:
        return Judge("")
    names = [metric_column(name) for name in metrics]
    known = [*_ACCURACIES, *(f"{kind}{name}" for name in dict.fromkeys((*names, "loss")) for kind in _KINDS)]
    if word not in known:
        raise ConfigError(f"sweep.judge is {word!r}; {nearest_name(str(word), known)}")
    return Judge(str(word))


def settled_judge(asked: Judge, metrics: "Sequence[Metric]") -> Judge:
    """With its direction, and the task's first metric where none was asked for."""
    if asked.by_accuracy:
        return asked
    better = {"loss": False} | {one.name: one.higher_is_better for one in metrics}
    column = asked.column or metrics[0].name
    name = next(column.removeprefix(kind) for kind in reversed(_KINDS) if column.startswith(kind))
    return Judge(column, better.get(name, True))
