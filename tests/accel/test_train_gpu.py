"""The same training on a GPU, within rounding."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from sparing.core.context import context
from sparing.core.method import Local, Phase
from sparing.core.optimiser import Optimiser
from sparing.core.tree import tree_of, tree_to
from sparing.data.augment import read_augmentations
from sparing.data.clients import Clients
from sparing.models.resnet import BasicBlock, resnet
from sparing.train.evaluate import evaluate_rows
from sparing.train.gradient import gradient_at
from sparing.train.local import train
from sparing.train.losses import cross_entropy
from support import changed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("path", ["loop", "loop-fast", "stacked"])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_training_and_evaluation_agree_with_the_cpu(path, where):
    model = nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2),
        nn.BatchNorm2d(4),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(8, 3),
    ).double()
    g = torch.Generator().manual_seed(0)
    sizes = (5, 20, 1, 33)
    data = Clients.of(
        [(torch.randn(n, 6, generator=g, dtype=torch.float64), torch.randint(3, (n,), generator=g)) for n in sizes]
    )
    ids, phase = (
        torch.tensor([2, 0, 3, 1]),
        Phase(epochs=2, batch=8, optimiser=Optimiser(momentum=0.9, clip=1.0), prox=0.1),
    )
    ctx = context(seed=5, round=2, rounds=9, ids=ids, n=data.count[ids], clients=4, samples=59)
    wanted, note = train(model, cross_entropy, data, Local((phase,)), tree_of(model), ctx)
    start, there = tree_to(tree_of(model), "cuda"), changed(ctx, device="cuda")
    before = torch.cuda.get_rng_state()
    after, notes = train(model, cross_entropy, data.to(where), Local((phase,)), start, there, path=path)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    for name, x in wanted.items():
        assert after[name].device.type == "cuda"
        assert torch.allclose(after[name].cpu(), x, rtol=1e-9, atol=1e-9), name
    assert torch.allclose(notes["loss"].cpu(), note["loss"])
    mine, theirs = (evaluate_rows(model, cross_entropy, t, data, ids) for t in (after, wanted))
    assert torch.allclose(mine["loss"], theirs["loss"])
    shared = evaluate_rows(model, cross_entropy, start, data.to(where), ids.to(where))
    assert torch.allclose(shared["loss"], evaluate_rows(model, cross_entropy, tree_of(model), data, ids)["loss"])


@pytest.mark.parametrize("path", ["loop", "loop-fast", "stacked"])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_images_in_bytes_and_their_variants_agree_with_the_cpu(path, where):
    g = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randint(256, (n, 2, 8, 8), generator=g, dtype=torch.uint8), torch.randint(3, (n,), generator=g))
        for n in (5, 20, 1)
    ]
    data = replace(Clients.of(pairs), augment=read_augmentations(["crop", "flip"], (2, 8, 8)))
    ids, local = torch.arange(3), Local((Phase(epochs=2, batch=8),))
    ctx = context(seed=5, round=2, rounds=9, ids=ids, n=data.count, clients=3, samples=26)
    with torch.backends.cudnn.flags(allow_tf32=False):
        for norm in ("group", "static"):
            model = resnet(BasicBlock, (1, 1), 2, 3, norm, width=8)
            wanted, _ = train(model, cross_entropy, data, local, tree_of(model), ctx)
            start, there = tree_to(tree_of(model), "cuda"), changed(ctx, device="cuda")
            after, _ = train(model, cross_entropy, data.to(where), local, start, there, path=path)
            for name, x in wanted.items():
                assert torch.allclose(after[name].cpu(), x, rtol=1e-2, atol=1e-3), name
            mine = evaluate_rows(model, cross_entropy, tree_to(wanted, "cuda"), data.to(where), ids)
            theirs = evaluate_rows(model, cross_entropy, wanted, data, ids)
            assert torch.allclose(mine["loss"], theirs["loss"], rtol=1e-3)


def test_the_gradient_on_a_probe_set_agrees_with_the_cpu():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.out = nn.LSTM(3, 5, num_layers=2, dropout=0.5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x):
            return self.out(self.lstm(x)[0][:, -1])

    g = torch.Generator().manual_seed(0)
    net, x, y = Net().double(), torch.randn(600, 4, 3, generator=g).double(), torch.randint(3, (600,), generator=g)
    wanted = gradient_at(net, cross_entropy, tree_of(net), x, y)
    found = gradient_at(net, cross_entropy, tree_to(tree_of(net), "cuda"), x.cuda(), y.cuda())
    for name, value in wanted.items():
        assert torch.allclose(found[name].cpu(), value, rtol=1e-9, atol=1e-12), name
