"""Names, options, and what is said when nothing is there."""

import pytest
import torch

from sparing.core.errors import DataError
from sparing.data import digits_tensors, known_datasets, load_dataset

NAMES = """cifar10 cifar100 digit-domains digits emnist fashion-mnist femnist folder hf mnist mnist-writers npz
office-caltech10 pfllib shakespeare text"""


def test_every_dataset_is_known_and_says_what_it_is():
    assert sorted(known_datasets()) == sorted(NAMES.split())
    assert all(entry.about for entry in known_datasets().values())
    assert known_datasets()["folder"].usage == "folder:PATH"


def test_digits():
    data = load_dataset("digits")
    assert torch.equal(data.x, digits_tensors()[0])
    assert (len(data), data.classes, data.official, data.groups) == (1797, 10, None, {})


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("minst", {}, "no data is called 'minst'; did you mean 'mnist'?"),
        ("flder:x", {}, "no data is called 'flder:x'; did you mean 'folder'?"),
        ("zzz", {}, "no data is called 'zzz'; known: cifar10, cifar100"),
        ("npz", {}, "'npz' does not say what to load: write it as 'npz:PATH'"),
        ("npz:", {}, "write it as 'npz:PATH'"),
        ("mnist:3", {}, "write it as 'mnist'"),
        ("mnist", {"chek": False}, "data 'mnist' has no option 'chek'; did you mean 'check'?"),
        ("digits", {"side": 3}, "data 'digits' has no option 'side'; it takes none"),
        ("npz:a", {"path": "b"}, "data 'npz' has no option 'path'; known: classes"),
        ("npz:nowhere", {}, "npz:nowhere: there is no folder nowhere nor .*data/nowhere: give the path"),
        ("emnist", {"split": "letter"}, "emnist has no split 'letter'; did you mean 'letters'?"),
        ("shakespeare", {"length": 0}, "length is 0; it must be at least 1"),
    ],
)
def test_names_that_cannot_be_meant(name, options, sentence):
    with pytest.raises(DataError, match=sentence):
        load_dataset(name, **options)


OTHERS = ("digits", "folder", "hf", "npz", "pfllib", "text", "fashion-mnist")
FETCHED = [name for name in NAMES.split() if name not in OTHERS]


@pytest.mark.parametrize("name", FETCHED)
def test_a_missing_dataset_says_where_it_was_looked_for_and_how_to_fetch_it(name, here, tmp_path):
    with pytest.raises(DataError) as error:
        load_dataset(name)
    said = str(error.value)
    assert f"is not on this machine: looked below {here} and {tmp_path}/cache/sparing for " in said
    assert "; fetch it with: " in said
    assert "https://" in said.partition("fetch it with: ")[2]
    assert str(here) in said.partition("fetch it with: ")[2]


def test_the_whole_sentence(here, tmp_path, monkeypatch):
    monkeypatch.delenv("SPARING_DATA")
    cache = f"{tmp_path}/cache/sparing"
    with pytest.raises(DataError) as error:
        load_dataset("emnist", split="letters")
    assert str(error.value) == (
        f"emnist is not on this machine: looked below {cache} for emnist-letters-train-images-idx3-ubyte[.gz], "
        "emnist-letters-train-labels-idx1-ubyte[.gz], emnist-letters-test-images-idx3-ubyte[.gz], "
        "emnist-letters-test-labels-idx1-ubyte[.gz] in emnist or emnist/gzip or EMNIST/raw or EMNIST/raw/gzip; "
        f"fetch it with: curl -fL --create-dirs --output-dir {cache}/emnist -O "
        f"https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip && unzip -j {cache}/emnist/gzip.zip -d {cache}/emnist"
    )
