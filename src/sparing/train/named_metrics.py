"""Metrics by name, or of one's own: functions `(outputs, targets) -> number` over all samples of a set.

Accuracy, loss and auc are measured in any case, and perplexity follows from the loss. Whatever else is asked for is
computed from the outputs of all samples, gathered on the CPU. Outputs are what the model gives: logits, or values where
targets are floats. In sequences, places whose target is IGNORED do not count.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparing.core.errors import ConfigError
from sparing.data.dataset import IGNORED
from sparing.train.losses import Loss, classes_last, squared_error
from sparing.train.metric_names import HIGHER_IS_BETTER, known_metric

MetricFunction = Callable[[Tensor, Tensor], Any]


class Metric(NamedTuple):
    name: str
    of: MetricFunction | None = None  # None: it is measured in any case
    higher_is_better: bool = True
    of_loss: Callable[[Tensor], Tensor] | None = None  # what it is of the mean loss alone


def _guessed_classes(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor, int]:
    """Guesses and labels that count, flat, and the number of classes; one logit says yes where it is above zero."""
    logits = classes_last(outputs, y)
    if logits is None or logits.shape[-1] < 2:
        return _yes_or_no(outputs, y)[0].flatten().long(), y.flatten().long(), 2
    counts = y != IGNORED
    return logits.argmax(-1)[counts], y[counts].long(), logits.shape[-1]


def _yes_or_no(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Guesses and targets, bool `[n, labels]`."""
    if outputs.numel() != y.numel():
        raise ValueError(f"outputs {tuple(outputs.shape)} are not one logit for each target {tuple(y.shape)}")
    return outputs.reshape(len(y), -1) > 0, y.reshape(len(y), -1) > 0.5


def _same_values(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, `[n, values]`."""
    if outputs.numel() != y.numel():
        raise ValueError(f"outputs {tuple(outputs.shape)} are not one value for each target {tuple(y.shape)}")
    return outputs.double().reshape(len(y), -1), y.double().reshape(len(y), -1)


def top5(outputs: Tensor, y: Tensor) -> float:
    """Share of the labels among the five likeliest classes.

    >>> top5(torch.arange(7.0).expand(2, 7), torch.tensor([1, 2]))
    0.5
    """
    logits = classes_last(outputs, y)
    if logits is None:
        raise ValueError(f"outputs {tuple(outputs.shape)} are no choice between classes for targets {tuple(y.shape)}")
    likeliest = logits.topk(min(5, logits.shape[-1]), dim=-1).indices
    return float((likeliest == y[..., None]).any(-1)[y != IGNORED].double().mean())


def macro_f1(outputs: Tensor, y: Tensor) -> float:
    """The mean of F1 over the classes that occur among labels or guesses.

    >>> round(macro_f1(torch.eye(3), torch.tensor([0, 1, 1])), 4)
    0.5556
    """
    guesses, labels, classes = _guessed_classes(outputs, y)
    right = torch.bincount(labels[guesses == labels], minlength=classes).double()
    seen = torch.bincount(guesses, minlength=classes) + torch.bincount(labels, minlength=classes)
    return _mean_f1(right, seen.double())


def _mean_f1(right: Tensor, seen: Tensor) -> float:
    """Of each class: guesses that were right, and guesses and labels together."""
    return float((2 * right / seen)[seen > 0].mean())


def multilabel_accuracy(outputs: Tensor, y: Tensor) -> float:
    """Share of all labels of all samples that are guessed right; a logit says yes where it is above zero."""
    guesses, labels = _yes_or_no(outputs, y)
    return float((guesses == labels).double().mean())


def multilabel_f1(outputs: Tensor, y: Tensor) -> float:
    """The mean of F1 over the labels that occur or are guessed.

    >>> multilabel_f1(torch.tensor([[1.0, -1.0], [1.0, 2.0]]), torch.tensor([[1, 0], [0, 1]]))
    0.8333333333333333
    """
    guesses, labels = _yes_or_no(outputs, y)
    return _mean_f1((guesses & labels).sum(0).double(), (guesses.sum(0) + labels.sum(0)).double())


def mse(outputs: Tensor, y: Tensor) -> float:
    values, targets = _same_values(outputs, y)
    return float((values - targets).square().mean())


def mae(outputs: Tensor, y: Tensor) -> float:
    values, targets = _same_values(outputs, y)
    return float((values - targets).abs().mean())


def r2(outputs: Tensor, y: Tensor) -> float:
    """The share of the targets' variance that is explained, mean over their values; NaN where they do not vary.

    >>> r2(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0]))
    0.5
    """
    values, targets = _same_values(outputs, y)
    spread = (targets - targets.mean(0)).square().sum(0)
    missed = (values - targets).square().sum(0)
    return float((1 - missed / spread)[spread > 0].mean())


_FUNCTIONS: dict[str, MetricFunction] = {
    one.__name__: one for one in (top5, macro_f1, multilabel_accuracy, multilabel_f1, mse, mae, r2)
}
_OF_LOSS = {"perplexity": torch.exp}
METRICS = {
    name: Metric(name, _FUNCTIONS.get(name), better, _OF_LOSS.get(name)) for name, better in HIGHER_IS_BETTER.items()
}
ACCURACY, LOSS, AUC = (METRICS[name] for name in ("accuracy", "loss", "auc"))


def read_metrics(given: Any) -> tuple[Metric, ...]:
    """One metric or several: names, functions, torchmetrics metrics. The first is what tables rank by.

    >>> [one.name for one in read_metrics(["macro-f1", mae])]
    ['macro_f1', 'mae']
    """
    several = given if isinstance(given, list | tuple) and not isinstance(given, Metric) else [given]
    found = tuple(_read_metric(one) for one in several)
    if not found:
        raise ConfigError("metric is an empty list; name one, such as accuracy, or leave it out")
    names = [one.name for one in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"the metric {twice!r} stands twice; keep one, or give its function another name")
    return found


def _read_metric(given: Any) -> Metric:
    if isinstance(given, Metric):
        return given
    if isinstance(given, str):
        return METRICS[known_metric(given)]
    better = getattr(given, "higher_is_better", None)
    if all(hasattr(given, act) for act in ("update", "compute", "reset")):
        return Metric(type(given).__name__, _computed_anew(given), better is not False)
    if not callable(given):
        raise ConfigError(f"metric is {given!r}; give a name, such as macro_f1, or a function of (outputs, targets)")
    name = getattr(given, "__name__", type(given).__name__)
    if not name.isidentifier():
        raise ConfigError(
            "the metric is a function without a name (lambda); define it with def, its name is its column"
        )
    known = METRICS.get(name)
    if known is not None and known.of is not given:
        raise ConfigError(f"the metric's function is called {name!r}, as one that is known by name; call it otherwise")
    return known or Metric(name, given, better is not False)


def _computed_anew(metric: Any) -> MetricFunction:
    """A torchmetrics metric of these samples alone."""

    def of(outputs: Tensor, y: Tensor) -> Any:
        metric.reset()
        metric.update(outputs, y)
        return metric.compute()

    return of


def usual_metric(y: Tensor, loss: Loss) -> Metric:
    """What tables rank by where nothing is asked for: accuracy of classes and of yes or no, else the loss."""
    if not y.is_floating_point():
        return ACCURACY
    return ACCURACY if loss is not squared_error and bool(((y == 0) | (y == 1)).all()) else LOSS


def metric_values(metrics: Sequence[Metric], outputs: Tensor, y: Tensor) -> dict[str, float]:
    """Of those that are not measured in any case; a function that fails is named."""
    found: dict[str, float] = {}
    for name, of in ((one.name, one.of) for one in metrics if one.of is not None):
        try:
            value = of(outputs, y)
            found[name] = float(value)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            seen = f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(y.shape)}"
            raise ConfigError(f"the metric {name!r} gives no number for {seen} ({said}): choose another") from error
    return found


def metrics_of_loss(metrics: Sequence[Metric], loss: Tensor) -> dict[str, Tensor]:
    """Those that follow from mean losses, of any shape.

    >>> metrics_of_loss(read_metrics(["accuracy", "perplexity"]), torch.tensor(2.0).log())
    {'perplexity': tensor(2.)}
    """
    return {one.name: one.of_loss(loss) for one in metrics if one.of_loss is not None}


def metrics_by_client(
    metrics: Sequence[Metric], outputs: Tensor, y: Tensor, counts: Sequence[int]
) -> Mapping[str, Tensor]:
    """Float64 `[K]` of each; NaN for a client without samples, or on whose samples it has no meaning (ValueError)."""
    wanted = [one for one in metrics if one.of is not None]
    rows: dict[str, list[float]] = {one.name: [] for one in wanted}
    for some, targets in zip(outputs.split(list(counts)), y.split(list(counts)), strict=True):
        for one in wanted:
            try:
                rows[one.name].append(metric_values([one], some, targets)[one.name] if len(targets) else math.nan)
            except ConfigError as error:
                if not isinstance(error.__cause__, ValueError):
                    raise
                rows[one.name].append(math.nan)
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in rows.items()}
