"""Training recorded as a CUDA graph comes to the same as one client after the other."""

import pytest
import torch
from torch import nn

from sparing.accel.grown import Grown
from sparing.accel.lazy_product import Product
from sparing.accel.train_cuda.captured import RECORDS
from sparing.core.context import context
from sparing.core.method import Local, Phase
from sparing.core.optimiser import Optimiser
from sparing.core.tree import tree_of
from sparing.data.augment import read_augmentations
from sparing.data.clients import Clients
from sparing.parts.size.fedhm.low_rank import resized_module
from sparing.train.local import train
from sparing.train.losses import cross_entropy
from sparing.train.optim import frobenius

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(288, 64),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(64, 5),
    )


def strided() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2, padding=2, bias=False),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 20, 1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(80, 5),
    )


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(32, 5)
    )


def clients(counts: list[int], augment: tuple = ()) -> Clients:
    g = torch.Generator().manual_seed(1)
    count = torch.tensor(counts)
    x = torch.randn(int(count.sum()), 3, 8, 8, generator=g).cuda()
    y = torch.randint(5, (len(x),), generator=g).cuda()
    return Clients(x, y, count.cumsum(0) - count, count, augment)


def both(model: nn.Module, data: Clients, local: Local, start: dict, precision: str = "float32") -> tuple:
    ids = torch.tensor([2, 0, 3])
    ctx = context(5, 2, 3, ids, data.count[ids], clients=len(data), samples=99, device="cuda")
    loop = train(model, cross_entropy, data, local, start, ctx, "loop")
    graph = train(model, cross_entropy, data, local, start, ctx, "stacked", precision=precision, graph=True)
    again = train(model, cross_entropy, data, local, start, ctx, "stacked", precision=precision, graph=True)
    assert isinstance(graph[0], Grown)
    assert all(torch.equal(x, again[0][name]) for name, x in graph[0].items())
    return loop, graph


def start_of(model: nn.Module) -> dict:
    return {name: x.cuda() for name, x in tree_of(model).items()}


PLAIN = Phase(epochs=1, batch=4, optimiser=Optimiser(lr=0.1))


@pytest.mark.parametrize("make", [cnn, strided, normed])
@pytest.mark.parametrize("counts", [[8, 8, 8, 8], [8, 3, 9, 5], [4, 8, 8, 4]])
@pytest.mark.parametrize(
    "phases",
    [
        (PLAIN,),
        (PLAIN._replace(epochs=3),),
        (PLAIN._replace(optimiser=PLAIN.optimiser._replace(momentum=0.9, weight_decay=0.01, clip=1.0), steps=3),),
    ],
)
def test_equals_the_loop(make, counts, phases):
    torch.manual_seed(0)
    model, data = make().cuda(), clients(counts)
    if make is normed and counts != [8, 8, 8, 8]:
        pytest.skip("statistics of nobody: such clients are not trained in step")
    if counts != [8, 8, 8, 8] and phases[0].optimiser.momentum:
        phases = (phases[0]._replace(batch=3),)
    with torch.backends.cudnn.flags(allow_tf32=False):
        loop, graph = both(model, data, Local(phases), start_of(model))
    for name, x in loop[0].items():
        torch.testing.assert_close(graph[0][name], x, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(graph[1]["loss"], loop[1]["loss"], rtol=1e-4, atol=1e-5)


def test_phases_own_starts_and_varied_images():
    torch.manual_seed(0)
    model = cnn().cuda()
    data = clients([8, 8, 8, 8], read_augmentations(["flip", "crop"], (3, 8, 8)))
    start = start_of(model)
    start["7.weight"] = torch.randn(3, 64, 288, device="cuda") / 20
    start["0.weight"] = torch.randn(3, 16, 3, 3, 3, device="cuda") / 5
    phases = (PLAIN._replace(trains=frozenset({"7.weight", "10.bias"})), PLAIN)
    with torch.backends.cudnn.flags(allow_tf32=False):
        loop, graph = both(model, data, Local(phases), start)
    for name, x in loop[0].items():
        torch.testing.assert_close(graph[0][name], x, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("precision", "close"), [("tf32", 0.05), ("bf16", 0.2)])
def test_fewer_bits_stay_near(precision, close):
    torch.manual_seed(0)
    model, data = cnn().cuda(), clients([8, 8, 8, 8])
    start = start_of(model)
    loop, graph = both(model, data, Local((PLAIN,)), start, precision)
    for name, x in loop[0].items():
        apart = (graph[0][name] - x).norm() / (x - start[name]).norm()
        assert apart < close, name


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_many_visits_of_a_wide_layer(precision):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2000), nn.ReLU(), nn.Linear(2000, 700), nn.Linear(700, 5)).cuda()
    data, start = clients([24, 24, 24, 24]), start_of(model)
    loop, graph = both(
        model, data, Local((PLAIN._replace(epochs=6, optimiser=PLAIN.optimiser._replace(lr=0.02)),)), start, precision
    )
    assert isinstance(graph[0].added["3.weight"], Product)
    for name, x in loop[0].items():
        assert (graph[0][name] - x).norm() / (x - start[name]).norm() < (1e-3 if precision == "float32" else 0.2), name


def test_dense_weights_are_not_formed():
    torch.manual_seed(0)
    model, data = cnn().cuda(), clients([8, 8, 8, 8])
    after = both(model, data, Local((PLAIN,)), start_of(model))[1][0]
    assert isinstance(after.added["7.weight"], Product)
    assert not isinstance(after.added["10.weight"], Product)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("wide", [(500,), (400, 300)])
def test_dense_weights_without_bias_are_all_there_is(wide, precision):
    """Then no gradient is left to be joined with others."""
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, bias=False) for a, b in zip((192, *wide), wide, strict=False)]
    model = nn.Sequential(nn.Flatten(), *layers).cuda()
    data, start = clients([8, 3, 9, 5]), start_of(model)
    with torch.backends.cudnn.flags(allow_tf32=False):
        loop, graph = both(model, data, Local((PLAIN,)), start, precision)
    for name, x in loop[0].items():
        assert isinstance(graph[0].added[name], Product), name
        assert (graph[0][name] - x).norm() / (x - start[name]).norm() < (1e-3 if precision == "float32" else 0.2), name


@pytest.mark.parametrize("phase", [PLAIN._replace(batch=10**9), PLAIN._replace(batch=10**9, epochs=1, steps=3)])
def test_a_batch_larger_than_all_samples_takes_room_for_these(phase):
    torch.manual_seed(0)
    model, data = cnn().cuda(), clients([8, 3, 9, 5])
    with torch.backends.cudnn.flags(allow_tf32=False):
        loop, graph = both(model, data, Local((phase,)), start_of(model))
    for name, x in loop[0].items():
        torch.testing.assert_close(graph[0][name], x, rtol=2e-4, atol=2e-5)
    assert [record.width for _, record in RECORDS[model]] == [9]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.main, self.aux = nn.Linear(192, 20), nn.Linear(20, 5), nn.Linear(20, 5)

    def forward(self, x):
        h = torch.relu(self.body(x.flatten(1)))
        return self.main(h), self.aux(h)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_auxiliary_outputs(precision):
    torch.manual_seed(0)
    model, data, ids = TwoHeads().cuda(), clients([8, 3, 9, 5]), torch.tensor([2, 0, 3])
    start, local = start_of(model), Local((PLAIN,))
    ctx = context(5, 2, 3, ids, data.count[ids], clients=4, samples=99, device="cuda")

    def loss(output, y):
        return cross_entropy(output[0], y) + 0.4 * cross_entropy(output[1], y)

    loop = train(model, loss, data, local, start, ctx, "loop")[0]
    graph = train(model, loss, data, local, start, ctx, "stacked", precision=precision, graph=True)[0]
    for name, x in loop.items():
        assert (graph[name] - x).norm() / (x - start[name]).norm() < (1e-3 if precision == "float32" else 0.2), name


@pytest.mark.parametrize("ranks", [{}, {"2.weight": 8, "7.weight": 16}, {"2.weight": 1, "7.weight": 64}])
def test_factored_layers(ranks):
    torch.manual_seed(0)
    model, data = resized_module(cnn(), ranks).cuda(), clients([8, 8, 8, 8])
    start = {name: x if len(x.shape) < 3 else torch.randn_like(x) / 8 for name, x in start_of(model).items()}
    with torch.backends.cudnn.flags(allow_tf32=False):
        loop, graph = both(model, data, Local((PLAIN._replace(frobenius=0.01),)), start)
    for name, x in loop[0].items():
        torch.testing.assert_close(graph[0][name], x, rtol=5e-4, atol=5e-5)
    assert isinstance(graph[0].added.get("7.weight"), Product) == (not ranks), "nothing else keeps it from being formed"


@pytest.mark.parametrize("near", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 3, 40), (128, 64, 1500), (7, 16, 128)])
def test_both_factors_step_together(shape, near):
    from sparing.accel.train_cuda.kernels.decay import step_together

    (m, r, n), lr, decay = shape, 0.1, 1e-3
    g = torch.Generator().manual_seed(0)
    a, b, grad = (torch.randn(3, *x, generator=g).cuda() / 8 for x in ((m, r), (r, n), (r, n)))
    decayed = frobenius([torch.zeros_like(a), grad], [a, b], [(0, 1)], decay)
    want = [x - lr * y for x, y in zip((a, b), decayed, strict=True)]
    rounded = torch.zeros_like(b, dtype=near)
    step_together(a, b, b if near == torch.float32 else rounded, grad, lr, decay)
    assert torch.allclose(a, want[0], rtol=1e-4, atol=1e-4)
    assert torch.allclose(b, want[1], rtol=1e-4, atol=1e-4)
    assert near == torch.float32 or torch.equal(rounded, b.bfloat16())


def test_room_that_is_not_needed_changes_nothing():
    torch.manual_seed(0)
    model, data, local = cnn().cuda(), clients([8, 3, 9, 5, 8, 8]), Local((PLAIN._replace(epochs=2),))
    start = start_of(model)
    for ids in ([1], [0, 1, 2], [4, 3], [0, 1, 2, 3, 4, 5], [5], [2, 3, 4]):
        who = torch.tensor(ids)
        ctx = context(5, 2, 3, who, data.count[who], clients=6, samples=99, device="cuda")
        with torch.backends.cudnn.flags(allow_tf32=False):
            loop = train(model, cross_entropy, data, local, start, ctx, "loop")
            graph = train(model, cross_entropy, data, local, start, ctx, "stacked", graph=True)
        for name, x in loop[0].items():
            torch.testing.assert_close(graph[0][name], x, rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(graph[1]["loss"], loop[1]["loss"], rtol=1e-4, atol=1e-5)
    assert len(RECORDS[model]) == 3
