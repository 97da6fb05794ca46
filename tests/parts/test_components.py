from dataclasses import dataclass

import pytest
import torch

from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError
from sparing.core.parcel import Leaf, Parcel, Schema, Spec, parcel_row
from sparing.core.registry import find_recipe
from sparing.core.tree import Layout
from sparing.parts.code.budget.matrices import as_matrix_shape
from sparing.parts.code.lowrank import components_codec
from sparing.wire import from_bytes, nbytes, to_bytes
from support import FALLING, falling, falling_update, make_ctx, view_of

LAYOUT, SHAPES = FALLING, FALLING.shapes
FLOATS = LAYOUT.params


def update(k=1, seed=0, rate=0.6, **changed):
    return falling_update(k, seed, rate, **changed)._replace(notes={})


@dataclass
class Sent:
    out: Parcel
    back: Parcel
    size: int
    error: float  # of the squared norm


def through(parcel, energy=0.9, **options):
    codec = components_codec(LAYOUT, energy, **options)
    ctx = make_ctx(list(range(parcel.leaves["bias"].value.shape[0])))
    out, _ = codec.encode(parcel, {}, view_of(ctx))
    back = codec.decode(out, ctx)
    lost, whole = (
        sum(float(x.double().square().sum()) for x in tree)
        for tree in (
            [back.leaves[n].value - parcel.leaves[n].value for n in FLOATS],
            [parcel.leaves[n].value for n in FLOATS],
        )
    )
    return Sent(out, back, int(nbytes(out)[0]), lost / whole if whole else lost)


def kept(sent, name):
    return sent.out.leaves[f"{name}/p"].keep[0][:, :, 0]


def test_what_travels_are_codes_of_components_and_all_vectors_in_one_leaf():
    parcel = update(2)
    sent = through(parcel)
    wanted = ["steps", "conv/p", "conv/q", "dense/p", "dense/q", "head/p", "head/q", "\nbias\ntiny"]
    assert list(sent.out.leaves) == wanted
    assert set(sent.back.leaves) == set(SHAPES)
    assert sent.out.leaves["steps"] == sent.back.leaves["steps"] == parcel.leaves["steps"]
    p, q = sent.out.leaves["conv/p"], sent.out.leaves["conv/q"]
    assert p.value.shape == (2, 24, 48)
    assert q.value.shape == (2, 24, 24)
    assert p.value.dtype == q.value.dtype == torch.int8
    assert p.tight
    assert torch.equal(p.keep[0], q.keep[0])
    assert p.value.any(2).equal(kept(sent, "conv")), "what is kept is not empty, what is not is zero"
    for mask in kept(sent, "dense").tolist():
        assert mask == sorted(mask, reverse=True), "the strongest"


@pytest.mark.parametrize("energy", [0.3, 0.6, 0.8, 0.9, 0.95, 0.98])
def test_the_energy_asked_for_arrives_and_not_much_more(energy):
    for seed in range(3):
        sent = through(update(seed=seed, rate=0.8), energy)
        assert energy - 0.04 < 1 - sent.error < energy + 0.12


def test_more_energy_takes_more_bytes():
    sizes = [through(update(rate=0.8), energy).size for energy in (0.3, 0.6, 0.8, 0.9, 0.95, 0.98)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] / 4


def test_a_cap_on_the_rank_holds():
    sent = through(update(rate=0.9), 0.98, rank=3)
    assert sent.out.leaves["dense/p"].value.shape == (1, 3, 60)
    assert kept(sent, "dense").sum() == 3
    assert sent.error > through(update(rate=0.9), 0.98).error


def test_components_of_all_layers_are_ranked_by_what_they_cost():
    """The same strength in a small matrix and in a large one: the small one's is sent first."""
    thin = torch.zeros(1, 10, 60)
    thin[0, 0, 0] = 1.0
    wide = torch.zeros(1, 60, 40)
    wide[0, 0, 0] = 1.0
    zero = {"conv": torch.zeros(1, 16, 8, 3, 3), "bias": torch.zeros(1, 60), "tiny": torch.zeros(1, 2, 3)}
    sent = through(update(head=thin, dense=wide, **zero), energy=0.25)
    assert kept(sent, "head").sum() == 1
    assert kept(sent, "dense").sum() == 0
    sent = through(update(head=thin, dense=wide * 2, **zero), energy=0.4)
    assert kept(sent, "head").sum() == 0
    assert kept(sent, "dense").sum() == 1


def test_strong_components_get_finer_codes():
    sent = through(update(rate=0.5), 0.98)
    largest = sent.out.leaves["dense/p"].value[0].abs().amax(1)
    many = int(kept(sent, "dense").sum())
    assert many >= 3
    assert int(largest[0]) > 4 * int(largest[many - 1])


@pytest.mark.parametrize("energy", [0.2, 0.9, 1.0])
@pytest.mark.parametrize("shape", ["normal", "heavy", "one"])
def test_it_never_loses_more_than_there_is(shape, energy):
    """Of noise too, whose rank is full; so memory cannot run away."""
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        x = {n: torch.randn(1, *SHAPES[n], generator=g) for n in FLOATS}
        if shape == "heavy":
            x = {n: v**5 for n, v in x.items()}
        if shape == "one":
            x = {n: torch.zeros_like(v) for n, v in x.items()}
            x["dense"][0, 3, seed] = 1.0
        sent = through(update(**x), energy)
        assert sent.error < 1
        assert (
            any(kept(sent, n).any() for n in ("conv", "dense", "head")) or sent.out.leaves["\nbias\ntiny"].value.any()
        )


def test_a_tensor_far_larger_than_the_rest_gets_a_longer_step_of_its_own():
    layout = Layout({"w": (200, 300), "v": (60, 50)}, dict.fromkeys("wv", torch.float32))
    spike, other = torch.zeros(1, 200, 300), falling(1, 60, 50, torch.Generator().manual_seed(0), 0.9)
    spike[0, 3, 4] = 100.0
    codec, ctx = components_codec(layout, 1.0), make_ctx([0])
    out, _ = codec.encode(Parcel({"w": Leaf(spike), "v": Leaf(other)}, {}), {}, view_of(ctx))
    assert int(out.leaves["w/p"].value.abs().max()) == 127
    assert float(out.leaves["w/p"].scale) > float(out.leaves["v/p"].scale)
    back = codec.decode(out, ctx).leaves["w"].value
    assert float(back[0, 3, 4]) == pytest.approx(100, rel=1e-3)


def test_zeros_stay_zero_and_what_is_not_a_number_is_not_hidden():
    sent = through(update(**{n: torch.zeros(1, *SHAPES[n]) for n in FLOATS}))
    assert not any(sent.back.leaves[n].value.any() for n in FLOATS)
    for bad in (float("nan"), float("inf")):
        x = torch.ones(2, 60, 40)
        x[0, 3, 4] = bad
        sent = through(update(2, dense=x))
        assert not sent.back.leaves["dense"].value[0].isfinite().all()
        assert sent.back.leaves["dense"].value[1].isfinite().all()


def test_layers_that_stay_at_home_and_rounds_without_matrices():
    codec, ctx = components_codec(LAYOUT, skip=frozenset({"dense", "bias"})), make_ctx([0])
    leaves = {n: leaf for n, leaf in update().leaves.items() if n not in ("dense", "bias")}
    plain = Schema({n: Spec(SHAPES[n], LAYOUT.dtypes[n]) for n in leaves}, {}, "x")
    for some in (leaves, {n: leaves[n] for n in ("tiny", "steps")}, {"steps": leaves["steps"]}):
        out, _ = codec.encode(Parcel(some, {}), {}, view_of(ctx))
        wanted = codec.schema(plain._replace(leaves={n: plain.leaves[n] for n in some}), ctx)
        back = codec.decode(from_bytes(to_bytes(out, 0, "x"), wanted), ctx)
        here = codec.decode(out, ctx)
        assert set(back.leaves) == set(some)
        assert all(torch.equal(leaf.value, here.leaves[n].value) for n, leaf in back.leaves.items())


def test_row_k_has_the_bits_of_that_row_alone_where_the_start_is_drawn():
    codec, parcel, ctx = components_codec(LAYOUT, 0.95, rank=4), update(3, rate=0.9), make_ctx([2, 5, 9])
    out, _ = codec.encode(parcel, {}, view_of(ctx))
    for k in range(3):
        one = slice(k, k + 1)
        alone, _ = codec.encode(parcel_row(parcel, k), {}, view_of(ctx.at(one)))
        assert to_bytes(out, k) == to_bytes(alone, 0)
        for name, leaf in codec.decode(parcel_row(out, k), ctx.at(one)).leaves.items():
            assert torch.equal(leaf.value, codec.decode(out, ctx).leaves[name].value[one])


def test_how_a_tensor_is_seen():
    assert as_matrix_shape((512, 512, 3, 3), 32)[:2] == (1536, 1536)
    assert as_matrix_shape((32, 1, 5, 5), 32)[:2] == (32, 25), "few channels: filters by the rest"
    assert as_matrix_shape((64, 3, 7), 32)[:2] == (64, 21)
    assert as_matrix_shape((64,), 32) is None
    assert as_matrix_shape((3, 5), 32) is None


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match=r"lowrank.rank is 0"):
        components_codec(LAYOUT, rank=0)
    with pytest.raises(ConfigError, match=r"lowrank.energy is 1.5"):
        components_codec(LAYOUT, 1.5)
    with pytest.raises(MethodError, match="lowrank would factor nothing"):
        components_codec(Layout({"w": (9,)}, {"w": torch.float32}))
    parcel = update()
    masked = parcel.leaves["dense"]._replace(scope=torch.ones(1, 60, 40, dtype=torch.bool))
    with pytest.raises(MethodError, match=r"only a part of 'dense' is shared; drop .*psfed"):
        through(Parcel(parcel.leaves | {"dense": masked}, {}))
    for after in ("topk", "ecsq", "fp16"):
        with pytest.raises(MethodError, match="another basis"):
            compose(LAYOUT, find_recipe("lowrank").make(), find_recipe(after).make())
    with pytest.raises(MethodError, match="changes the basis, so positions"):
        compose(LAYOUT, find_recipe("topk").make(), find_recipe("lowrank").make())


def test_memory_is_on_by_default():
    assert compose(LAYOUT, find_recipe("lowrank").make()).memory
    assert not compose(LAYOUT, find_recipe("lowrank").make(memory=False)).memory


def test_odd_names_and_empty_tensors_come_back():
    shapes = {"w": (20, 20), "w/p": (3,), "a|b": (4,), "empty": (0, 4), "one": ()}
    layout = Layout(shapes, dict.fromkeys(shapes, torch.float32))
    codec = components_codec(layout)
    g = torch.Generator().manual_seed(0)
    parcel = Parcel({name: Leaf(torch.randn(2, *shape, generator=g)) for name, shape in shapes.items()}, {})
    view = view_of(make_ctx([0, 1]))
    out, _ = codec.encode(parcel, {}, view)
    back = codec.decode(out, view.ctx).leaves
    assert {name: back[name].value.shape for name in shapes} == {name: (2, *s) for name, s in shapes.items()}
    assert float((back["a|b"].value - parcel.leaves["a|b"].value).norm()) < float(parcel.leaves["a|b"].value.norm())
