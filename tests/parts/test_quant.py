import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparing.core.errors import ConfigError
from sparing.core.parcel import Leaf, Parcel
from sparing.core.tree import Layout
from sparing.parts import quant
from support import make_ctx, view_of


def through(x, codec, t=1):
    view = view_of(make_ctx([0], t=t))
    out, _ = codec.encode(Parcel({"w": Leaf(x)}, {}), {}, view)
    return out.leaves["w"], codec.decode(out, view.ctx).leaves["w"].value


def layout(d):
    return Layout({"w": (d,)}, {"w": torch.float32})


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=50), st.integers(2, 8))
def test_codes_are_the_numpy_ones_and_errors_stay_within_half_a_step(x, bits):
    top = 2 ** (bits - 1) - 1
    leaf, back = through(torch.tensor([x], dtype=torch.float32), quant.uniform(layout(len(x)), bits))
    a = np.array(x, dtype=np.float32)
    scale = np.abs(a).max() * np.float32(1 / top)
    codes = np.round(a / scale) if scale > 0 else np.zeros_like(a)
    np.testing.assert_array_equal(leaf.value[0].numpy(), np.clip(codes, -top, top))
    assert np.abs(back[0].numpy() - a).max() <= scale / 2 * (1 + 1e-4)


def test_stochastic_rounding_is_unbiased():
    x = torch.linspace(-1, 1, 41)[None]
    codec = quant.uniform(layout(41), 3, stochastic=True)
    rounds = 3000
    mean = sum(through(x, codec, t)[1][0] for t in range(rounds)) / rounds
    assert ((mean - x[0]).abs() < 5 * (1 / 3) * 0.5 / math.sqrt(rounds)).all()


def test_zeros_stay_zero_and_an_all_zero_tensor_has_scale_zero():
    for stochastic in (False, True):
        leaf, back = through(torch.zeros(1, 5), quant.uniform(layout(5), 8, stochastic))
        assert leaf.scale.tolist() == [[0.0]]
        assert back.tolist() == [[0.0] * 5]


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)])
def test_half_floats_round_to_nearest_and_never_overflow(dtype, relative):
    x = torch.tensor([[1.0, -3.14159, 1e38, -1e38, 0.0]])
    leaf, back = through(x, quant.half(layout(5), dtype))
    assert leaf.value.dtype == dtype
    assert torch.isfinite(back).all()
    assert ((back - x)[0, :2].abs() <= relative * x[0, :2].abs()).all()


def test_bits_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="bits is 9"):
        quant.uniform(layout(1), 9)
