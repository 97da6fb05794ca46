"""Anyone's model and data, and every sentence about data that cannot be trained on."""

import numpy as np
import pytest
import torch
from torch import nn

import sparing
from sparing.core.errors import ConfigError, DataError
from sparing.core.tree import tree_of, tree_sha256
from sparing.data import digits_tensors
from sparing.data.clients import Clients
from sparing.models import MODELS, build_network, cnn, mlp
from sparing.tasks.build import build_task
from sparing.tasks.fingerprint import task_fingerprint
from sparing.tasks.task import Task
from sparing.train.losses import accuracy, cross_entropy, squared_error


def pair(n=3, label=1, width=2):
    return np.ones((n, width)), np.full(n, label)


def make():
    return nn.Linear(2, 2)


def test_clients_are_two_flat_tensors():
    clients = Clients.of([pair(3), (torch.zeros(2, 2), torch.tensor([0, 1])), pair(1)])
    assert (len(clients), clients.start.tolist(), clients.count.tolist()) == (3, [0, 3, 5], [3, 2, 1])
    x, y = clients.client(1)
    assert torch.equal(x, torch.zeros(2, 2))
    assert y.tolist() == [0, 1]
    assert (clients.x.dtype, clients.y.dtype) == (torch.float32, torch.int64)


def test_task_takes_a_module_or_a_function():
    model = make()
    own = Task(model, [pair()])
    assert tree_sha256(tree_of(own.build(seed=9))) == tree_sha256(tree_of(model))
    assert own.build() is not model
    made = Task(make, [pair()])
    before = torch.get_rng_state()
    assert (
        tree_sha256(tree_of(made.build(1)))
        == tree_sha256(tree_of(made.build(1)))
        != tree_sha256(tree_of(made.build(2)))
    )
    assert torch.equal(torch.get_rng_state(), before)


def test_test_sets_global_per_client_or_none():
    train = [pair(), pair(2)]
    none, everybody, each = Task(make, train), Task(make, train, pair(7)), Task(make, train, [pair(4), pair(0)])
    assert (none.test, none.test_all) == (None, None)
    assert everybody.test is None
    assert len(everybody.test_all[0]) == 7
    assert each.test.count.tolist() == [4, 0]
    assert len(each.test_all[0]) == 4
    assert len(Task(make, train, (pair(4), pair(5))).test) == 2  # a tuple of pairs is per client
    assert Task(make, train, (torch.ones(2, 2), torch.ones(2, dtype=torch.int64))).test is None
    assert Task(make, train, list(pair(4))).test is None


def test_default_losses_are_per_sample():
    assert Task(make, [pair()]).loss is cross_entropy
    assert Task(make, [(np.ones((3, 2)), np.ones(3))]).loss is squared_error
    assert squared_error(torch.ones(3, 1), torch.zeros(3)).tolist() == [1, 1, 1]
    assert squared_error(torch.ones(2, 4), torch.zeros(2, 4)).shape == (2,)
    logits, y = torch.randn(2, 5, 4), torch.randint(4, (2, 5))
    wanted = -logits.log_softmax(-1).gather(-1, y[..., None])[..., 0].mean(1)
    assert torch.allclose(cross_entropy(logits, y), wanted)
    assert torch.allclose(cross_entropy(logits.movedim(-1, 1), y), wanted)
    assert accuracy(logits, logits.argmax(-1)).tolist() == [1, 1]
    assert bool(accuracy(torch.ones(2, 1), torch.zeros(2)).isnan().all())
    assert bool(accuracy(torch.ones(2, 1), torch.zeros(2, dtype=torch.int64)).isnan().all())
    with pytest.raises(DataError, match=r"gives \(2, 3\) for targets \(2, 5\)"):
        cross_entropy(torch.ones(2, 3), y)
    with pytest.raises(DataError, match=r"gives \(2, 3\) for float targets \(2,\)"):
        squared_error(torch.ones(2, 3), torch.ones(2))


def test_a_probe_set_of_the_server_s_own():
    task = Task(make, [pair()], probe=pair(4))
    assert [tuple(x.shape) for x in task.probe] == [(4, 2), (4,)]
    assert Task(make, [pair()]).probe is None
    assert task.to(torch.device("meta")).probe[0].is_meta
    for probe, sentence in ((pair(0), "probe has no samples"), (pair(2, -1), "probe: the label is negative")):
        with pytest.raises(DataError, match=sentence):
            Task(make, [pair()], probe=probe)
    named = build_task("digits", clients=5, probe=0.02)
    assert len(named.probe[0]) == pytest.approx(36, abs=1)
    assert int(named.train.count.sum() + named.test.count.sum()) + len(named.probe[0]) == 1797
    with pytest.raises(DataError, match="the model or loss does not take the probe data"):
        sparing.run(Task(make, [pair()], probe=pair(4, width=3)), rounds=1, sample=1)


def spoiled(value, at=1):
    x, y = pair()
    x[at, 0] = value
    return x, y


BAD = {
    "there are no clients: give": ([], None),
    r"train: client 1 has no samples \(0 of them\): leave it out": ([pair(), pair(0)], None),
    r"train: x is not finite \(nan\) at client 1, sample 2: remove": ([pair(), spoiled(np.nan, 2)], None),
    r"train: x is not finite \(inf\) at client 0, sample 1": ([spoiled(np.inf)], None),
    r"test: x is not finite \(-inf\) at sample 1": ([pair()], spoiled(-np.inf)),
    r"train: y is not finite \(nan\) at client 0, sample 0": ([(np.ones((1, 2)), np.array([np.nan]))], None),
    "client 1 has 3 samples but 2 targets: give one target per sample": ([pair(), (pair()[0], [1, 1])], None),
    r"client 1 has samples of shape \(3,\) and type float32 but client 0 has shape \(2,\)": (
        [pair(), pair(width=3)],
        None,
    ),
    "client 1 has targets of shape .* type float32 but client 0 .* int64": ([pair(), (pair()[0], np.ones(3))], None),
    r"train: the label is negative \(-1\) at client 1, sample 0: number": ([pair(), pair(label=-1)], None),
    "test has 1 clients but train has 2: give one": ([pair(), pair()], [pair()]),
    "client 0 is a Tensor, not a pair: give a list with one": (torch.ones(4, 2), None),
    "client 0: x and y must have a sample axis": ([(1.0, 1)], None),
}


@pytest.mark.parametrize("sentence", BAD)
def test_data_that_cannot_be_trained_on(sentence):
    train, test = BAD[sentence]
    with pytest.raises(DataError, match=sentence):
        Task(make, train, test)


def test_clients_that_do_not_fit_together():
    one = torch.tensor([1])
    with pytest.raises(DataError, match="2 samples, 2 targets and clients reaching up to 3"):
        Task(make, Clients(torch.ones(2, 2), torch.ones(2, dtype=torch.int64), one, one + 1))
    with pytest.raises(DataError, match="train: there are no clients"):
        Task(make, Clients(torch.ones(2, 2), torch.ones(2), one[:0], one[:0]))


def test_an_own_loss_may_have_labels_of_its_own():
    task = Task(make, [pair(label=-1)], loss=lambda output, y: (1 - output[:, 0] * y).relu())
    assert task.loss(torch.zeros(3, 2), torch.ones(3)).tolist() == [1, 1, 1]


def test_digits():
    x, y = digits_tensors()
    assert (x.shape, x.dtype, y.dtype) == ((1797, 1, 8, 8), torch.float32, torch.int64)
    assert (float(x.min()), float(x.max())) == (0, 1)


@pytest.mark.parametrize("split", ["iid", {"dirichlet": 0.3}])
@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_digits_task(split, model):
    task = build_task("digits", clients=20, split=split, model=model)
    assert task.test is not None
    assert int(task.train.count.sum() + task.test.count.sum()) == 1797
    assert int(task.train.count.min()) >= 1
    assert task.build(0)(task.train.x[:5]).shape == (5, 10)
    again = build_task("digits", clients=20, split=split, model=model)
    other = build_task("digits", clients=20, split=split, model=model, seed=1)
    assert torch.equal(task.train.y, again.train.y)
    assert not torch.equal(task.train.y[:50], other.train.y[:50])


def test_models_by_name():
    assert build_network("cnn", (1, 28, 28), 10)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert mlp(8, 3, hidden=(4, 5))(torch.zeros(2, 2, 4)).shape == (2, 3)
    assert mlp(8, 3, hidden=())(torch.zeros(2, 8)).shape == (2, 3)
    assert {"cnn", "mlp"} <= set(MODELS)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: build_task("digits", model="cn"), "no model is called 'cn': did you mean 'cnn'"),
        (lambda: build_task("digits", split="idd"), "no split is called 'idd': did you mean 'iid'"),
        (lambda: build_task("digits", split={"dirichlet": 1.0, "iid": 2.0}), "no split is called"),
        (
            lambda: build_task("digits", clients=5000),
            "5000 clients with at least 1 samples each need 5000",
        ),
        (lambda: cnn(1, 10, side=3), "side of 4 or more, seen 3"),
        (lambda: build_network("cnn", (5,), 2), r"takes images.*seen samples of shape \(5,\)"),
    ],
)
def test_names_and_numbers_that_cannot_be_meant(call, sentence):
    with pytest.raises(ConfigError, match=sentence):
        call()


def test_a_probe_set_that_nobody_looks_at_is_mentioned():
    with pytest.warns(UserWarning, match=r"task\.probe is 20: .* no part of the method looks at them"):
        sparing.run({"data": "digits", "probe": 20}, rounds=1, sample=1)


def test_a_task_of_several_inputs_has_a_fingerprint_of_them_all():
    def task(mask):
        x = {"x": torch.ones(6, 2), "mask": mask}
        y = torch.tensor([0, 1] * 3)
        return Task(lambda: nn.Linear(2, 2), train=[(x, y)], test=(x, y))

    one, other = task(torch.ones(6, 2)), task(torch.cat([torch.ones(5, 2), torch.zeros(1, 2)]))
    assert task_fingerprint(one) == task_fingerprint(task(torch.ones(6, 2))) != task_fingerprint(other)
