"""Clients as people have them: dicts and tuples of tensors, Datasets, DataLoaders; models that give more than one."""

from collections import OrderedDict, namedtuple
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import sparing
from sparing.core.errors import ConfigError, DataError, MethodError
from sparing.data.clients import Clients
from sparing.data.inputs import Inputs
from sparing.tasks.task import Task

Output = namedtuple("Output", "loss logits")


class HuggingFaceOutput(OrderedDict):
    """Keys that are attributes too, of which the logits are not the first."""

    def __getattr__(self, name):
        return self[name] if name in self else super().__getattribute__(name)


class TwoInputs(nn.Module):
    """Tokens and a mask; what it gives is wrapped as `form` says."""

    def __init__(self, form="tensor"):
        super().__init__()
        self.words, self.head, self.drop, self.form = nn.Embedding(9, 4), nn.Linear(4, 3), nn.Dropout(0.1), form

    def forward(self, ids, mask):
        seen = self.words(ids) * mask[..., None]
        out = self.head(self.drop(seen.sum(1)))
        hub = HuggingFaceOutput(hidden_states=seen, logits=out)
        return {"tensor": out, "tuple": (out, seen), "named": Output(seen.sum(), out), "hub": hub}[self.form]


def sentences(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(9, (n, 5), generator=g),
        "mask": torch.randint(2, (n, 5), generator=g),
    }, torch.arange(n) % 3


def as_tuple(pair):
    return tuple(pair[0].values()), pair[1]


def run(task, path="loop", method="fedavg", **study):
    local = {"epochs": 2, "batch": 4, "lr": 0.1, "momentum": 0.9}
    return sparing.run(task, method, rounds=2, sample=2, seed=3, local=local, plan={"path": path}, **study)


def text_task(form="tensor", arrange=lambda pair: pair):
    train, test = [arrange(sentences(7 + i, i)) for i in range(3)], [arrange(sentences(5, 9 + i)) for i in range(3)]
    return Task(lambda: TwoInputs(form), train, test, probe=arrange(sentences(4, 20)))


@pytest.mark.parametrize("arrange", [lambda pair: pair, as_tuple])
@pytest.mark.parametrize("form", ["tensor", "tuple", "named", "hub"])
def test_inputs_and_outputs_mean_the_same_in_every_form(form, arrange):
    plain, other = run(text_task()), run(text_task(form, arrange))
    assert plain.model_sha256 == other.model_sha256
    assert (plain.accuracy, plain.loss, plain.personal_accuracy) == (
        other.accuracy,
        other.loss,
        other.personal_accuracy,
    )


@pytest.mark.parametrize("path", ["loop-fast", "stacked"])
@pytest.mark.parametrize("form", ["tensor", "tuple", "named", "hub"])
def test_paths_agree_on_several_inputs(path, form):
    loop, other = run(text_task()), run(text_task(form), path)
    assert loop.up_bytes == other.up_bytes
    assert loop.personal_accuracy == other.personal_accuracy
    for name, x in loop.model.items():
        torch.testing.assert_close(other.model[name], x, rtol=1e-4, atol=1e-5)


def test_engines_agree_and_a_probe_works():
    method = [{"psfed": {"selector": "gradient", "source": "probe"}}, "topk", "int8", "memory"]
    runs = [run(text_task(), method=method, engine=engine) for engine in ("vector", "debug")]
    assert runs[0].model_sha256 == runs[1].model_sha256
    assert runs[0].up_bytes == runs[1].up_bytes


def test_a_run_is_resumed_only_with_the_same_inputs(tmp_path):
    run(text_task(), out=tmp_path / "a")
    assert sparing.resume(tmp_path / "a", text_task()).rounds == 2
    other = text_task()
    other.train.x.tensors[1][0, 0] += 1
    with pytest.raises(sparing.core.errors.CheckpointError, match="the training samples changed"):
        sparing.resume(tmp_path / "a", other)


def test_a_loss_of_one_s_own_sees_a_tuple_whole():
    def loss(output, y):
        logits, seen = output
        return nn.functional.cross_entropy(logits, y, reduction="none") + 0 * seen.sum((1, 2))

    task = text_task("tuple")
    own = Task(task.model, task.train, task.test, loss=loss)
    for path in ("loop", "stacked"):
        assert run(own, path).loss == pytest.approx(run(task, path).loss)


class Rows(torch.utils.data.Dataset):
    """A map-style dataset of numpy rows and Python ints."""

    reads: ClassVar[list[int]] = []

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.reads.append(i)
        return np.full(2, i / 10), i % 2


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(2), 0)])


def test_datasets_and_loaders_are_read_once():
    Rows.reads.clear()
    loader = DataLoader(Rows(5), batch_size=2, shuffle=True, drop_last=True)
    clients = Clients.of([Rows(3), loader, DataLoader(Rows(9), sampler=SubsetRandomSampler([4, 2]))])
    assert sorted(Rows.reads) == sorted([*range(3), *range(5), 2, 4])
    assert clients.count.tolist() == [3, 5, 2]
    assert (clients.x.dtype, clients.y.dtype) == (torch.float32, torch.int64)
    assert clients.y.tolist() == [0, 1, 0, 0, 1, 0, 1, 0, 0, 0]
    assert clients.client(2)[0][:, 0].tolist() == pytest.approx([0.2, 0.4])
    Task(lambda: nn.Linear(2, 2), [Rows(3)], Rows(4)).train  # noqa: B018
    assert len(Task(lambda: nn.Linear(2, 2), [Rows(3), Rows(2)], (Rows(4), Rows(1))).test) == 2
    assert len(Task(lambda: nn.Linear(2, 2), [Rows(3)], Rows(4)).test_all[1]) == 4


def test_a_dataset_of_several_inputs():
    x, y = sentences(6)
    several = TensorDataset(x["ids"], x["mask"], y)
    named = [{"ids": x["ids"][i], "mask": x["mask"][i], "labels": y[i]} for i in range(6)]
    for client in (several, Subset(several, range(6)), DataLoader(ListOf(named))):
        clients = Clients.of([client])
        assert [t.tolist() for t in clients.x.tensors] == [x["ids"].tolist(), x["mask"].tolist()]
        assert torch.equal(clients.y, y)


class ListOf(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def test_a_tuple_of_samples_stays_one():
    """As many tensors as targets, which are not as long: the samples one by one."""
    rows = tuple(torch.full((4,), float(i)) for i in range(3))
    assert Clients.of([(rows, [0, 1, 0])]).x.shape == (3, 4)
    assert isinstance(Clients.of([(rows, [0, 1, 0, 1])]).x, Inputs)


def test_names_may_stand_in_any_order():
    x, y = sentences(3)
    turned = {name: x[name] for name in reversed(x)}
    clients = Clients.of([(x, y), (turned, y)])
    assert clients.x.names == ("ids", "mask")
    assert torch.equal(clients.client(1)[0].tensors[0], x["ids"])


def test_only_images_stay_uint8_among_several_inputs():
    x = {"image": torch.zeros(2, 1, 3, 3, dtype=torch.uint8), "mask": torch.ones(2, 5, dtype=torch.uint8)}
    assert [t.dtype for t in Clients.of([(x, [0, 1])]).x.tensors] == [torch.uint8, torch.int64]


X, Y = sentences(4)
BAD = {
    r"client 1 has the samples x\['ids'\] but client 0 has x\['ids'\], x\['mask'\]": [(X, Y), ({"ids": X["ids"]}, Y)],
    r"client 0 has 3 samples in x\['mask'\] but 4 targets": [({"ids": X["ids"], "mask": X["mask"][:3]}, Y)],
    r"client 1 has samples x\['mask'\] of shape \(4,\)": [(X, Y), ({"ids": X["ids"], "mask": X["mask"][:, :4]}, Y)],
    r"train: x\['mask'\] is not finite \(nan\) at client 0, sample 2": [
        ({"ids": X["ids"], "mask": torch.tensor([1, 1, torch.nan, 1])[:, None].expand(4, 5)}, Y)
    ],
    "client 0 is a Stream, which gives its samples in a stream": [Stream()],
    "client 0 is a DataLoader with a WeightedRandomSampler, which chooses": [
        DataLoader(Rows(3), sampler=WeightedRandomSampler([1.0, 1, 1], 3))
    ],
    "client 0 has items with the keys ids: name the targets 'labels'": [ListOf([{"ids": 1}])],
    "client 0 has items of type int: let its dataset give": [ListOf([1, 2])],
    "the clients are one DataLoader: give a list with one": DataLoader(Rows(3)),
    r"client 0: x has the keys \[1\]: name the model's arguments": [({1: torch.ones(2)}, [0, 1])],
}


@pytest.mark.parametrize("sentence", BAD)
def test_refusals(sentence):
    with pytest.raises(DataError, match=sentence):
        Task(TwoInputs, BAD[sentence])


def test_what_takes_one_tensor_says_so():
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(MethodError, match="heterofl narrows networks whose samples are one tensor, seen several"):
        run(Task(net, [({"input": torch.ones(4, 2)}, [0, 1, 0, 1])] * 2), method="heterofl")
    with pytest.raises(ConfigError, match=r"plan\.path is implicit, but this model trains differently or not at all"):
        run(Task(lambda: nn.Sequential(nn.Linear(2, 2)), [({"input": torch.ones(4, 2)}, [0, 1, 0, 1])] * 2), "implicit")
    with pytest.raises(ConfigError, match="augment is for images, but the samples are several tensors"):
        Clients(Inputs((torch.ones(1, 1, 8, 8),)), torch.zeros(1), torch.zeros(1), torch.ones(1), (print,))
