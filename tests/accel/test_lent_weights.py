"""Weights that all clients share and nobody trains stay one: a product with them is one for the whole cohort."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sparing.accel.train_cuda.captured import RECORDS
from sparing.core.context import context
from sparing.core.method import Local, Phase
from sparing.core.optimiser import Optimiser
from sparing.core.tree import tree_of
from sparing.data.clients import Clients
from sparing.train.local import train
from sparing.train.losses import cross_entropy

PHASE = Phase(epochs=1, batch=4, optimiser=Optimiser(lr=0.1))


class Adapted(nn.Linear):
    """A frozen dense layer and a product of two thin ones beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2) / 9)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.a), self.b)


def adapted() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(12, 8), nn.LayerNorm(8), nn.GELU(), Adapted(8, 7), nn.Flatten(), nn.Linear(21, 5))


def clients(device: str = "cpu") -> Clients:
    g, count = torch.Generator().manual_seed(1), torch.tensor([8, 3, 9, 5])
    x, y = torch.randn(25, 3, 12, generator=g), torch.randint(5, (25,), generator=g)
    return Clients(x.to(device), y.to(device), count.cumsum(0) - count, count)


def by_path(path: str, local: Local, device: str = "cpu", graph: bool = False, precision: str = "float32") -> dict:
    model, data, ids = adapted().to(device), clients(device), torch.tensor([2, 0, 3])
    ctx = context(5, 2, 3, ids, data.count[ids], clients=4, samples=25, device=device)
    start = {name: x.to(device) for name, x in tree_of(model).items()}
    after = train(model, cross_entropy, data, local, start, ctx, path, graph=graph, precision=precision)[0]
    if graph:
        ((_, recording),) = RECORDS[model]
        assert len(recording.others["0.weight"]) == 1
    return dict(after)


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_product_with_frozen_weights_is_one_for_the_cohort():
    """Of two frozen layers forward and, of the second one, backward."""
    with Products() as counted:
        by_path("stacked", Local((PHASE._replace(steps=1),)))
    thin, head = 2 * 2 + 3 + 4, 3  # each product with weights of its own, forward and backward
    assert counted.seen["mm"] + counted.seen["addmm"] == 3
    assert counted.seen["bmm"] + counted.seen["baddbmm"] <= thin + head


@pytest.mark.parametrize(
    "phases",
    [(PHASE,), (PHASE._replace(trains=frozenset({"5.weight"})),), (PHASE._replace(trains=frozenset({"0.a"})), PHASE)],
)
def test_equals_the_loop(phases):
    loop, stacked = (by_path(path, Local(phases)) for path in ("loop", "stacked"))
    for name, x in loop.items():
        torch.testing.assert_close(stacked[name], x, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "close"), [("float32", 1e-3), ("bf16", 0.2)])
def test_equals_the_loop_recorded_on_a_gpu(precision, close):
    loop = by_path("loop", Local((PHASE,)), "cuda")
    recorded = by_path("stacked", Local((PHASE,)), "cuda", graph=True, precision=precision)
    start = tree_of(adapted())
    for name, x in loop.items():
        moved = (x - start[name].to(x.device)).norm()
        assert (recorded[name] - x).norm() <= close * moved, name


class Sentences(nn.Module):
    """Tokens through a frozen base in bfloat16, beside which thin layers train in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 16, dtype=torch.bfloat16)
        self.layer, self.head = (nn.Linear(16, n, dtype=torch.bfloat16) for n in (16, 11))
        self.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, 16) / 4), nn.Parameter(torch.randn(16, 4) / 9)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        thin = F.linear(F.linear(x.to(self.a.dtype), self.a), self.b)
        return self.head(F.gelu(self.layer(x) + thin.to(x.dtype)))


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["stacked", "compiled"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_base_in_bfloat16_is_read_where_it_stands(path, precision):
    model, count = Sentences().cuda(), torch.tensor([8, 3, 9, 5])
    x, y = (torch.randint(11, (25, 6), generator=torch.Generator().manual_seed(i)).cuda() for i in (1, 2))
    data, ids = Clients(x, y, count.cumsum(0) - count, count), torch.tensor([2, 0, 3])
    ctx = context(5, 2, 3, ids, count[ids], clients=4, samples=25, device="cuda")
    start = {name: p.detach()[None] for name, p in model.named_parameters()}
    base = {name: value.clone() for name, value in start.items() if name not in ("a", "b")}
    lesson = (model, cross_entropy, data, Local((PHASE,)), start, ctx)
    loop = train(*lesson, "loop")[0]
    for _ in range(2):
        recorded = train(*lesson, path, graph=True, precision=precision)[0]
        for name in ("a", "b"):
            moved = (loop[name] - start[name]).norm()
            assert (recorded[name] - loop[name]).norm() <= 0.2 * moved, name
    ((_, player),) = RECORDS[model]
    assert player.others["embed.weight"].data_ptr() == model.embed.weight.data_ptr()
    for name, value in base.items():
        assert torch.equal(start[name], value), name
