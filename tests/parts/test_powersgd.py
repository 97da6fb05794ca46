from itertools import pairwise

import pytest
import torch

from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError
from sparing.core.parcel import Leaf, Parcel
from sparing.core.registry import find_recipe
from sparing.core.tree import Layout
from sparing.parts.code import powersgd
from sparing.wire import parcel_sizes
from support import make_ctx, view_of

SHAPES = {"conv": (8, 3, 2, 2), "dense": (9, 20), "bias": (9,), "small": (2, 3)}
LAYOUT = Layout(SHAPES, dict.fromkeys(SHAPES, torch.float32))


def update(k=1, seed=0, **replaced):
    g = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(k, *shape, generator=g) for name, shape in SHAPES.items()} | replaced
    return Parcel({name: Leaf(x) for name, x in values.items()}, {})


def through(parcel, codec, state=None, t=1):
    ctx = make_ctx(list(range(parcel.leaves["bias"].value.shape[0])), t=t)
    out, state = codec.encode(parcel, codec.init(LAYOUT) if state is None else state, view_of(ctx))
    return out, codec.decode(out, ctx), state


def low_rank(m, n, r, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(m, r, generator=g) @ torch.randn(r, n, generator=g))[None]


def test_what_travels_are_two_thin_factors_and_vectors_as_they_are():
    parcel = update(2)
    out, back, _ = through(parcel, powersgd.powersgd_codec(LAYOUT, 2))
    assert list(out.leaves) == ["conv/p", "conv/q", "dense/p", "dense/q", "bias", "small"]
    assert int(parcel_sizes(out)["value"][0]) == 4 * (2 * (8 + 12) + 2 * (9 + 20) + 9 + 6)
    for name in ("bias", "small"):
        assert torch.equal(back.leaves[name].value, parcel.leaves[name].value)
    assert list(back.leaves) == list(SHAPES)
    p = out.leaves["dense/p"].value
    assert torch.allclose(p.mT @ p, torch.eye(2).expand(2, 2, 2), atol=1e-6), "P is orthonormal"


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_matrix_of_that_rank_comes_back_as_it_was(rank):
    dense = low_rank(9, 20, rank)
    _, back, _ = through(update(dense=dense), powersgd.powersgd_codec(LAYOUT, rank))
    assert torch.allclose(back.leaves["dense"].value, dense, atol=1e-5)


def test_a_matrix_of_lower_rank_too_and_the_idle_column_wakes_up():
    codec = powersgd.powersgd_codec(LAYOUT, 3)
    thin = torch.arange(1.0, 10)[None, :, None] * torch.arange(-10.0, 10)[None, None]  # exact, so its rank is 1
    out, back, state = through(update(dense=thin), codec)
    assert torch.allclose(back.leaves["dense"].value, thin, atol=1e-4)
    assert not out.leaves["dense/q"].value[0, :, 1:].any()
    full = low_rank(9, 20, 3, seed=4)
    _, back, _ = through(update(dense=full), codec, state, t=2)
    assert torch.allclose(back.leaves["dense"].value, full, atol=1e-5)


def test_it_never_loses_more_than_there_is_and_warm_starts_find_the_best_factors():
    codec = powersgd.powersgd_codec(LAYOUT, 2)
    parcel = update(seed=5)
    m = parcel.leaves["dense"].value[0].double()
    least = torch.linalg.svdvals(m)[2:].square().sum()
    state, errors = None, []
    for t in range(60):
        _, back, state = through(parcel, codec, state, t)
        errors.append(float((back.leaves["dense"].value[0] - m).square().sum()))
    assert errors[0] < float(m.square().sum())
    assert all(b <= a * (1 + 1e-6) for a, b in pairwise(errors))
    assert errors[-1] == pytest.approx(float(least), rel=1e-3)
    assert errors[0] > 1.05 * float(least), "one step alone does not"


def test_zeros_stay_zero_and_what_is_not_a_number_is_not_hidden():
    codec = powersgd.powersgd_codec(LAYOUT, 2)
    _, back, _ = through(update(dense=torch.zeros(1, 9, 20)), codec)
    assert not back.leaves["dense"].value.any()
    bad = torch.ones(1, 9, 20)
    bad[0, 3, 4] = float("nan")
    _, back, _ = through(update(dense=bad), codec)
    assert back.leaves["dense"].value.isnan().any()


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match=r"powersgd.rank is 0"):
        powersgd.powersgd_codec(LAYOUT, 0)
    with pytest.raises(MethodError, match="powersgd would factor nothing"):
        powersgd.powersgd_codec(LAYOUT, 50)
    codec = powersgd.powersgd_codec(LAYOUT, 2)
    parcel = update()
    masked = parcel.leaves["dense"]._replace(scope=torch.ones(1, 9, 20, dtype=torch.bool))
    with pytest.raises(MethodError, match=r"only a part of 'dense' is shared; drop .*psfed"):
        through(Parcel(parcel.leaves | {"dense": masked}, {}), codec)
    for after in ("topk", "int8", "fp16"):
        with pytest.raises(MethodError, match="another basis"):
            compose(LAYOUT, find_recipe("powersgd").make(), find_recipe(after).make())


def test_memory_is_on_by_default_and_private_layers_are_not_remembered():
    method = compose(LAYOUT, find_recipe("personal").make(layers=["dense"]), find_recipe("powersgd").make())
    assert method.memory
    assert set(method.up[0].init(LAYOUT)) == {"q/conv"}
    assert not compose(LAYOUT, find_recipe("powersgd").make(memory=False)).memory
