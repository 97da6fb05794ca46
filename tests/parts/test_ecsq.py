import pytest
import torch

import sparing
from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError
from sparing.core.parcel import Leaf, Parcel
from sparing.core.registry import find_recipe
from sparing.core.tree import Layout
from sparing.parts.code.ecsq import ecsq_codec
from sparing.wire import nbytes
from support import make_ctx, view_of

SHAPES = {"w": (30, 20), "bias": (20,), "steps": ()}
LAYOUT = Layout(SHAPES, {"w": torch.float32, "bias": torch.float32, "steps": torch.int64}, frozenset({"steps"}))


def update(k=1, seed=0, **changed):
    g = torch.Generator().manual_seed(seed)
    values = {"w": torch.randn(k, 30, 20, generator=g) ** 3, "bias": 0.1 * torch.randn(k, 20, generator=g)}
    values |= {"steps": torch.full((k,), 7)} | changed
    return Parcel({name: Leaf(x) for name, x in values.items()}, {})


def through(parcel, **options):
    codec, ctx = ecsq_codec(LAYOUT, **options), make_ctx(list(range(parcel.leaves["w"].value.shape[0])))
    out, _ = codec.encode(parcel, {}, view_of(ctx))
    return out, codec.decode(out, ctx)


def rms(*values):
    x = torch.cat([v.double().flatten() for v in values])
    return float(x.square().mean().sqrt())


def test_one_step_serves_the_whole_model_vectors_too_and_buffers_pass():
    parcel = update()
    out, back = through(parcel, step=0.5)
    step = 0.5 * rms(parcel.leaves["w"].value, parcel.leaves["bias"].value)
    for name in ("w", "bias"):
        leaf, x = out.leaves[name], parcel.leaves[name].value
        assert leaf.tight
        assert leaf.value.dtype == torch.int8
        assert float(leaf.scale) == pytest.approx(step, rel=1e-6)
        off = (back.leaves[name].value - x).abs()
        assert float(off.max()) <= 0.65001 * step
        assert bool((off <= x.abs()).all()), "never further off than nothing at all"
        assert not back.leaves[name].tight
    assert out.leaves["steps"] == parcel.leaves["steps"]


def test_or_each_layer_has_its_own():
    parcel = update()
    out, _ = through(parcel, over="layer")
    for name in ("w", "bias"):
        assert float(out.leaves[name].scale) == pytest.approx(rms(parcel.leaves[name].value), rel=1e-6)


def test_longer_steps_take_fewer_bytes_and_the_dead_zone_is_cheap():
    sizes, errors = [], []
    for step in (0.25, 0.5, 1, 2, 4):
        parcel = update()
        out, back = through(parcel, step=step)
        sizes.append(int(nbytes(out)[0]))
        errors.append(float((back.leaves["w"].value - parcel.leaves["w"].value).square().sum()))
    assert sizes == sorted(sizes, reverse=True)
    assert errors == sorted(errors)


def test_the_step_grows_where_127_of_them_would_not_reach():
    far = torch.full((1, 20), 0.01)
    far[0, 3] = -1000.0
    parcel = update(bias=far)
    out, back = through(parcel, step=0.01)
    assert int(out.leaves["bias"].value.abs().max()) == 127
    assert float(back.leaves["bias"].value[0, 3]) == pytest.approx(-1000, rel=1e-6)
    assert float(out.leaves["w"].scale) < float(out.leaves["bias"].scale), "the other tensor keeps the common step"


@pytest.mark.parametrize("step", [2.0, 50.0])
def test_something_is_always_sent(step):
    same = torch.ones(1, 30, 20)
    out, back = through(update(w=same, bias=torch.ones(1, 20)), step=step)
    assert int(out.leaves["w"].value.min()) == 1
    assert float((back.leaves["w"].value - same).abs().max()) < 1


def test_only_what_is_sent_counts_for_the_step():
    parcel = update()
    mask = torch.zeros(1, 30, 20, dtype=torch.bool)
    mask[:, :3] = True
    keep = torch.ones(1, 30, 1, dtype=torch.bool)
    keep[:, 2] = False
    w = parcel.leaves["w"].value * (mask & keep)
    leaves = {"w": Leaf(w, scope=mask, keep=(keep,)), "bias": Leaf(torch.zeros(1, 20), scope=mask[:, 0] & False)}
    out, back = through(Parcel(leaves, {}), step=1.0)
    assert float(out.leaves["w"].scale) == pytest.approx(rms(w[:, :2]), rel=1e-6)
    assert not out.leaves["w"].value[~(mask & keep).expand(1, 30, 20)].any()
    assert out.leaves["w"].keep == back.leaves["w"].keep == (keep,)


def test_zeros_stay_zero_and_what_is_not_a_number_is_not_hidden():
    _, back = through(update(w=torch.zeros(1, 30, 20), bias=torch.zeros(1, 20)))
    assert not back.leaves["w"].value.any()
    bad = torch.zeros(1, 30, 20)
    bad[0, 3, 4] = float("nan")
    assert through(update(w=bad))[1].leaves["w"].value.isnan().any()
    bad[0, 3, 4] = float("inf")
    assert not through(update(w=bad))[1].leaves["w"].value.isfinite().all()


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match=r"ecsq.step is 0; it must be above 0"):
        ecsq_codec(LAYOUT, 0)
    with pytest.raises(ConfigError, match=r"ecsq.over is 'row'; use 'layer' or 'model'"):
        ecsq_codec(LAYOUT, over="row")
    for other in ("int8", "sign"):
        with pytest.raises(MethodError, match=f"'{other}' needs values, and a quantiser before it gives codes"):
            compose(LAYOUT, find_recipe("ecsq").make(), find_recipe(other).make())
    assert compose(LAYOUT, find_recipe("topk").make(), find_recipe("ecsq").make(memory=True)).memory
    assert not compose(LAYOUT, find_recipe("ecsq").make()).memory


@pytest.mark.parametrize("method", [["local", "ecsq"], [{"psfed": {"fraction": 0.0}}, "ecsq"]], ids=str)
def test_nothing_to_send(method):
    runs = [
        sparing.run("digits", method, rounds=2, sample=2, local={"steps": 1}, engine=e) for e in ("vector", "debug")
    ]
    assert runs[0].up_bytes == runs[1].up_bytes
