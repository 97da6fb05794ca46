"""Clients trained from several threads at once have the bits they have alone, also where the model draws."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparing.core.context import context
from sparing.core.errors import TrainingError
from sparing.core.method import Local, Phase
from sparing.core.optimiser import Optimiser
from sparing.core.tree import layout_of, tree_of, tree_sha256
from sparing.data.clients import Clients
from sparing.train import loop
from sparing.train.local import train
from sparing.train.losses import cross_entropy
from sparing.train.optim import velocities
from sparing.train.torch_rng import DRAWING, GATE, RngGate

SIZES = (20, 5, 33, 12, 40, 9)


class Drawing(nn.Module):
    """Draws from torch's own generator, now and then."""

    def __init__(self, always: bool = True):
        super().__init__()
        self.inner, self.head, self.always = nn.Linear(6, 16), nn.Linear(16, 3), always

    def forward(self, x):
        hidden = self.inner(x).relu()
        draws = self.always or len(x) < 8
        return self.head(F.dropout(hidden, 0.5, self.training) if draws else hidden)


def keyed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.4), nn.ReLU(), nn.Linear(16, 3))


MODELS = {"keyed": keyed, "drawing": Drawing, "now and then": lambda: Drawing(always=False)}


def built(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return MODELS[name]()


def cohort() -> Clients:
    g = torch.Generator().manual_seed(0)
    return Clients.of([(torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)) for n in SIZES])


def rows(model, data, threads: int, lr: float = 0.1) -> list[tuple[str, str]]:
    """What comes of every client, trained by itself on one of so many threads, with velocities to go on from."""
    local = Local(
        (
            Phase(epochs=3, batch=8, optimiser=Optimiser(lr=lr, momentum=0.9)),
            Phase(epochs=1, batch=8, optimiser=Optimiser(momentum=0.5)),
        )
    )
    start = tree_of(model)

    def one(i: int) -> tuple[str, str]:
        memory = {name: x.clone().fill_(0.1) for name, x in velocities(layout_of(model)).items()}
        ctx = context(5, 2, 9, torch.tensor([i]), torch.tensor([SIZES[i]]), len(SIZES), sum(SIZES))
        after, _ = train(model, cross_entropy, data, local, start, ctx, memory=memory)
        return tree_sha256(dict(after)), tree_sha256(memory)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(one, range(len(SIZES))))


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_on_any_number_of_threads(name):
    data, before = cohort(), torch.get_rng_state()
    seen = []
    for threads in (1, 2, 3, 2):
        model = built(name)  # a model not seen before
        seen.append(rows(model, data, threads))
        assert (model in DRAWING) == (name != "keyed")
        assert seen[-1] == rows(model, data, threads), "once it is known to draw"
    assert seen.count(seen[0]) == len(seen)
    assert len(set(seen[0])) == len(SIZES)
    assert torch.equal(torch.get_rng_state(), before)
    assert not GATE.inside


def test_divergence_before_anybody_knows_that_the_model_draws(monkeypatch):
    """What happened with somebody else's draws does not count."""
    model, data, tries = built("drawing"), cohort(), []
    real = loop.train_in_turn

    def fails_first(model, device, train):
        def act(seeded):
            out = train(seeded)
            tries.append(seeded)
            if not seeded:
                raise TrainingError("by bad luck")
            return out

        return real(model, device, act)

    monkeypatch.setattr(loop, "train_in_turn", fails_first)
    assert rows(model, data, 1)
    assert tries == [False] + [True] * len(SIZES)
    with pytest.raises(TrainingError, match="bad luck"):
        rows(built("keyed"), data, 1)
    assert not GATE.inside


def test_alone_means_alone():
    gate, inside, most = RngGate(), [], []

    def together(_):
        with gate.side_by_side():
            inside.append("together")
            time.sleep(0.0002)
            most.append(sorted(set(inside)))
            inside.remove("together")

    def alone(_):
        with gate.alone():
            inside.append("alone")
            most.append(list(inside))
            inside.remove("alone")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: (together, alone)[i % 3 == 0](i), range(300)))
    assert {tuple(x) for x in most} == {("alone",), ("together",)}


def test_the_generator_is_as_the_first_found_it():
    before = torch.get_rng_state()
    gate = RngGate()
    with gate.side_by_side():
        assert not gate.drawn()
        torch.rand(1)
        with gate.side_by_side():
            assert gate.drawn()
        assert gate.drawn()
    assert torch.equal(torch.get_rng_state(), before)
