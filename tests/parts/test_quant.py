import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparing.accel import reduce_bodies
from sparing.core.codec import chain
from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError
from sparing.core.parcel import Leaf, Parcel
from sparing.core.registry import find_recipe
from sparing.core.tree import Layout
from sparing.parts.code import quantisers, sparsifiers
from sparing.wire import parcel_sizes
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
    leaf, back = through(torch.tensor([x], dtype=torch.float32), quantisers.uniform_codec(layout(len(x)), bits))
    a = np.array(x, dtype=np.float32)
    scale = np.abs(a).max() * np.float32(1 / top)
    codes = np.round(a / scale) if scale > 0 else np.zeros_like(a)
    np.testing.assert_array_equal(leaf.value[0].numpy(), np.clip(codes, -top, top))
    assert np.abs(back[0].numpy() - a).max() <= scale / 2 * (1 + 1e-4) + 1e-44  # below normal numbers steps vanish


@pytest.mark.slow
def test_stochastic_rounding_is_unbiased():
    x = torch.linspace(-1, 1, 41)[None]
    codec = quantisers.uniform_codec(layout(41), 3, stochastic=True)
    rounds = 3000
    mean = sum(through(x, codec, t)[1][0] for t in range(rounds)) / rounds
    assert ((mean - x[0]).abs() < 5 * (1 / 3) * 0.5 / math.sqrt(rounds)).all()


@pytest.mark.parametrize("scope", [False, True])
def test_looking_only_at_what_is_sent_changes_nothing(scope, monkeypatch):
    """Long rows of which little is sent are read there alone; one client sends nothing, one a single value."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(4, 20, 40, generator=rng)
    keep = torch.rand(4, 20, 40, generator=rng) < 0.05
    keep[1], keep[2] = False, False
    keep[2, 7, 9] = True
    inside = torch.rand(1, 20, 40, generator=rng) < 0.9
    keep = keep & inside if scope else keep
    parcel = Parcel({"w": Leaf(torch.where(keep, x, 0.0), inside if scope else None, (keep,))}, {})
    view, shape = view_of(make_ctx([0, 1, 2, 3])), Layout({"w": (20, 40)}, {"w": torch.float32})
    for codec in (
        quantisers.uniform_codec(shape, 8),
        quantisers.uniform_codec(shape, 4, stochastic=True),
        quantisers.qsgd_codec(shape, 5, bucket=70),
    ):
        results = []
        for long in (1 << 30, 100):
            monkeypatch.setattr(reduce_bodies, "LONG", long)
            out, _ = codec.encode(parcel, {}, view)
            results.append((out.leaves["w"], codec.decode(out, view.ctx).leaves["w"].value))
        (one, back), (other, again) = results
        assert torch.equal(one.value, other.value)
        assert torch.equal(one.scale, other.scale)
        assert torch.equal(back, again)
        assert one.value.any()


def test_zeros_stay_zero_and_an_all_zero_tensor_has_scale_zero():
    for stochastic in (False, True):
        leaf, back = through(torch.zeros(1, 5), quantisers.uniform_codec(layout(5), 8, stochastic))
        assert leaf.scale.tolist() == [[0.0]]
        assert back.tolist() == [[0.0] * 5]


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)])
def test_half_floats_round_to_nearest_and_never_overflow(dtype, relative):
    x = torch.tensor([[1.0, -3.14159, 1e38, -1e38, 0.0]])
    leaf, back = through(x, quantisers.half_codec(layout(5), dtype))
    assert leaf.value.dtype == dtype
    assert torch.isfinite(back).all()
    assert ((back - x)[0, :2].abs() <= relative * x[0, :2].abs()).all()


def test_bits_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="bits is 9"):
        quantisers.uniform_codec(layout(1), 9)


def many(x, codec, draws=4000):
    """Decoded values of one vector, drawn anew for every one of so many clients: `[draws, d]`."""
    ctx = make_ctx(list(range(draws)), n=[1] * draws, clients=draws)
    parcel = Parcel({"w": Leaf(x.expand(draws, -1))}, {})
    out, _ = codec.encode(parcel, {}, view_of(ctx))
    return codec.decode(out, ctx).leaves["w"].value.double()


SPIKE = torch.tensor([[5.0, *[0.05] * 30, -1.0, 0.0]])


@pytest.mark.parametrize("x", [torch.linspace(-1, 1, 40)[None], SPIKE], ids=["even", "spike"])
@pytest.mark.parametrize("levels", [1, 4, 127])
def test_qsgd_is_unbiased_and_within_the_bound_on_its_variance(x, levels):
    d = x.shape[1]
    got = many(x, quantisers.qsgd_codec(layout(d), levels))
    deviation = got.std(0).clamp(min=1e-7)
    assert ((got.mean(0) - x[0]).abs() < 5 * deviation / math.sqrt(len(got)) + 1e-6).all()
    size = x.double().square().sum()
    bound = min(d / levels**2, math.sqrt(d) / levels) * size
    assert 0 < float((got - x).square().sum(1).mean()) <= bound
    codes = got * levels / size.sqrt()
    assert torch.allclose(codes, codes.round(), atol=1e-3), "levels are those of the norm"


@pytest.mark.parametrize("x", [torch.linspace(-1, 1, 40)[None], SPIKE], ids=["even", "spike"])
def test_ternary_is_unbiased_with_the_variance_of_its_formula(x):
    got = many(x, quantisers.ternary_codec(layout(x.shape[1])))
    peak = x.abs().max()
    assert set((got / peak).round(decimals=5).unique().tolist()) <= {-1.0, 0.0, 1.0}
    assert ((got.mean(0) - x[0]).abs() < 5 * got.std(0) / math.sqrt(len(got)) + 1e-6).all()
    variance = (peak * x.abs() - x.square()).sum()
    assert float((got - x).square().sum(1).mean()) == pytest.approx(float(variance), rel=0.1)


@given(st.lists(st.floats(-1e3, 1e3, width=32).filter(lambda v: v == 0 or abs(v) > 1e-3), min_size=1, max_size=40))
def test_sign_contracts_by_exactly_what_the_paper_says(x):
    a = np.array(x)
    leaf, back = through(torch.tensor([x], dtype=torch.float32), quantisers.sign_codec(layout(len(x))))
    assert leaf.bits == 1
    assert set(leaf.value.unique().tolist()) <= {-1, 1}
    error, size = float(((back[0].double().numpy() - a) ** 2).sum()), float((a**2).sum())
    share = np.abs(a).sum() ** 2 / (len(a) * size) if size else 1.0
    assert error == pytest.approx((1 - share) * size, rel=1e-4, abs=1e-5 * max(size, 1e-3))
    assert ((back[0].numpy() < 0) == (a < 0))[a != 0].all()


def test_a_zero_takes_either_sign_so_that_it_stays_zero_on_average():
    x = torch.tensor([[3.0, 0.0, 0.0, -1.0]])
    got = many(x, quantisers.sign_codec(layout(4)), draws=2000)
    assert (got[:, [0, 3]] == torch.tensor([1.0, -1.0])).all()
    assert (got.mean(0)[1:3].abs() < 5 / math.sqrt(2000)).all()


def test_sign_behind_topk_is_stc_and_scales_by_what_is_sent():
    x = torch.tensor([[4.0, -2.0, 1.0, 0.0, 0.5, 0.0]])
    leaf, back = through(x, chain(sparsifiers.topk_codec(layout(6), 1 / 3), quantisers.sign_codec(layout(6))))
    assert back.tolist() == [[3.0, -3.0, 0, 0, 0, 0]]
    assert leaf.value.tolist() == [[1, -1, 0, 0, 0, 0]]
    _, back = through(
        torch.zeros(1, 6), chain(sparsifiers.topk_codec(layout(6), 1 / 3), quantisers.sign_codec(layout(6)))
    )
    assert back.tolist() == [[0.0] * 6]


@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        (quantisers.uniform_codec(layout(1000), 4), 4),
        (quantisers.qsgd_codec(layout(1000), 127), 8),
        (quantisers.qsgd_codec(layout(1000), 7), 4),
        (quantisers.qsgd_codec(layout(1000), 8), 5),
        (quantisers.qsgd_codec(layout(1000), 1), 2),
        (quantisers.ternary_codec(layout(1000)), 2),
        (quantisers.sign_codec(layout(1000)), 1),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_bits_on_the_wire(codec, bits):
    out, _ = codec.encode(Parcel({"w": Leaf(torch.randn(1, 1000))}, {}), {}, view_of(make_ctx([0])))
    assert int(parcel_sizes(out)["value"][0]) == 125 * bits
    assert int(parcel_sizes(out)["scale"][0]) == 4


@pytest.mark.parametrize(
    "make",
    [
        quantisers.qsgd_codec,
        quantisers.ternary_codec,
        quantisers.sign_codec,
        lambda x, *_: quantisers.uniform_codec(x, 4),
    ],
)
def test_what_is_not_a_number_is_not_hidden(make):
    codec = make(layout(5), 4) if make is quantisers.qsgd_codec else make(layout(5))
    with np.errstate(all="ignore"):
        _, back = through(torch.tensor([[1.0, float("nan"), 0.0, 2.0, -1.0]]), codec)
    assert back.isnan().any()


@pytest.mark.parametrize("options", [{"levels": 0}, {"levels": 128}, {"bucket": 0}])
def test_bad_options_of_qsgd_are_refused(options):
    with pytest.raises(ConfigError, match=f"qsgd.{next(iter(options))} is"):
        quantisers.qsgd_codec(layout(1), **({"levels": 3} | options))


def test_memory_is_refused_where_the_error_may_be_larger_than_the_update():
    memory = find_recipe("memory").make()
    large = layout(20_000)
    with pytest.raises(MethodError, match="'qsgd' can be larger"):
        compose(large, find_recipe("qsgd").make(levels=127), memory)
    with pytest.raises(MethodError, match="'ternary' can be larger"):
        compose(large, find_recipe("ternary").make(), memory)
    compose(large, find_recipe("qsgd").make(levels=127, bucket=1000), memory)
    compose(large, find_recipe("sign").make(), memory)
