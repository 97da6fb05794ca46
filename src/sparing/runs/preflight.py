"""A look before the first round: does this model take these samples, and does a faster path train it the same?"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparing.core.context import context
from sparing.core.errors import ConfigError, DataError, SparingError, TrainingError
from sparing.core.tree import Models, tree_of
from sparing.data.clients import Clients
from sparing.data.dataset import to_network_input
from sparing.data.inputs import Samples, sample_tensors, samples_in_words
from sparing.engines.engine import Job
from sparing.parts.size.mixture import Mix
from sparing.train.evaluate import evaluate_all
from sparing.train.gradient import reaches_params
from sparing.train.local import train
from sparing.train.losses import cross_entropy, sample_losses, squared_error
from sparing.train.model_call import main_tensor
from sparing.train.working_copy import EVALUATED_AT_ONCE

_PATH_TOLERANCE = {
    "stacked": 1e-3,
    "compiled": 1e-3,
    "implicit": 1e-5,
}  # BatchNorm over a few samples is ill-conditioned; dense layers are not
_FEW_BITS_TOLERANCE = {"tf32": 0.05, "bf16": 0.25}  # of the way that training goes, by how it multiplies


def refuse_model_misfit(job: Job) -> None:
    """Two samples through the model and the loss, of the training data, the test data and the probe set."""
    task = job.task
    sets: list[tuple[str, Samples, Tensor]] = [("train", task.train.x, task.train.y)]
    if task.test is not None:
        sets.append(("test", task.test.x, task.test.y))
    if task.test_all is not None and (task.test is None or task.test_all[0] is not task.test.x):
        sets.append(("test" if task.test is None else "test_all", *task.test_all))
    if task.probe is not None:
        sets.append(("probe", *task.probe))
    elif job.method.probe:
        raise ConfigError(
            "the method scores positions by a gradient on the server's probe set (psfed.source: probe), but the task "
            "has none; set task.probe to a share of the training samples, such as 0.01, or to a number of them, or "
            "give your own Task a probe=(x, y)"
        )
    for name, x, y in sets:
        if task.loss is cross_entropy and y.ndim == 1:
            _refuse_unknown_labels(job, name, x, y)
        with _errors_as_sentence(job, name, x, y):
            _refuse_wide_types(job, name, x, y)
    if task.test_all is not None and any(one.of is not None for one in task.metrics):
        x, y = task.test_all[0][:EVALUATED_AT_ONCE], task.test_all[1][:EVALUATED_AT_ONCE]
        evaluate_all(job.model, task.loss, job.rest.complete(job.initial), x, y, metrics=task.metrics)
    with _errors_as_sentence(job, "train", *sets[0][1:], "while training"):
        _refuse_unreached_loss(job)
    for size, model in enumerate(job.sizes):
        _refuse_broken_size(job, size, model)
    if job.method.fit is not None:
        job.method.fit.check(job.model, to_network_input(task.train.x[:1]))


@contextmanager
def _errors_as_sentence(job: Job, name: str, x: Samples, y: Tensor, when: str = "") -> Iterator[None]:
    """Whatever the model or the loss stumbles over, in one sentence."""
    try:
        yield
    except SparingError:
        raise
    except Exception as error:
        what = f"{samples_in_words(x)}, targets of type {y.dtype}"
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        model = "the model split into bases" if isinstance(job.model, Mix) else "the model"
        raise DataError(
            f"{model} or loss does not take the {name} data{when and ' '}{when} ({what}): {reason}{_dtype_hint(job, x)}"
        ) from error


def _dtype_hint(job: Job, x: Samples) -> str:
    """What may help, where the samples are of another type than the weights."""
    weights = {p.dtype for p in job.model.parameters()}
    if not isinstance(x, Tensor) or to_network_input(x[:1]).dtype in weights:
        return ""
    wanted = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in weights))
    return f"; the weights are in {wanted}: give the samples in that, or a model in theirs"


def _refuse_wide_types(job: Job, name: str, x: Samples, y: Tensor) -> None:
    """Numbers in float64 that would silently widen what a model in other floats computes."""
    task, seen = job.task, []

    def look(output: Any, y: Tensor) -> Tensor:
        first = main_tensor(output)
        seen.extend([] if first is None else [first.dtype])
        return sample_losses(task.loss, output, y)

    models, static = job.rest.complete(job.initial), job.method.local.buffers == "static"
    evaluate_all(job.model, look, models, x[:2], y[:2], static=static)
    if torch.float64 in {tensor.dtype for tensor in models.values()} or not seen:
        return
    wide = next((what for what, one in sample_tensors(x) if one.dtype == torch.float64), None)
    if wide is not None and seen[0] == torch.float64:
        raise DataError(
            f"{name}: {wide} is float64, but the model has no weight in float64, so what it gives is in float64 "
            "against its weights: give x.float(), or a model in float64"
        )
    if task.loss is squared_error and y.dtype == torch.float64 != seen[0]:
        raise DataError(f"{name}: y is float64, but the model gives {seen[0]}: give y.float(), or a model in float64")


def _refuse_unreached_loss(job: Job) -> None:
    """A loss that no parameter can lower."""
    model, models = job.model, job.rest.complete(job.initial)
    if isinstance(model, Mix):
        model, models = model.alone(), {name: x[:, 0] for name, x in models.items()}
    x, y = job.task.train.x[:2], job.task.train.y[:2]
    if not reaches_params(model, job.task.loss, models, x, y, job.method.local):
        raise ConfigError(
            "no gradient of the loss reaches any parameter that is trained, so nothing would be learned: the model or "
            "the loss cuts it (detach, no_grad, argmax, rounding, a way through NumPy); take that out"
        )


def _refuse_broken_size(job: Job, size: int, model: nn.Module) -> None:
    """One sample through the network of this size: a forward that looks into its layers may not know the new ones."""
    x, y = job.task.train.x[:2], job.task.train.y[:2]
    try:
        evaluate_all(model, job.task.loss, tree_of(model), x, y, static=job.method.local.buffers == "static")
    except Exception as error:
        said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise ConfigError(
            f"the model does not run once resized (size {size}): {said}; keep that layer whole"
        ) from error


def _refuse_unknown_labels(job: Job, name: str, x: Samples, y: Tensor) -> None:
    """Labels beyond the classes the model tells apart, found before torch stumbles over them."""
    zeros = torch.zeros_like(y[:1])
    classes: list[int] = []

    def look(output: Any, y: Tensor) -> Tensor:
        first = main_tensor(output)
        assert first is not None  # `evaluate_all` refuses it first
        classes.append(first.shape[-1])
        return torch.zeros(len(y), device=y.device)

    try:
        evaluate_all(job.model, look, job.rest.complete(job.initial), x[:1], zeros)
    except Exception:  # whatever it is, the caller's own try says it better
        return
    if len(y) and int(y.max()) >= classes[0]:
        place = int(y.argmax())
        whose = f"client {_owner_of_sample(job.task.train, place)}" if name == "train" else f"sample {place}"
        raise DataError(
            f"{name}: {whose} has label {int(y.max())}, but the model tells {classes[0]} classes apart (0 to "
            f"{classes[0] - 1}): count labels from 0 or widen the last layer"
        )


def _owner_of_sample(data: Clients, place: int) -> int:
    return int(((data.start <= place) & (place < data.start + data.count)).nonzero()[0])


def refuse_without_bfloat16(job: Job) -> None:
    """On a CPU, what does not train in bfloat16: other models than those in float32, and what autocast breaks."""
    for name, x in job.initial.items():
        if x.is_floating_point() and x.dtype != torch.float32:
            raise ConfigError(
                f"plan.precision is bf16, which on a CPU is for models in float32, but {name!r} is {x.dtype}; drop it"
            )
    try:
        _train_two_steps(job, "loop-fast", precision="bf16")
    except TrainingError:  # the first round will say so, and where
        return
    except RuntimeError as error:
        said = str(error).strip().splitlines()[0]
        raise ConfigError(f"plan.precision is bf16, but the model does not run in it: {said}; drop it") from error


def _train_two_steps(job: Job, path: str, graph: bool = False, precision: str = "float32") -> Models:
    """Of two clients with unequal data."""
    count, local = job.task.train.count, job.method.local
    ids = torch.stack([count.argmin(), count.argmax()]).unique()
    ctx = context(job.seed, 0, 1, ids, count[ids], len(count), int(count.sum()))
    local = local._replace(phases=tuple(phase._replace(steps=2) for phase in local.phases))
    start = job.rest.complete(job.initial)
    how = {"graph": graph, "precision": precision}
    return train(job.model, job.task.loss, job.task.train, local, start, ctx, path, **how)[0]


def path_agrees(job: Job, path: str, graph: bool = False) -> bool:
    """Two steps by this path and one client after the other come to the same.

    A compiled step, which takes long to make, is looked at as it will run: in the precision of the job.
    """
    precision = job.precision if graph and path == "compiled" else "float32"
    try:
        loop = _train_two_steps(job, "loop")
        other = _try_path(job, path, graph, precision)
    except TrainingError:  # the first round will say so, and where
        return True
    if other is None:
        return False
    if precision != "float32":
        return _is_near(job, loop, other, _FEW_BITS_TOLERANCE[precision])
    close = _PATH_TOLERANCE[path]
    ends = ((loop[name].double(), other[name].double()) for name in job.initial)
    return all(torch.allclose(x, y, rtol=close, atol=close) for x, y in ends)


def _is_near(job: Job, loop: Models, other: Models, share: float) -> bool:
    """Whether both ended near each other, measured by how far the loop went."""
    start = job.rest.complete(job.initial)
    way, apart = (
        sum(float((x[name].double() - y[name].double()).square().sum()) for name in job.initial)
        for x, y in ((loop, start), (other, loop))
    )
    return apart <= share**2 * way


def _try_path(job: Job, path: str, graph: bool, precision: str) -> Models | None:
    """None where the model does what this path cannot: the loop has trained it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a path that may not be taken
        try:
            return _train_two_steps(job, path, graph, precision)
        except TrainingError:
            raise
        except Exception:
            return None
