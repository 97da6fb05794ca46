"""A look before the first round: does this model take these samples, and does a faster path train it the same?"""

import torch
from torch import Tensor, nn

from sparing.core.errors import ConfigError, DataError, SparingError, TrainingError
from sparing.core.keys import Ctx
from sparing.core.mix import Mix
from sparing.core.tree import Trained, tree_of
from sparing.engines.engine import Job
from sparing.task.clients import Clients
from sparing.task.dataset import prepared
from sparing.task.evaluate import evaluate_all
from sparing.task.local import train
from sparing.task.losses import cross_entropy

CLOSE = {"stacked": 1e-3, "implicit": 1e-5}  # BatchNorm over a few samples is ill-conditioned; dense layers are not


def refuse_misfit(job: Job) -> None:
    """One sample through the model and the loss, from the training data, the test data and the probe set."""
    task, models = job.task, job.rest.complete(job.initial)
    sets: list[tuple[str, Tensor, Tensor]] = [("train", task.train.x, task.train.y)]
    if task.test_all is not None:
        sets.append(("test", *task.test_all))
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
            refuse_labels(job, name, x, y)
        try:
            evaluate_all(job.model, task.loss, models, x[:2], y[:2], static=job.method.local.buffers == "static")
        except SparingError:
            raise
        except Exception as error:
            what = f"samples of shape {tuple(x.shape[1:])} and type {x.dtype}, targets of type {y.dtype}"
            said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            model = "the model split into bases" if isinstance(job.model, Mix) else "the model"
            raise DataError(f"{model} or loss does not take the {name} data ({what}): {said}") from error
    for size, model in enumerate(job.sizes):
        refuse_broken(job, size, model)
    if job.method.fit is not None:
        job.method.fit.check(job.model, prepared(task.train.x[:1]))


def refuse_broken(job: Job, size: int, model: nn.Module) -> None:
    """One sample through the network of this size: a forward that looks into its layers may not know the new ones."""
    x, y = job.task.train.x[:2], job.task.train.y[:2]
    try:
        evaluate_all(model, job.task.loss, tree_of(model), x, y, static=job.method.local.buffers == "static")
    except Exception as error:
        said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise ConfigError(
            f"the model does not run once resized (size {size}): {said}; keep that layer whole"
        ) from error


def refuse_labels(job: Job, name: str, x: Tensor, y: Tensor) -> None:
    """Labels beyond the classes the model tells apart, found before torch stumbles over them."""
    zeros = torch.zeros_like(y[:1])
    classes: list[int] = []

    def look(output: Tensor, y: Tensor) -> Tensor:
        classes.append(output.shape[-1])
        return torch.zeros(len(y), device=output.device)

    try:
        evaluate_all(job.model, look, job.rest.complete(job.initial), x[:1], zeros)
    except Exception:  # whatever it is, the caller's own try says it better
        return
    if len(y) and int(y.max()) >= classes[0]:
        place = int(y.argmax())
        whose = f"client {owner(job.task.train, place)}" if name == "train" else f"sample {place}"
        raise DataError(
            f"{name}: {whose} has label {int(y.max())}, but the model tells {classes[0]} classes apart (0 to "
            f"{classes[0] - 1}): count labels from 0 or widen the last layer"
        )


def owner(data: Clients, place: int) -> int:
    return int(((data.start <= place) & (place < data.start + data.count)).nonzero()[0])


def refuse_unhalved(job: Job) -> None:
    """On a CPU, what does not train in bfloat16: other models than those in float32, and what autocast breaks."""
    for name, x in job.initial.items():
        if x.is_floating_point() and x.dtype != torch.float32:
            raise ConfigError(
                f"plan.precision is bf16, which on a CPU is for models in float32, but {name!r} is {x.dtype}; drop it"
            )
    try:
        two_steps(job, "loop", precision="bf16")
    except TrainingError:  # the first round will say so, and where
        return
    except RuntimeError as error:
        said = str(error).strip().splitlines()[0]
        raise ConfigError(f"plan.precision is bf16, but the model does not run in it: {said}; drop it") from error


def two_steps(job: Job, path: str, graph: bool = False, precision: str = "float32") -> Trained:
    """Of two clients with unequal data."""
    count, local = job.task.train.count, job.method.local
    ids = torch.stack([count.argmin(), count.argmax()]).unique()
    ctx = Ctx(job.seed, 0, 1, ids, count[ids], len(count), int(count.sum()))
    local = local._replace(phases=tuple(phase._replace(steps=2) for phase in local.phases))
    start = job.rest.complete(job.initial)
    how = {"graph": graph, "precision": precision}
    return train(job.model, job.task.loss, job.task.train, local, start, ctx, path, **how)[0]


def agrees(job: Job, path: str, graph: bool = False) -> bool:
    """Two steps by this path and one client after the other come to the same."""
    try:
        loop, other = two_steps(job, "loop"), two_steps(job, path, graph)
    except ConfigError:
        return False
    except RuntimeError:
        if not graph:  # else the model may do what cannot be recorded
            raise
        return False
    except TrainingError:  # the first round will say so, and where
        return True
    close = CLOSE[path]
    return all(torch.allclose(loop[name].double(), x.double(), rtol=close, atol=close) for name, x in other.items())
