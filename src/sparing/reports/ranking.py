"""By which metric methods are ranked, which way is better, and how its numbers are written."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sparing.runs.results import Record, Target
from sparing.train.metric_names import HIGHER_IS_BETTER, metric_column

_ACCURACY = "accuracy"


class Ranking(NamedTuple):
    """The first metric of a run's task."""

    metric: str = _ACCURACY
    higher_is_better: bool = True

    @property
    def by_accuracy(self) -> bool:
        return self.metric == _ACCURACY

    @property
    def columns(self) -> tuple[str, str]:
        """Of a round: the global model's, and the mean over the clients' own."""
        return self.metric, f"personal_{self.metric}"

    @property
    def measures(self) -> tuple[str, str]:
        """The same after the last round, as a comparison calls them; the first that all have is what counts."""
        return f"final_{self.metric}", f"personal_{self.metric}"

    @property
    def sign(self) -> int:
        return 1 if self.higher_is_better else -1

    @property
    def title(self) -> str:
        """At the beginning of a title."""
        return "Accuracy" if self.by_accuracy else self.metric

    @property
    def axis(self) -> str:
        """Beside the axis of a figure."""
        return "accuracy (%)" if self.by_accuracy else f"{self.metric} ({self.direction})"

    @property
    def change_axis(self) -> str:
        """The same where a difference is shown, or a deviation."""
        return "accuracy (percentage points)" if self.by_accuracy else self.metric

    @property
    def column_head(self) -> str:
        return "accuracy (%)" if self.by_accuracy else self.metric

    @property
    def scale(self) -> int:
        """By which values are multiplied to be shown."""
        return 100 if self.by_accuracy else 1

    @property
    def extreme(self) -> str:
        """What the best value is among others."""
        return "highest" if self.higher_is_better else "lowest"

    def shown(self, value: float, digits: int = 1) -> str:
        """
        >>> Ranking().shown(0.5), Ranking("mse", False).shown(0.123456)
        ('50.0 %', '0.1235')
        """
        return f"{100 * value:.{digits}f} %" if self.by_accuracy else short_value(value)

    def target(self, value: float) -> Target:
        return Target(value, self.metric, self.higher_is_better)

    def target_text(self, value: float) -> str:
        """
        >>> Ranking().target_text(0.9), Ranking("mse", False).target_text(0.25)
        ('90 % accuracy', 'mse 0.25')
        """
        return f"{100 * value:g} % accuracy" if self.by_accuracy else f"{self.metric} {value:g}"

    @property
    def direction(self) -> str:
        return "higher is better" if self.higher_is_better else "lower is better"


def ranking_of_run(summary: Mapping[str, Any], asked: Sequence[str], table: Sequence[Record]) -> Ranking:
    """As its summary says; of a run that is not over, by the metrics that its study names and by what was measured."""
    if summary:
        return Ranking(str(summary.get("ranked_by", _ACCURACY)), summary.get("higher_is_better", True) is not False)
    if asked:
        name = metric_column(asked[0])
        return Ranking(name, HIGHER_IS_BETTER.get(name, True))
    if any(math.isfinite(r.loss) for r in table) and all(math.isnan(r.accuracy) for r in table):
        return Ranking("loss", False)
    return Ranking()


def short_value(value: float) -> str:
    """
    >>> short_value(0.123456), short_value(1234.56)
    ('0.1235', '1235')
    """
    return f"{value:.4g}"


def signed_value(value: float) -> str:
    """
    >>> signed_value(-0.01234), signed_value(2.5)
    ('-0.0123', '+2.5')
    """
    return f"{value:+.3g}"
