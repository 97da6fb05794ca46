"""A step in pieces comes to the whole step: micro-batches, blocks that are computed again, logits a few at a time."""

import pytest
import torch
from torch import nn

from sparing.core.context import context
from sparing.core.method import Local, Phase
from sparing.core.optimiser import Optimiser
from sparing.core.tree import tree_of
from sparing.data.clients import Clients
from sparing.models.text import Transformer
from sparing.train import pieces as pieces_room
from sparing.train.activations import sample_activations
from sparing.train.local import train
from sparing.train.losses import cross_entropy
from sparing.train.pieces import WHOLE, StepPieces, repeated_blocks

WORDS, LENGTH = 11, 6
PATHS = [pytest.param("loop"), pytest.param("loop-fast", marks=pytest.mark.accel)]
CPU = torch.device("cpu")


class Speaker(nn.Module):
    """A language model with dropout, some layers of which are large enough to move by factors."""

    def __init__(self):
        super().__init__()
        self.body = Transformer(WORDS, LENGTH, 8, 2, 2, last=False)
        self.drop, self.wide, self.head = nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(8, WORDS)
        self.body.head = nn.Identity()
        for block in self.body.blocks:
            block.dense2 = nn.Sequential(nn.Dropout(0.2), block.dense2)

    def forward(self, x):
        return self.head(self.drop(self.wide(self.body(x))))


def speaker():
    torch.manual_seed(0)
    return Speaker()


def painter():
    torch.manual_seed(0)
    early = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Dropout2d(0.5)
    return nn.Sequential(*early, nn.Flatten(), nn.Linear(64, 600), nn.Linear(600, 5))


def sentences():
    """Of unequal length; one has a single token that counts."""
    g = torch.Generator().manual_seed(1)
    x = torch.randint(WORDS, (23, LENGTH + 1), generator=g)
    long = torch.randint(1, LENGTH + 1, (23, 1), generator=g)
    y = x[:, 1:].masked_fill(torch.arange(LENGTH) >= long, -100)
    return x[:, :-1].contiguous(), y


def pictures():
    g = torch.Generator().manual_seed(1)
    return torch.randn(23, 1, 6, 6, generator=g), torch.randint(5, (23,), generator=g)


TASKS = {"speaker": (speaker, sentences), "painter": (painter, pictures)}


def trained(task, path, pieces=WHOLE, clip=None):
    make, samples = TASKS[task]
    model, (x, y), count = make(), samples(), torch.tensor([9, 14])
    ids, data = torch.arange(2), Clients(x, y, count.cumsum(0) - count, count)
    ctx = context(3, 1, 2, ids, count, clients=2, samples=23)
    local = Local((Phase(epochs=2, batch=8, optimiser=Optimiser(lr=0.1, momentum=0.9, clip=clip)),))
    return train(model, cross_entropy, data, local, tree_of(model), ctx, path, pieces=pieces)


def assert_same(task, path, pieces, exactly=False):
    (whole, told), (parts, also) = trained(task, path), trained(task, path, pieces)
    for name, x in whole.items():
        if exactly:
            assert torch.equal(parts[name], x), name
        else:
            torch.testing.assert_close(parts[name], x, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(also["loss"], told["loss"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("path", PATHS)
def test_micro_batches_come_to_the_batch_with_the_same_dropout(path, task, size):
    assert_same(task, path, StepPieces(microbatch=size))


@pytest.mark.parametrize("task", TASKS)
def test_one_micro_batch_is_the_batch_to_the_last_bit(task):
    assert_same(task, "loop", StepPieces(microbatch=8), exactly=True)


@pytest.mark.parametrize("path", PATHS)
def test_blocks_computed_again_give_the_same_bits(path):
    whole = StepPieces(microbatch=8)  # on loop-fast, pieces move no layer by factors
    again, told = trained("speaker", path, whole._replace(recompute=True))
    once, also = trained("speaker", path, whole)
    assert torch.equal(told["loss"], also["loss"])
    for name, x in once.items():
        assert torch.equal(again[name], x), name


@pytest.mark.parametrize("path", PATHS)
def test_logits_formed_a_few_at_a_time(path, monkeypatch):
    monkeypatch.setattr(pieces_room, "LOGITS_AT_ONCE", 4 * WORDS * 5)
    assert_same("speaker", path, StepPieces(head="head"))
    assert_same("speaker", path, StepPieces(microbatch=3, recompute=True, head="head"))


def test_a_mean_of_means_would_be_another_gradient():
    """The micro-batches have different numbers of tokens: the test above can fail."""
    x, y = sentences()
    tokens = (y != -100).sum(1)
    assert len(set(tokens[:8].tolist())) > 1
    losses = cross_entropy(speaker().eval()(x[:8]), y[:8])
    assert not torch.isclose(losses.mean(), (losses * tokens[:8]).sum() / tokens[:8].sum(), rtol=1e-4)


class OwnNoise(nn.Module):
    """Draws from torch's generator, as dropout within attention does."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), Noisy()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Noisy(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


def test_what_draws_from_torch_draws_the_same_again():
    torch.manual_seed(0)
    model, count = OwnNoise(), torch.tensor([8])
    data = Clients(torch.randn(8, 4), torch.randint(4, (8,)), torch.tensor([0]), count)
    ctx = context(3, 1, 2, torch.arange(1), count, clients=1, samples=8)
    how = (cross_entropy, data, Local((Phase(epochs=2, batch=4, optimiser=Optimiser(lr=0.1)),)), tree_of(model), ctx)
    once, again = (train(model, *how, pieces=StepPieces(recompute=one))[0] for one in (False, True))
    for name, x in once.items():
        assert torch.equal(again[name], x), name


def test_bytes_of_a_sample_say_what_each_measure_saves():
    x, y = sentences()
    net = Transformer(WORDS, LENGTH, 8, 4, 2, last=False)
    held = sample_activations(net, cross_entropy, x, y, CPU)
    assert held.head_path == "head"
    assert held.inputs == 4 * LENGTH * 8 * 4
    assert held.blocks >= 3 * held.largest
    assert held.held(True, True) < held.held(True, False) < held.held(False, False) == held.whole
    logits = 4 * LENGTH * WORDS
    assert logits <= held.head <= 8 * logits
    assert sample_activations(net, cross_entropy, x[:, :3], y[:, :3], CPU).whole < held.whole / 1.8
    assert sample_activations(painter(), cross_entropy, *pictures(), CPU).head_path == ""


def test_blocks_of_usual_networks():
    from sparing.models import build_network

    assert list(repeated_blocks(Transformer(WORDS, LENGTH, 8, 2, 2, last=False))) == ["blocks.block1", "blocks.block2"]
    assert not repeated_blocks(build_network("cnn", (1, 8, 8), 3))
    resnet = build_network("resnet18", (3, 32, 32), 3)
    assert list(repeated_blocks(resnet)) == ["stem", "layer1", "layer2", "layer3", "layer4"]
