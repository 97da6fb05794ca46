import math
from itertools import pairwise

import pytest
import torch

from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError, WireError
from sparing.core.keys import choose
from sparing.core.parcel import Cut, Leaf, Parcel, Schema, spec_of_cut
from sparing.core.registry import find_recipe
from sparing.core.tree import Layout
from sparing.parts.code import eden as rotate
from sparing.wire import from_bytes, parcel_sizes, to_bytes
from support import make_ctx, view_of

ERROR = {1: math.pi / 2 - 1, 2: 0.1331, 3: 0.03578, 4: 0.009592}
"""What the papers state for the unbiased scale: e / (1 - e), e the error of the best levels for a normal variable."""


def layout(*shape):
    return Layout({"w": shape}, {"w": torch.float32})


def many(x, draws, **options):
    """One vector, rotated anew by every one of so many clients."""
    codec = rotate.eden_codec(layout(x.shape[1]), **options)
    ctx = make_ctx(list(range(draws)), n=[1] * draws, clients=draws)
    out, _ = codec.encode(Parcel({"w": Leaf(x.expand(draws, -1))}, {}), {}, view_of(ctx))
    return codec.decode(out, ctx).leaves["w"].value.double()


def vector(kind, d):
    g = torch.Generator().manual_seed(1)
    normal = torch.randn(1, d, generator=g)
    return {"normal": normal, "heavy": normal**5, "spike": torch.eye(d)[:1], "even": torch.linspace(-1, 3, d)[None]}[
        kind
    ]


def test_the_transform_is_hadamards_matrix_and_its_own_inverse():
    eye = torch.eye(16)
    h = rotate.hadamard_rows(eye)
    assert set(h.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(h @ h.T, 16 * eye)
    assert torch.equal(h, h.T)


@pytest.mark.parametrize("bits", rotate.LEVELS)
def test_levels_are_the_means_of_their_cells(bits):
    """Lloyd and Max: a level is the mean of the normal density between the midpoints to its neighbours."""
    levels = rotate.LEVELS[bits]
    cuts = [0.0, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
    for low, high, level in zip(cuts, cuts[1:], levels, strict=False):
        density = (math.exp(-(low**2) / 2) - math.exp(-(high**2) / 2)) / math.sqrt(2 * math.pi)
        mass = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
        assert level == pytest.approx(density / mass, abs=1e-8)


@pytest.mark.parametrize("kind", ["normal", "heavy", "spike", "even"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_it_is_unbiased_with_the_error_the_papers_state(bits, kind):
    x = vector(kind, 1024)
    got = many(x, 600, bits=bits)
    size = float(x.double().square().sum())
    error = float((got - x).square().sum(1).mean()) / size
    assert error == pytest.approx(ERROR[bits], rel=0.06)
    bias = float((got.mean(0) - x[0]).square().sum()) / size
    assert bias < 1.25 * error / 600, "the mean over draws has the error of a mean, not more"


@pytest.mark.parametrize("d", [1, 2, 3, 7, 64, 100])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_along_the_update_itself_the_unbiased_scale_is_exact(bits, d):
    x = vector("normal", d)
    got = many(x, 20, bits=bits)
    assert torch.allclose(got @ x[0].double(), x.double().square().sum().expand(20), rtol=1e-5)


@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_the_least_scale_loses_one_minus_two_over_pi(kind):
    x = vector(kind, 1024)
    size = float(x.double().square().sum())
    errors = [float((many(x, 300, unbiased=u) - x).square().sum(1).mean()) / size for u in (False, True)]
    assert errors[0] == pytest.approx(1 - 2 / math.pi, rel=0.05)
    assert errors[0] < errors[1]


def test_clients_draw_apart_so_that_errors_average_out():
    x = vector("normal", 256)
    got = many(x, 100)
    one, all_ = (got - x).square().sum(1).mean(), (got.mean(0) - x[0]).square().sum()
    assert float(all_ / one) == pytest.approx(1 / 100, rel=0.3)


def test_only_what_is_shared_is_rotated_and_paid_for():
    codec, ctx = rotate.eden_codec(layout(10, 10)), make_ctx([3, 4, 5])
    counts = [64, 30, 0]
    scope = torch.stack([choose(torch.tensor([7]), 100, n).reshape(10, 10) for n in counts])
    value = torch.randn(3, 10, 10, generator=torch.Generator().manual_seed(0)) * scope
    out, _ = codec.encode(Parcel({"w": Leaf(value, scope=scope)}, {}), {}, view_of(ctx))
    assert parcel_sizes(out)["value"].tolist() == [8, 4, 0], "bits of the next power of two"
    back = codec.decode(out, ctx).leaves["w"]
    assert torch.equal(back.scope, scope)
    assert not back.value[~scope].any()
    plain, one = rotate.eden_codec(layout(64)), ctx.at(slice(1))
    dense, _ = plain.encode(Parcel({"w": Leaf(value[0][scope[0]][None])}, {}), {}, view_of(one))
    alone = plain.decode(dense, one).leaves["w"].value
    assert torch.equal(back.value[0][scope[0]], alone[0]), "as if there was nothing else"


def test_a_mask_that_travels_is_understood_and_one_that_cannot_be_is_refused():
    codec, ctx = rotate.eden_codec(layout(3, 5), bits=2), make_ctx([3])
    scope = torch.tensor([[True] * 5, [False] * 5, [True, False] * 2 + [True]])[None]
    value = torch.randn(1, 3, 5) * scope
    out, _ = codec.encode(Parcel({"w": Leaf(value, scope=scope, told=True)}, {}), {}, view_of(ctx))
    schema = codec.schema(Schema({"w": spec_of_cut((3, 5), torch.float32, Cut(scope, told=True))}, {}, "x"), ctx)
    back = codec.decode(from_bytes(to_bytes(out, 0, "x"), schema), ctx).leaves["w"]
    assert torch.equal(back.scope, scope)
    assert torch.equal(back.value, codec.decode(out, ctx).leaves["w"].value)
    odd = out.leaves["w"]._replace(scope=torch.arange(23)[None] < 7)
    with pytest.raises(WireError, match="7 coordinates; it must be a power of two"):
        codec.decode(Parcel({"w": odd}, {}), ctx)


def test_zeros_stay_zero_and_what_is_not_a_number_is_not_hidden():
    assert not many(torch.zeros(1, 12), 3).any()
    assert many(torch.tensor([[1.0, float("nan"), 2.0]]), 2, bits=3).isnan().any()


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match=r"eden.bits is 5"):
        rotate.eden_codec(layout(4), bits=5)
    eden, topk, int8 = (find_recipe(name).make() for name in ("eden", "topk", "int8"))
    for order in ([topk, eden], [int8, eden], [eden, topk], [eden, int8]):
        with pytest.raises(MethodError, match=r"basis|a quantiser before it gives codes"):
            compose(layout(4, 4), *order)
