"""Pictures in folders, and Office-Caltech-10."""

import numpy as np
import pytest
from formats import random_images, write_picture

from sparing.core.errors import DataError
from sparing.data import load_dataset


def test_any_pictures(here, tmp_path):
    write_picture(tmp_path / "own" / "photo" / "cat" / "10.png", (8, 6), (1, 2, 3))
    write_picture(tmp_path / "own" / "photo" / "cat" / "9.png", (5, 5), (4, 5, 6))
    write_picture(tmp_path / "own" / "sketch" / "dog" / "a.webp", (9, 3), (7, 8, 9))
    (tmp_path / "own" / "photo" / "notes.txt").write_text("not a picture")
    data = load_dataset(f"folder:{tmp_path / 'own'}", side=4)
    assert data.x.shape == (3, 3, 4, 4)
    assert data.x[:2, :, 0, 0].tolist() == [[4, 5, 6], [1, 2, 3]]
    assert (data.y.tolist(), data.names["class"]) == ([0, 0, 1], ["cat", "dog"])
    assert (data.groups["domain"].tolist(), data.names["domain"]) == ([0, 0, 1], ["photo", "sketch"])
    assert load_dataset(f"folder:{tmp_path / 'own'}", gray=True).x.shape == (3, 1, 32, 32)
    with pytest.raises(DataError, match=r"mixed image shapes: .*10.png is 8x6 but .*9.png is 5x5: give a side"):
        load_dataset(f"folder:{tmp_path / 'own'}", side=None)


def test_a_picture_more_is_seen(here):
    write_picture(here / "own" / "photo" / "cat" / "1.png")
    assert len(load_dataset("folder:own")) == 1
    write_picture(here / "own" / "photo" / "cow" / "2.png")
    assert load_dataset("folder:own").names["class"] == ["cat", "cow"]


def test_bad_pictures(here):
    (here / "own").mkdir()
    with pytest.raises(DataError, match=r"own holds no pictures: put them in folders domain/class/file"):
        load_dataset("folder:own")
    write_picture(here / "own" / "cat" / "1.png")
    with pytest.raises(DataError, match=r"own/cat/1.png is not in a folder domain/class below .*own: move it"):
        load_dataset("folder:own")
    (here / "own" / "cat" / "1.png").unlink()
    write_picture(here / "own" / "photo" / "cat" / "1.png")
    (here / "own" / "photo" / "cat" / "2.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"2.png is not a picture that Pillow can read"):
        load_dataset("folder:own")


def test_office_from_folders(here):
    for i, domain in enumerate(("amazon", "caltech", "dslr", "webcam")):
        write_picture(here / "office_caltech_10" / domain / "mug" / f"{i}.jpg", (10 + i, 8))
    data = load_dataset("office-caltech10", side=16)
    assert data.x.shape == (4, 3, 16, 16)
    assert data.groups["domain"].tolist() == [0, 1, 2, 3]
    assert data.names["domain"] == ["amazon", "caltech", "dslr", "webcam"]


def test_office_from_npz(here):
    x, domains = random_images(4, (32, 32, 3)), np.array(["amazon", "dslr"])
    arrays = {"x": x, "y": np.array([0, 1, 1, 0]), "classes": np.array(["bike", "mug"]), "domains": domains}
    np.savez(here / "office_caltech10_32.npz", domain=np.array([0, 0, 1, 1]), **arrays)
    data = load_dataset("office-caltech10")
    assert np.array_equal(data.x.numpy(), x.transpose(0, 3, 1, 2))
    assert (data.names["class"], data.groups["domain"].tolist()) == (["bike", "mug"], [0, 0, 1, 1])
    assert load_dataset("office-caltech10", side=8).x.shape == (4, 3, 8, 8)
    np.savez(here / "office_caltech10_32.npz", domain=np.array([0, 0, 1, 2]), **arrays)
    with pytest.raises(DataError, match=r"npz has domain 2 but only 2 names"):
        load_dataset("office-caltech10")


def test_a_domain_is_missing(here):
    write_picture(here / "office_caltech_10" / "amazon" / "mug" / "1.jpg")
    with pytest.raises(DataError, match=r"office_caltech_10 lacks caltech, dslr, webcam; fetch it with: curl"):
        load_dataset("office-caltech10")
