"""Hugging Face datasets, with a small stand-in for the library."""

import sys
import types

import numpy as np
import pytest
import torch
from formats import random_images
from PIL import Image

from sparing.core.errors import DataError
from sparing.data import load_dataset


class Rows:
    """What sparing uses of a `datasets.Dataset`."""

    def __init__(self, columns, classes=None, version="1"):
        self.columns, self._fingerprint = columns, version
        self.column_names = list(columns)
        self.features = {"label": types.SimpleNamespace(names=classes)} if classes else {}

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name):
        return self.columns[name]


@pytest.fixture
def hub(monkeypatch):
    """A hub that holds what the test puts there."""
    held = {}
    library = types.ModuleType("datasets")
    library.load_dataset = lambda name, config=None: held[name]
    monkeypatch.setitem(sys.modules, "datasets", library)
    return held


def pictures(n, size=(6, 5)):
    return [Image.fromarray(x) for x in random_images(n, (size[1], size[0], 3))]


def test_pictures_with_groups(hub):
    train = {"image": pictures(3), "label": [0, 1, 0], "who": ["b", "a", "b"]}
    test = {"image": pictures(1), "label": [1], "who": ["c"]}
    hub["me/pets"] = {"train": Rows(train, ["cat", "dog"]), "test": Rows(test), "unsupervised": Rows(test)}
    data = load_dataset("hf:me/pets", groups=["who"])
    assert (data.x.shape, data.x.dtype) == ((4, 3, 5, 6), torch.uint8)
    assert np.array_equal(data.x[0].permute(1, 2, 0).numpy(), np.asarray(train["image"][0]))
    assert (data.y.tolist(), data.names["class"]) == ([0, 1, 0, 1], ["cat", "dog"])
    assert data.official.tolist() == [False, False, False, True]
    assert (data.groups["who"].tolist(), data.names["who"]) == ([1, 0, 1, 2], ["a", "b", "c"])
    assert load_dataset("hf:me/pets", groups="who", side=4, gray=True).x.shape == (4, 1, 4, 4)


def test_numbers_and_a_new_version(hub):
    hub["me/rows"] = Rows({"features": [[1.0, 2.0], [3.0, 4.0]], "target": [0, 2]})
    data = load_dataset("hf:me/rows")
    assert (data.x.tolist(), data.y.tolist(), data.classes, data.official) == ([[1, 2], [3, 4]], [0, 2], 3, None)
    hub["me/rows"] = Rows({"features": [[9.0, 9.0]], "target": [0]}, version="2")
    assert load_dataset("hf:me/rows").x.tolist() == [[9, 9]]


def test_bad_input(hub, monkeypatch):
    hub["me/mixed"] = Rows({"image": pictures(1) + pictures(1, (9, 9)), "label": [0, 1]})
    with pytest.raises(DataError, match=r"mixed shapes, \(3, 5, 6\) and \(3, 9, 9\): give side= for pictures"):
        load_dataset("hf:me/mixed")
    with pytest.raises(DataError, match=r"hf:me/mixed has no column 'labl'; did you mean 'label'?"):
        load_dataset("hf:me/mixed", y="labl")
    hub["me/odd"] = Rows({"text": ["a"], "label": [0]})
    with pytest.raises(DataError, match=r"hf:me/odd has none of the columns image, .*: name one of text, label as x="):
        load_dataset("hf:me/odd")
    with pytest.raises(DataError, match=r"hf:me/gone cannot be loaded \('me/gone'\): check the name"):
        load_dataset("hf:me/gone")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"hf:me/odd needs the library `datasets`: pip install 'sparing\[hf\]'"):
        load_dataset("hf:me/odd")
