"""Arrays as people bring them: taken, or refused in one sentence that names the client, what was seen, and the fix."""

import numpy as np
import pytest
import torch
from torch import nn

from sparing.core.errors import ConfigError, DataError
from sparing.data.arrays import to_tensor
from sparing.data.clients import Clients
from sparing.tasks.task import Task

X, Y = torch.rand(4, 3), torch.tensor([0, 1, 0, 1])


class Sparse:
    """As scipy's are."""

    def toarray(self):
        return X.numpy()


ODD = {
    "x holds 'a' (str), which torch has no number for": np.array([[1, "a", None]] * 4, dtype=object),
    "x holds 'cat' (str)": [["cat"] * 3] * 4,
    "x holds None (NoneType)": None,
    "x and y must have a sample axis, seen a single number": {"a": 1},
    "x holds 1180591620717411303424 (int)": [[2**70] * 3] * 4,
    "x holds datetime.date(2020, 1, 1) (date)": np.array([["2020-01-01"] * 3] * 4, dtype="datetime64[D]"),
    "x is no array of equally long rows": [[1.0, 2.0], [1.0]],
    "x is no array of equally long rows (stack expects each tensor to be equal size": [torch.ones(2), torch.ones(3)],
    "x is sparse (sparse_coo): give it dense, as its to_dense() does": X.to_sparse(),
    "x is sparse (Sparse): give it dense, as its toarray() does": Sparse(),
    "x is on the meta device, where there are no values": X.to("meta"),
    "x is of type complex64, and complex numbers are not trained on": X.to(torch.complex64),
    "x is of type complex128, and complex numbers": X.numpy().astype(complex),
    "x is of type float8_e4m3fn: give it as float32": X.to(torch.float8_e4m3fn),
    "x is a masked array, and masked values are no numbers": np.ma.masked_array(X.numpy(), X.numpy() > -1),
    "x holds whole numbers from 2^63 on": np.full((4, 3), 2**63, np.uint64),
}


@pytest.mark.parametrize("sentence", ODD)
@pytest.mark.parametrize("which", ["train", "test", "test_all", "validation", "probe"])
def test_arrays_without_numbers_are_refused_in_words(sentence, which):
    values = ODD[sentence]
    sets = {"train": [(X, Y)] * 2, "test": [(X, Y)] * 2}
    alone = which in ("test_all", "probe")
    sets[which] = (values, Y) if alone else [(X, Y), (values, Y)]
    with pytest.raises(DataError) as caught:
        Task(nn.Linear(3, 2), **sets)
    where = f"{which}: {sentence}" if alone else f"{which}: client 1: {sentence}"
    assert str(caught.value).startswith(where)
    assert "\n" not in str(caught.value)


def test_a_number_is_no_list_of_clients():
    with pytest.raises(DataError, match="train: the clients are of type int: give a list with one"):
        Task(nn.Linear(3, 2), train=5)


@pytest.mark.parametrize(
    "values",
    [
        X.numpy().astype(np.longdouble),
        X.numpy().astype(">f4"),
        [x.clone().requires_grad_() for x in X],
        list(X.numpy()),
        np.ma.masked_array(X.numpy(), False),
        X.numpy().tolist(),
    ],
    ids=["long double", "big-endian", "tensors that ask for gradients", "arrays", "nothing masked", "lists"],
)
def test_numbers_of_every_make_come_to_the_same(values):
    x = to_tensor(values)
    assert x.dtype == torch.float32
    assert torch.equal(x, X)
    assert not x.requires_grad


@pytest.mark.parametrize("kind", ["bool", "int8", "uint16", ">i4", "uint64"])
def test_whole_numbers_become_int64(kind):
    assert torch.equal(to_tensor(np.array([0, 1, 1]).astype(kind)), torch.tensor([0, 1, 1]))


PIXELS = (X * 255).to(torch.uint8)


@pytest.mark.parametrize("which", ["test", "test_all", "validation", "probe"])
@pytest.mark.parametrize("other", [PIXELS.float(), PIXELS.long(), (X - 0.5) / 0.3], ids=["0..255", "int64", "standard"])
def test_bytes_beside_numbers_on_another_scale_are_refused(which, other):
    """Bytes become floats in [0, 1]; other numbers stay as they are."""
    for one, two in ((PIXELS, other), (other, PIXELS)):
        sets = {"train": [(one, Y)] * 2, "test": [(one, Y)] * 2}
        sets[which] = (two, Y) if which in ("test_all", "probe") else [(two, Y)] * 2
        with pytest.raises(DataError, match=r"x is uint8, which is scaled to \[0, 1\], but .* give both as uint8"):
            Task(nn.Linear(3, 2), **sets)


def test_bytes_beside_their_floats_are_taken():
    task = Task(nn.Linear(3, 2), train=[(PIXELS, Y)] * 2, test=(PIXELS.float() / 255, Y))
    assert task.test_all is not None


BAD = X.clone()
BAD[2, 1] = torch.inf


@pytest.mark.parametrize("which", ["test_all", "validation", "probe", "test"])
def test_every_set_is_looked_through(which):
    alone = which in ("test_all", "probe")
    for x, y, words in (
        (BAD, Y, "x is not finite (inf) at "),
        (X, Y - 1, "the label is negative (-1) at "),
    ):
        sets = {"test": [(X, Y)] * 2, which: (x, y) if alone else [(x, y)] * 2}
        with pytest.raises(DataError) as caught:
            Task(nn.Linear(3, 2), train=[(X, Y)] * 2, **sets)
        assert str(caught.value).startswith(f"{which}: {words}{'sample' if alone else 'client 0, sample'}")


@pytest.mark.parametrize("which", ["test", "test_all", "probe"])
def test_one_set_without_samples_is_refused(which):
    with pytest.raises(DataError, match=rf"^{which} has no samples \(0 of them\): leave it out"):
        Task(nn.Linear(3, 2), train=[(X, Y)] * 2, **{which: (X[:0], Y[:0])})


def test_validation_sets_come_as_pairs_too_and_one_per_client():
    task = Task(nn.Linear(3, 2), train=[(X, Y)] * 2, validation=[(X, Y)] * 2)
    assert isinstance(task.validation, Clients)
    with pytest.raises(DataError, match="validation has 1 clients but train has 2: give one validation set per client"):
        Task(nn.Linear(3, 2), train=[(X, Y)] * 2, validation=[(X, Y)])


@pytest.mark.parametrize(
    ("ids", "seen"), [(["a"], "'a', which is no client"), ([0.5], "0.5, which"), ([-1], "client -1")]
)
def test_held_out_clients_have_whole_numbers(ids, seen):
    with pytest.raises(ConfigError, match=f"held_out names {seen}"):
        Task(nn.Linear(3, 2), train=[(X, Y)] * 2, held_out=ids)
