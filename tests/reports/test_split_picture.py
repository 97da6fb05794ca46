"""Pictures: they are drawn for any number of clients, nothing is cut off, and they say what was measured."""

import hashlib

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from sparing.data.dataset import Dataset
from sparing.reports.split_picture import _shown_clients, _split_caption, _split_figure, draw_split
from sparing.split import partition_dataset, split_report


def told(clients, law="iid", classes=10, n=12_000, named=False, **more):
    domain = torch.arange(n) % clients
    names = {
        "class": [f"a long name {k}" for k in range(classes)],
        "domain": [f"somewhere far away {k}" for k in range(clients)],
    }
    data = Dataset(
        "toy", torch.zeros(n, 1), torch.arange(n) * 7919 % 10007 % classes, classes, None, {"domain": domain}
    )
    data.names.update(names if named else {})
    return split_report(partition_dataset(data, law, clients, seed=0, **more), data)


CASES = {
    "one": (1, {}),
    "four by name": (4, {"law": "domain", "named": True}),
    "twenty by name": (20, {"law": "domain", "named": True, "classes": 100}),
    "twenty": (20, {"law": {"dirichlet": 0.1}, "validation": 0.1, "held_out": 3}),
    "fifty": (50, {"law": {"quantity": 1.0}}),
    "many": (539, {"held_out": 0.1}),
    "very many": (6000, {}),
    "one class": (3, {"classes": 1}),
    "a long law": (6, {"law": {"label-quantity": {"alpha": 0.123456, "a": 1.23456, "least": 1000}}}),
}


def texts(fig: Figure):
    return [text for text in fig.findobj(Text) if isinstance(text, Text) and text.get_text() and text.get_visible()]


@pytest.mark.parametrize("case", CASES)
def test_nothing_sticks_out_and_the_caption_is_there(case):
    clients, more = CASES[case]
    drawn = told(clients, **more)
    fig = _split_figure(drawn)
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    inside = np.zeros(pixels.shape[:2], bool)
    inside[3:-3, 3:-3] = True
    assert (pixels[~inside] == 255).all()
    assert (pixels[inside] < 255).mean() > 0.05
    words = " ".join(" ".join(text.get_text() for text in texts(fig)).split())
    assert _split_caption(drawn) in words
    assert "toy, split by" in words
    assert ("held out" in words) == bool(len(drawn.held_out))
    assert ("validation" in words) == bool(drawn.validation.any())


def test_the_png_is_the_same_twice(tmp_path):
    drawn = told(20, {"dirichlet": 0.1})
    paths = [draw_split(drawn, tmp_path / "deep" / name) for name in ("a.png", "b.png")]
    first, second = (hashlib.sha256(path.read_bytes()).hexdigest() for path in paths)
    assert first == second
    assert paths[0].read_bytes().startswith(b"\x89PNG")


def test_few_clients_keep_their_order_and_many_are_ranked_by_size():
    assert _shown_clients(told(20, {"dirichlet": 0.1})).tolist() == list(range(20))
    many = told(100, {"dirichlet": 0.1})
    assert (np.diff(many.sizes[_shown_clients(many)]) <= 0).all()
    very_many = told(6000)
    assert len(_shown_clients(very_many)) == len(set(_shown_clients(very_many))) == 900


def test_the_caption_is_one_sentence_with_the_numbers():
    text = _split_caption(told(4, {"pathological": 5}))
    assert text.count(".") - sum(part[:1].isdigit() for part in text.split(".")[1:]) == 1
    assert text.startswith("4 clients hold 12,000 samples")
    assert "with 5 of 10 labels" in text
