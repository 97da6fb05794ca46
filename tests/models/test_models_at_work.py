"""Unusual models, divergence, and settings that cannot be meant."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparing.core.context import Ctx, context
from sparing.core.errors import ConfigError, TrainingError
from sparing.core.method import Local, Phase
from sparing.core.optimiser import Optimiser
from sparing.core.tree import take_rows, tree_of, tree_sha256
from sparing.data.clients import Clients
from sparing.train.local import train
from sparing.train.losses import cross_entropy, squared_error

BOTH = pytest.mark.parametrize("path", ["loop", "loop-fast", "stacked"])


def cohort(sizes=(5, 20, 1)) -> Clients:
    g = torch.Generator().manual_seed(0)
    return Clients.of([(torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)) for n in sizes])


def round_of(ids, data) -> Ctx:
    ids = torch.tensor(ids)
    return context(
        seed=5, round=2, rounds=9, ids=ids, n=data.count[ids % len(data)], clients=len(data), samples=len(data.y)
    )


def run(model, data, local, path="loop", loss=cross_entropy, ids=(0, 1, 2), start=None):
    start = tree_of(model) if start is None else start
    return train(model, loss, data, local, start, round_of(list(ids), data), path=path)


class Tied(nn.Module):
    """One weight under two names, one layer under two names, a parameter nobody uses, a frozen one, a constant."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.b.weight, self.again = self.a.weight, self.norm
        self.idle, self.frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(6), requires_grad=False)
        self.register_buffer("fixed", torch.arange(6.0))

    def forward(self, x):
        return self.again(self.b(self.norm(self.a(x)).relu())) * self.frozen + self.fixed


@BOTH
def test_shared_parameters_train_as_one(path):
    model, data = Tied(), cohort((12, 20, 12))
    after, _ = run(model, data, Local((Phase(epochs=1, batch=32, optimiser=Optimiser(lr=0.1, momentum=0.9)),)), path)
    plain = copy.deepcopy(model).train()
    x, y = data.client(1)
    F.cross_entropy(plain(x), y).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9).step()
    for name, wanted in plain.state_dict().items():
        assert torch.allclose(after[name][1], wanted, rtol=1e-5, atol=1e-6), name
    assert after["a.weight"].data_ptr() != after["b.weight"].data_ptr()


class Counting(nn.Module):
    """Remembers something outside the state_dict."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.seen += 1
        return self.head(x) * self.seen


def test_what_a_model_remembers_outside_its_state_starts_anew_for_each_client():
    model, data, local = Counting(), cohort(), Local((Phase(optimiser=Optimiser(lr=0.1), batch=4),))
    whole, _ = run(model, data, local)
    single, _ = run(model, data, local, ids=[2])
    assert tree_sha256(take_rows(whole, slice(2, 3))) == tree_sha256(single)
    assert float(model.seen) == 0


@BOTH
def test_nothing_trained_still_reports_a_loss(path):
    model, data = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), cohort()
    start = tree_of(model)
    after, notes = run(
        model,
        data,
        Local((Phase(epochs=1, batch=32, optimiser=Optimiser(lr=0.05, weight_decay=0.1), trains=frozenset()),)),
        path,
    )
    assert torch.equal(after["0.weight"], start["0.weight"].expand(3, -1, -1))
    assert after["1.num_batches_tracked"].tolist() == [1, 1, 0]
    assert bool(notes["loss"].isfinite().all())


@BOTH
def test_a_parameter_the_loss_does_not_reach_has_gradient_zero(path):
    model, data = Tied(), cohort()
    after, _ = run(
        model, data, Local((Phase(epochs=1, batch=32, optimiser=Optimiser(lr=0.1, weight_decay=0.5)),)), path
    )
    assert torch.allclose(after["idle"], torch.full((3, 2), 0.95))
    after, _ = run(
        model,
        data,
        Local((Phase(epochs=1, batch=32, optimiser=Optimiser(lr=0.1, weight_decay=0.5), trains=frozenset({"idle"})),)),
        path,
    )
    assert torch.allclose(after["idle"], torch.full((3, 2), 0.95))


@BOTH
def test_regression_and_cumulative_batchnorm(path):
    g = torch.Generator().manual_seed(0)
    data = Clients.of([(torch.randn(n, 6, generator=g), torch.randn(n, generator=g)) for n in (9, 4)])
    model = nn.Sequential(nn.BatchNorm1d(6, momentum=None, affine=False), nn.Linear(6, 1))
    after, _ = run(
        model, data, Local((Phase(optimiser=Optimiser(lr=0.01), batch=4, epochs=2),)), path, squared_error, ids=(0, 1)
    )
    looped, _ = run(
        model, data, Local((Phase(optimiser=Optimiser(lr=0.01), batch=4, epochs=2),)), "loop", squared_error, ids=(0, 1)
    )
    assert after["0.num_batches_tracked"].tolist() == [4, 2]  # the last batch of client 0 has one sample
    assert all(torch.allclose(after[name], looped[name], rtol=1e-5, atol=1e-6) for name in after)


@BOTH
def test_divergence_names_client_round_step_and_fix(path):
    model, data = nn.Linear(6, 3), cohort((5, 20, 4))
    data.x[5:25] *= 1e25
    local = Local((Phase(optimiser=Optimiser(lr=1e10), batch=8, epochs=2),))
    sentence = (
        r"client 1, round 2: the training loss became (nan|inf) at step 2 of phase 1 \(lr 1e\+10, clip None\): lower"
    )
    with pytest.raises(TrainingError, match=sentence):
        run(model, data, local, path)
    with pytest.raises(TrainingError, match=r"client 1, round 2: .* is not finite after the last step"):
        run(model, data, Local((Phase(optimiser=Optimiser(lr=1e20), batch=32, epochs=1),)), path)


@BOTH
def test_a_loss_must_be_per_sample(path):
    with pytest.raises(ConfigError, match=r"the loss gives shape \(\) for 5 samples.*reduction='none'"):
        run(nn.Linear(6, 3), cohort((5, 5)), Local(), path, nn.CrossEntropyLoss(), ids=(0, 1))


def test_a_model_that_looks_at_its_numbers_is_left_to_the_loop():
    class Looking(nn.Linear):
        def forward(self, input):
            return super().forward(input if float(input.detach().sum()) > 0 else -input)

    run(Looking(6, 3), cohort(), Local())
    with pytest.raises(ConfigError, match=r"cannot be trained with clients stacked .*: use path 'loop'"):
        run(Looking(6, 3), cohort(), Local(), "stacked")


def test_instance_statistics_are_left_to_the_loop():
    model = nn.Sequential(nn.Unflatten(1, (1, 6)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten())
    run(model, cohort(), Local())
    with pytest.raises(ConfigError, match=r"layer '1' \(InstanceNorm1d\).*use path 'loop'"):
        run(model, cohort(), Local(), "stacked")


BAD = {
    "no path is called 'lop': did you mean 'loop'": {"path": "lop"},
    "no policy for buffers is called 'stat'": {"local": Local(buffers="stat")},
    "no phases": {"local": Local(())},
    "phase 2: no optimiser is called 'adm': did you mean 'adam'": {
        "local": Local((Phase(), Phase(optimiser=Optimiser(name="adm"))))
    },
    "phase 1: epochs must be 1 or more, seen 0": {"local": Local((Phase(epochs=0),))},
    "phase 1: steps must be 1 or more, seen 0": {"local": Local((Phase(steps=0),))},
    "phase 1: batch must be 1 or more, seen 0": {"local": Local((Phase(batch=0),))},
    "phase 1: lr must be 0 or more, seen nan": {"local": Local((Phase(optimiser=Optimiser(lr=float("nan"))),))},
    "phase 1: clip must be above 0, seen 0": {"local": Local((Phase(optimiser=Optimiser(clip=0.0)),))},
    "no parameter 'wieght': did you mean 'weight'": {"local": Local((Phase(trains=frozenset({"wieght"})),))},
    r"among 0 \.\. 2, seen \[7\]": {"ids": [7]},
    "start lacks 'bias'": {"start": {"weight": torch.zeros(1, 3, 6)}},
    r"'bias' of shape \(4,\), the model \(3,\)": {"start": {"weight": torch.zeros(1, 3, 6), "bias": torch.zeros(1, 4)}},
}


@pytest.mark.parametrize("sentence", BAD)
def test_settings_that_cannot_be_meant(sentence):
    with pytest.raises(ConfigError, match=sentence):
        run(nn.Linear(6, 3), cohort(), **{"local": Local(), **BAD[sentence]})
