"""Feature shift: exact where it can be, the same for any order, and different for every client."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparing.core.errors import DataError
from sparing.data.dataset import Dataset
from sparing.split import partition_dataset
from sparing.split.styles import _STYLES, Style, _apply_style, _keyed_noise, _rotate, client_styles, samples_in_style


def images(n=6, size=9, dtype=torch.uint8):
    x = torch.from_numpy(np.random.Generator(np.random.PCG64(0)).integers(0, 256, (n, 1, size, size)).astype(np.uint8))
    return x if dtype == torch.uint8 else x.to(dtype) / 255


NUMBERS = torch.arange(6)


def test_quarter_turns_are_exact_and_others_agree_with_them():
    x = images()
    assert torch.equal(_apply_style(x, Style(rotation=90.0), NUMBERS), torch.rot90(x, 1, (2, 3)))
    x = images(dtype=torch.float32)
    assert torch.allclose(_rotate(x, 90.0001), torch.rot90(x, 1, (2, 3)), atol=1e-3)
    wide = torch.rand(2, 1, 4, 8)
    assert _rotate(wide, 90.0).shape == wide.shape
    assert torch.equal(_rotate(wide, 180.0), wide.flip(2, 3))


def test_turning_an_oblong_image_keeps_its_shapes():
    """A bar turned by a quarter is as long as before, whatever the frame."""
    x = torch.zeros(1, 1, 9, 17)
    x[..., 4, 6:11] = 1
    assert torch.allclose(_rotate(x, 90.0)[..., 2:7, 8], torch.ones(5), atol=1e-5)


def test_strokes_grow_and_shrink():
    x = torch.zeros(1, 1, 9, 9, dtype=torch.uint8)
    x[..., 3:6, 3:6] = 255
    assert int((_apply_style(x, Style(stroke=1), NUMBERS[:1]) > 0).sum()) == 25
    assert int((_apply_style(x, Style(stroke=-1), NUMBERS[:1]) > 0).sum()) == 4
    assert int((_apply_style(x, Style(stroke=2), NUMBERS[:1]) > 0).sum()) == 49


def test_inversion_is_its_own_inverse():
    x = images()
    assert torch.equal(_apply_style(x, Style(inverted=True), NUMBERS), 255 - x)


def test_noise_is_standard_and_goes_by_sample_number():
    draws = _keyed_noise(torch.arange(200), 500, key=3)
    assert abs(float(draws.mean())) < 0.02
    assert abs(float(draws.std()) - 1) < 0.02
    assert float((draws.abs() > 1.96).float().mean()) == pytest.approx(0.05, abs=0.01)
    x, loud = images(), Style(noise=0.2, key=3)
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    assert torch.equal(_apply_style(x[order], loud, order), _apply_style(x, loud, NUMBERS)[order])
    assert not torch.equal(_apply_style(x, loud, NUMBERS), _apply_style(x, loud._replace(key=4), NUMBERS))


@given(k=st.integers(0, 19), dtype=st.sampled_from([torch.uint8, torch.float32]))
@settings(max_examples=20, deadline=None)
def test_styles_keep_type_range_and_the_images_they_are_given(k, dtype):
    x = images(dtype=dtype)
    before, style = x.clone(), client_styles(20, seed=0)[k]
    one, two = _apply_style(x, style, NUMBERS), _apply_style(x, style, NUMBERS)
    assert torch.equal(one, two)
    assert torch.equal(x, before)
    assert (one.dtype, one.shape) == (x.dtype, x.shape)
    assert 0 <= float(one.min()) <= float(one.max()) <= (255 if dtype == torch.uint8 else 1)


@pytest.mark.parametrize("kinds", [_STYLES, ["rotation"], ["noise"], ["rotation", "stroke", "inversion"]])
def test_twenty_clients_have_twenty_styles(kinds):
    made = client_styles(20, seed=0, kinds=kinds)
    assert len(set(made)) == len({str(style) for style in made}) == 20
    assert str(made[0]) == "plain"


def test_a_partition_carries_styles_and_lays_them_out():
    x = images(40)
    data = Dataset("toy", x, torch.arange(40) % 2, 2)
    part = partition_dataset(data, {"styles": ["rotation", "inversion"]}, 4, seed=0)
    assert part.names == ["plain", "90°, inverted", "180°", "270°, inverted"]
    out = samples_in_style(x, part.train, part.shifts)
    edge = np.cumsum([0, *map(len, part.train)])
    for k, mine in enumerate(part.train):
        wanted = torch.rot90(x[mine], k, (2, 3))
        assert torch.equal(out[edge[k] : edge[k + 1]], 255 - wanted if k % 2 else wanted)
    assert torch.equal(samples_in_style(x, part.train), x[np.concatenate(part.train)])


def test_shifts_that_cannot_be_meant():
    with pytest.raises(DataError, match=r"styles need images .* seen samples of shape \(3,\)"):
        _apply_style(torch.zeros(2, 3), Style(), NUMBERS[:2])
    with pytest.raises(DataError, match=r"images in \[0, 1\], seen values from -2 to 2"):
        _apply_style(torch.tensor([-2.0, 2.0]).reshape(2, 1, 1, 1), Style(), NUMBERS[:2])
    assert math.isfinite(float(_apply_style(torch.zeros(1, 1, 1, 1), Style(rotation=10.0), NUMBERS[:1]).sum()))
