"""By what two tasks are told apart: a digest of the samples, who holds them, the network, the loss and the metrics.

Weights count by name, shape and type, not by value, as every seed starts from other ones. Of a tensor beyond
`_WHOLE_BYTES` its shape, its type and as many evenly spread rows count as come to that many bytes. The same samples in
another order, or shared out otherwise, are another task.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from sparing.data.clients import Clients
from sparing.data.inputs import Inputs
from sparing.tasks.function_identity import function_identity, without_addresses
from sparing.tasks.task import Task

_WHOLE_BYTES = 64 * 2**20
_LETTERS = 16  # of the digest: 64 bits


def task_fingerprint(task: Task) -> str:
    """
    >>> from torch import nn
    >>> x, y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    >>> one, other = (Task(nn.Linear(2, 2), [(x + i, y)]) for i in (0, 1))
    >>> task_fingerprint(one) == task_fingerprint(one), task_fingerprint(one) == task_fingerprint(other)
    (True, False)
    """
    digest = hashlib.sha256()
    for what in ("train", "test", "test_all", "validation", "probe", "held_out"):
        digest.update(f"|{what}|".encode())
        for x in _tensors_in(getattr(task, what)):
            _add_tensor(digest, x)
    model = task.build()
    for name, x in model.state_dict().items():
        shape = "?" if is_lazy(x) else tuple(x.shape)  # one that has none yet is refused later, by name
        digest.update(f"|{name}|{x.dtype}|{shape}".encode())
    digest.update(without_addresses(repr(model)).encode())
    digest.update(f"|loss|{function_identity(task.loss)}".encode())
    for one in task.metrics:
        known = "measured" if one.of is None else function_identity(one.of)
        digest.update(f"|{one.name}|{one.higher_is_better}|{known}".encode())
    return digest.hexdigest()[:_LETTERS]


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Inputs):
        yield from value.tensors
    elif isinstance(value, Clients):
        yield from _tensors_in((value.start, value.count, value.x, value.y))
    elif value is not None:
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(one)


def _add_tensor(digest: Any, x: Tensor) -> None:
    digest.update(f"{x.dtype}|{tuple(x.shape)}|".encode())
    size = x.numel() * x.element_size()
    if size > _WHOLE_BYTES:
        rows = max(2, len(x) * _WHOLE_BYTES // size)
        x = x[torch.linspace(0, len(x) - 1, rows, dtype=torch.float64).round().long().to(x.device)]
    digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
