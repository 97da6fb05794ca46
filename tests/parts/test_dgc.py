import pytest
import torch

from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError
from sparing.core.parcel import Leaf, Parcel
from sparing.core.registry import find_recipe
from sparing.core.tree import Layout
from sparing.parts.code import dgc, sparsifiers
from support import make_ctx, view_of

LAYOUT = Layout({"w": (6,), "v": (2,)}, {"w": torch.float32, "v": torch.float32})
NAMES = ["w", "v"]


def made(ratio=1 / 3, **options):
    return dgc.dgc_codec(LAYOUT, NAMES, lambda t: sparsifiers.topk_codec(LAYOUT, ratio), **options)


def step(codec, state, w, t=1, scope=None, ids=(0,)):
    value = torch.tensor([w]) if scope is None else torch.tensor([w]) * scope
    parcel = Parcel({"w": Leaf(value, scope=scope), "v": Leaf(torch.zeros(1, 2))}, {})
    ctx = make_ctx([0], t=t)._replace(cohort=len(ids))
    return codec.encode(parcel, state, view_of(ctx))


def test_momentum_goes_on_until_an_entry_is_sent_and_starts_anew_then():
    codec = made(ratio=1 / 6, momentum=0.5)
    out, state = step(codec, codec.init(LAYOUT), [4.0, 2.0, 0, 0, 0, 0])
    assert out.leaves["w"].value.tolist() == [[4.0, 0, 0, 0, 0, 0]]
    assert state["velocity/w"].tolist() == [[0.0, 2, 0, 0, 0, 0]]
    out, state = step(codec, state, [1.0, 1.0, 0, 0, 0, 0], t=2)
    assert out.leaves["w"].value.tolist() == [[0, 4.0, 0, 0, 0, 0]], "2 unsent, and 0.5 * 2 + 1 more"
    assert state["unsent/w"].tolist() == [[1.0, 0, 0, 0, 0, 0]]
    assert state["velocity/w"].tolist() == [[1.0, 0, 0, 0, 0, 0]]


def test_outside_the_shared_part_both_memories_wait():
    codec = made(ratio=0.5, momentum=0.5)
    _, state = step(codec, codec.init(LAYOUT), [3.0, 2.0, 1.0, 0, 0, 0.5])
    scope = torch.tensor([[True, True, True, False, False, False]])
    out, after = step(codec, state, [1.0] * 6, t=2, scope=scope)
    assert not out.leaves["w"].value[~scope].any()
    for name in ("velocity/w", "unsent/w"):
        assert torch.equal(after[name][~scope], state[name][~scope])


def test_the_norm_over_all_tensors_is_clipped_by_the_size_of_the_cohort():
    codec = made(ratio=1.0, clip=1.0)
    parcel = Parcel({"w": Leaf(torch.tensor([[3.0, 0, 0, 0, 0, 0]])), "v": Leaf(torch.tensor([[0.0, 4.0]]))}, {})
    view = view_of(make_ctx([0])._replace(cohort=4))
    out, _ = codec.encode(parcel, codec.init(LAYOUT), view)
    assert out.leaves["w"].value[0, 0] == pytest.approx(0.3)
    assert out.leaves["v"].value[0, 1] == pytest.approx(0.4)
    small = Parcel({name: leaf._replace(value=leaf.value * 0.01) for name, leaf in parcel.leaves.items()}, {})
    out, _ = codec.encode(small, codec.init(LAYOUT), view)
    assert torch.equal(out.leaves["v"].value, small.leaves["v"].value)


def test_the_share_falls_by_equal_factors_while_warming_up():
    shares = [dgc.ratio_ramp(0.001, 4)(t) for t in range(1, 8)]
    published = [0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001, 0.001]
    assert shares == pytest.approx(published, rel=0.02)
    assert dgc.ratio_ramp(0.1, 0)(1) == 0.1


def test_a_lost_parcel_waits_again():
    codec = made(ratio=1 / 6)
    out, state = step(codec, codec.init(LAYOUT), [4.0, 2.0, 0, 0, 0, 0])
    assert codec.lost(out, state, make_ctx([0]))["unsent/w"].tolist() == [[4.0, 2.0, 0, 0, 0, 0]]


def test_what_makes_no_sense_is_refused():
    with pytest.raises(MethodError, match="'dgc' keeps its own memory"):
        compose(LAYOUT, find_recipe("dgc").make(), find_recipe("memory").make())
    for options in ({"ratio": 0.0}, {"momentum": 1.5}, {"clip": 0.0}, {"warmup": -1}):
        with pytest.raises(ConfigError, match=f"dgc.{next(iter(options))} is"):
            compose(LAYOUT, find_recipe("dgc").make(**options))
