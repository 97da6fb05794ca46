"""A byte budget: never exceeded, mostly used, spent where it buys most."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sparing
from sparing.core.codec import feedback
from sparing.core.compose import compose
from sparing.core.context import context
from sparing.core.errors import ConfigError, MethodError
from sparing.core.parcel import Leaf, Parcel, Schema, Spec, map_tensors, parcel_row
from sparing.core.registry import find_recipe
from sparing.core.tree import Layout
from sparing.parts.code.budget.byte_budget import Item, _written_parcel, budget_codec
from sparing.parts.code.budget.byte_search import CLOSE, ENOUGH, fitted, reached
from sparing.parts.code.budget.matrices import as_matrix_shape, strongest_components
from sparing.parts.code.budget.rate_distortion import judged, piece
from sparing.wire import from_bytes, nbytes, to_bytes
from support import FALLING, changed, falling, make_ctx, view_of
from support import falling_update as update

LAYOUT, SHAPES = FALLING, FALLING.shapes
FLOATS = LAYOUT.params
WAYS = ("best", "values", "components")


def noise(seed=0, k=1):
    g = torch.Generator().manual_seed(seed)
    return update(k, **{name: torch.randn(k, *SHAPES[name], generator=g) for name in FLOATS})


def through(parcel, most, by="best", layout=LAYOUT):
    """What is sent, its bytes, and the share of the squared norm that is lost."""
    codec, ctx = budget_codec(layout, most, by), make_ctx(list(range(len(parcel.notes["n"]))))
    out, _ = codec.encode(parcel, {}, view_of(ctx))
    back = codec.decode(out, ctx)
    names = [name for name in layout.floats if name in parcel.leaves]
    lost = sum(float((back.leaves[n].value - parcel.leaves[n].value).double().square().sum()) for n in names)
    whole = sum(float(parcel.leaves[n].value.double().square().sum()) for n in names)
    return out, nbytes(out), lost / whole if whole else lost


# ------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize("most", [300, 1200])
def test_a_budget_is_used_but_never_exceeded(most, by):
    for parcel in (update(seed=1), update(seed=2, rate=0.9), noise()):
        size = int(through(parcel, most, by)[1][0])
        assert size <= most
        assert size > 0.9 * most


@pytest.mark.slow
def test_more_bytes_buy_more():
    for by in WAYS:
        errors = [through(update(rate=0.85), most, by)[2] for most in (200, 600, 1800)]
        assert errors == sorted(errors, reverse=True)
        assert errors[0] < 1
        assert errors[-1] < errors[0] / 3


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e6])
@pytest.mark.parametrize("by", ["best", "values"])
@pytest.mark.parametrize("kind", ["falling", "noise", "constant", "few"])
def test_with_bytes_to_spare_nothing_is_clipped(kind, by, scale):
    g = torch.Generator().manual_seed(3)
    few = {
        name: torch.randn(1, *SHAPES[name], generator=g) * (torch.rand(1, *SHAPES[name], generator=g) < 0.05)
        for name in FLOATS
    }
    parcel = {
        "falling": update,
        "noise": noise,
        "constant": lambda: update(**{name: torch.ones(1, *SHAPES[name]) for name in FLOATS}),
        "few": lambda: update(**few),
    }[kind]()
    leaves = {
        name: leaf._replace(value=leaf.value * scale) if name in FLOATS else leaf
        for name, leaf in parcel.leaves.items()
    }
    parcel = parcel._replace(leaves=leaves)
    lost = [through(parcel, most, by)[2] for most in (600, 2500, 20_000, 1e7)]
    assert lost[-1] < 2e-4, "eight bits lose about a hundredth of the norm"
    assert all(after <= 1.2 * before + 1e-9 for before, after in itertools.pairwise(lost)), "more is not worse"


def test_what_is_too_much_for_eight_bits_is_not_used_up():
    _, size, error = through(update(), 1e6)
    assert int(size[0]) < 8000
    assert error < 1e-4


TREES = st.dictionaries(
    st.sampled_from("abcdef"),
    st.lists(st.integers(1, 12), min_size=0, max_size=4).map(tuple),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    TREES, st.integers(0, 99), st.integers(1, 400), st.sampled_from(["normal", "heavy", "one", "equal"]), st.booleans()
)
def test_of_any_tree_no_parcel_takes_more(shapes, seed, more, kind, masked):
    layout = Layout(shapes, dict.fromkeys(shapes, torch.float32))
    g = torch.Generator().manual_seed(seed)
    leaves = {}
    for name, shape in shapes.items():
        x = torch.randn(2, *shape, generator=g)
        x = {"normal": x, "heavy": x**7, "one": x * (x.abs() == x.abs().max()), "equal": torch.ones_like(x)}[kind]
        scope = torch.rand(2, *shape, generator=g) < 0.5 if masked and name < "d" else None
        leaves[name] = Leaf(x if scope is None else x * scope, scope=scope)
    parcel = Parcel(leaves, {"n": torch.ones(2)})
    codec, ctx = budget_codec(layout, 1e9), changed(make_ctx([3, 8]), budget=torch.tensor([40.0 + more, 5.0]).double())
    out, _ = codec.encode(parcel, {}, view_of(ctx))
    nothing = nbytes(codec.encode(parcel, {}, view_of(changed(ctx, budget=torch.zeros(2).double())))[0])
    size = nbytes(out)
    assert int(size[0]) <= max(40 + more, int(nothing[0]))
    assert int(size[1]) == int(nothing[1]), "too little for anything: as little as possible"
    for k in range(2):
        plain = Schema(
            {
                n: Spec(s, scope=None if leaves[n].scope is None else leaves[n].scope[k : k + 1])
                for n, s in shapes.items()
            },
            {"n": 1},
        )
        got = from_bytes(to_bytes(out, k), codec.schema(plain, ctx))
        back, here = codec.decode(got, ctx).leaves, codec.decode(parcel_row(out, k), ctx).leaves
        for name, leaf in leaves.items():
            assert torch.equal(back[name].value, here[name].value)
            off = (back[name].value - leaf.value[k : k + 1]).double()
            assert bool(off.isfinite().all())
            assert leaf.scope is None or not back[name].value[~leaf.scope[k : k + 1]].any()
    lost, whole = (
        sum(float(x[1].double().square().sum()) for x in tree)
        for tree in (
            [codec.decode(out, ctx).leaves[n].value - leaves[n].value for n in shapes],
            [x.value for x in leaves.values()],
        )
    )
    assert lost <= whole * (1 + 1e-9)


def test_every_client_has_its_own_budget_where_the_round_has_a_deadline():
    parcel, codec = update(4, rate=0.9), budget_codec(LAYOUT, 1500)
    rooms = torch.tensor([400.0, 900.0, 1e9, 0.0]).double()
    ctx = changed(make_ctx([2, 5, 9, 11]), budget=rooms)
    out, _ = codec.encode(parcel, {}, view_of(ctx))
    for k, most in enumerate((400, 900, 1500)):
        assert 0.9 * most < int(nbytes(out)[k]) <= most
    assert not any(leaf.value[3].any() for name, leaf in out.leaves.items() if name != "steps")
    for k in range(4):
        one = slice(k, k + 1)
        alone, _ = codec.encode(parcel_row(parcel, k), {}, view_of(ctx.at(one)))
        assert to_bytes(alone, 0) == to_bytes(out, k)
    free = budget_codec(LAYOUT)
    with pytest.raises(MethodError, match="budget says no number of bytes, and the round has no deadline; write"):
        free.encode(parcel, {}, view_of(make_ctx([2, 5, 9, 11])))
    assert int(nbytes(free.encode(parcel, {}, view_of(ctx))[0])[1]) <= 900


# -------------------------------------------------------------------------------------------------- how it is spent


def test_matrices_of_low_rank_travel_as_components_and_single_entries_as_values():
    spikes = torch.zeros(1, 60, 40)
    spikes.view(-1)[torch.arange(0, 2400, 83)] = torch.linspace(1, 2, 29)
    out, _, _ = through(update(rate=0.3, dense=spikes), 500)
    assert out.leaves["conv/p"].keep[0].any()
    assert not out.leaves["conv"].value.any()
    assert not out.leaves["dense/p"].keep[0].any()
    assert out.leaves["dense"].value.any()


def test_and_both_where_that_is_best():
    layout, g = Layout({"w": (200, 150)}, {"w": torch.float32}), torch.Generator().manual_seed(0)
    w = 60 * falling(1, 200, 150, g, 0.3)
    w.view(-1)[torch.arange(0, 30000, 997)] += 4.0
    parcel = Parcel({"w": Leaf(w)}, {"n": torch.ones(1)})
    out, _, error = through(parcel, 900, layout=layout)
    assert out.leaves["w/p"].keep[0].any()
    assert out.leaves["w"].value.any()
    assert error < 0.8 * min(through(parcel, 900, by, layout)[2] for by in ("values", "components"))


@pytest.mark.slow
@pytest.mark.parametrize("most", [400, 1500])
def test_the_best_is_hardly_worse_than_either_way_alone(most):
    """Leaves that say nothing cost a few bytes."""
    for parcel in (update(seed=1, rate=0.6), update(seed=2, rate=0.95), noise(3)):
        best, *others = (through(parcel, most, by)[2] for by in WAYS)
        assert best < 1.1 * min(others)


def test_a_layer_that_matters_less_gets_fewer_bytes():
    """One step for all: of noise a tenth as strong, hardly anything is sent."""
    parcel = noise()
    weak = parcel.leaves["head"]._replace(value=0.1 * parcel.leaves["head"].value)
    out, _, _ = through(Parcel(parcel.leaves | {"head": weak}, parcel.notes), 1000, "values")
    assert out.leaves["dense"].value.any()
    assert not out.leaves["head"].value.any()


def test_parts_of_tensors_travel_as_values_and_private_ones_not_at_all():
    parcel = update(rate=0.5)
    mask = torch.zeros(1, 60, 40, dtype=torch.bool)
    mask[:, ::2] = True
    dense = Leaf(parcel.leaves["dense"].value * mask, scope=mask)
    leaves = {n: leaf for n, leaf in parcel.leaves.items() if n not in ("head", "bias")} | {"dense": dense}
    codec, ctx = budget_codec(LAYOUT, 600, skip=frozenset({"head", "bias"})), make_ctx([0])
    out, _ = codec.encode(Parcel(leaves, parcel.notes), {}, view_of(ctx))
    assert "dense/p" not in out.leaves
    assert "conv/p" in out.leaves
    assert not out.leaves["dense"].value[~mask].any()
    assert out.leaves["dense"].value.any()
    assert not {"head", "bias", "head/p"} & out.leaves.keys()
    told = Leaf(dense.value, scope=mask, told=True)
    out, _ = codec.encode(Parcel(leaves | {"dense": told}, parcel.notes), {}, view_of(ctx))
    assert int(nbytes(out)[0]) <= 600
    assert codec.decode(out, ctx).leaves["dense"].told


def test_a_tensor_far_larger_than_the_rest_gets_longer_steps():
    layout = Layout({"w": (200, 300), "v": (60, 50)}, dict.fromkeys("wv", torch.float32))
    spike = torch.zeros(1, 200, 300)
    spike[0, 3, 4] = 1000.0
    parcel = Parcel({"w": Leaf(spike), "v": Leaf(torch.randn(1, 60, 50))}, {"n": torch.ones(1)})
    codec, ctx = budget_codec(layout, 2000), make_ctx([0])
    out, _ = codec.encode(parcel, {}, view_of(ctx))
    assert float(codec.decode(out, ctx).leaves["w"].value[0, 3, 4]) == pytest.approx(1000, rel=0.01)
    assert out.leaves["v"].value.any()
    assert int(out.leaves["\n"].value.max()) > 0


def test_zeros_cost_next_to_nothing_and_what_is_not_a_number_is_not_hidden():
    zeros = update(**{n: torch.zeros(1, *SHAPES[n]) for n in FLOATS})
    out, size, error = through(zeros, 500)
    assert error == 0
    assert int(size[0]) < 100
    for bad in (math.nan, math.inf):
        x = torch.ones(2, 60, 40)
        x[0, 3, 4] = bad
        codec, ctx = budget_codec(LAYOUT, 500), make_ctx([0, 1])
        out, _ = codec.encode(update(2, dense=x), {}, view_of(ctx))
        back = codec.decode(out, ctx).leaves["dense"].value
        assert not back[0].isfinite().any()
        assert back[1].isfinite().all()


@pytest.mark.slow
def test_memory_brings_everything_across_in_time():
    """The same update every round: what arrives on average comes to what was meant."""
    codec, parcel, ctx = feedback(budget_codec(LAYOUT, 300)), update(rate=0.8), make_ctx([0])
    state, got = codec.init(LAYOUT), torch.zeros(1, 60, 40)
    errors = []
    for t in range(1, 11):
        out, state = codec.encode(parcel, state, view_of(ctx._replace(round=t)))
        assert int(nbytes(out)[0]) <= 300
        got = got + codec.decode(out, ctx).leaves["dense"].value
        errors.append(float((got / t - parcel.leaves["dense"].value).norm() / parcel.leaves["dense"].value.norm()))
    assert errors[-1] < 0.5 * errors[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_sends_the_same_bytes():
    codec, parcel, ctx = budget_codec(LAYOUT, 900), update(2, rate=0.9), make_ctx([3, 5])
    there = changed(ctx, device="cuda")
    here, far = (
        codec.encode(some, {}, view_of(c))[0] for some, c in ((parcel, ctx), (map_tensors(parcel, Tensor.cuda), there))
    )
    assert [to_bytes(here, k) for k in range(2)] == [to_bytes(far, k) for k in range(2)]
    back = codec.decode(far, there).leaves
    assert all(torch.equal(leaf.value, back[name].value.cpu()) for name, leaf in codec.decode(here, ctx).leaves.items())


# ------------------------------------------------------------------------------------------------------- the search


def counted(budget_, size, hoped):
    """`fitted` on made-up sizes; gives the step, and how many parcels were written."""
    tried = []

    def write(step, plan):
        tried.append(step)
        return (step, plan), size(step, plan)

    return fitted(1024.0, budget_, lambda step, held: (held or "plan", hoped(step)), write), tried


@pytest.mark.parametrize("off", [0.3, 1.0, 3.0])
def test_few_parcels_are_written_however_wrong_the_guess(off):
    made, tried = counted(5000, lambda step, _: int(1e5 / step), lambda step: off * 1e5 / step)
    assert ENOUGH * 5000 <= 1e5 / made[0] <= 5000
    assert len(tried) <= (1 if off == 1 else 2)


def test_where_the_plan_jumps_it_is_held():
    """A little shorter step means three times the bytes; the plan from before goes on instead."""

    def plan(step, held):
        what = held or ("much" if step < 100 else "little")
        return what, (3 if what == "much" else 1) * 1e5 / step

    size = lambda step, what: int((3 if what == "much" else 1) * 1e5 / step)  # noqa: E731
    made = fitted(1024.0, 2000, plan, lambda step, what: ((step, what), size(step, what)))
    assert made is not None
    assert made[1] == "little"
    assert ENOUGH * 2000 <= size(*made) <= 2000


def test_no_step_at_all():
    assert counted(10, lambda step, _: 11, lambda step: 11.0)[0] is None
    for room in (1e9, math.inf):
        made, tried = counted(room, lambda step, _: 11, lambda step: 11.0)
        assert made[0] == 1024 / 2**22
        assert len(tried) == 1


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 700), st.integers(1, 705), st.floats(-9, 0), st.floats(1e-9, 9), st.floats(0, 0.1))
def test_the_step_is_found_in_few_looks_wherever_it_is(near, width, below, above, rise):
    """Slopes and jumps of any height."""
    far, looks = near + width, []
    edge = near + width // 3

    def excess(i):
        looks.append(i)
        return (below if i <= edge else above) + rise * (i - edge - (i > edge))

    found = reached(near, far, excess)
    assert len(set(looks)) == len(looks) <= 40
    assert all(near < i < far for i in looks)
    assert found == edge or -CLOSE <= excess(found) <= 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 704), max_size=8), st.floats(-5, 5), st.floats(0.001, 0.2))
def test_known_places_are_not_looked_at_beyond_the_nearest(known, height, rise):
    """They are those of a search before, for another budget."""
    looks = []

    def excess(i):
        looks.append(i)
        return height + rise * (i - 350)

    found = reached(0, 705, excess, known)
    assert excess(found) <= 0 or found == 0
    assert found == 704 or excess(found + 1) > 0 or excess(found) >= -CLOSE
    nearest = max((i for i in known if height + rise * (i - 350) <= 0), default=0)
    assert all(i >= nearest for i in looks if i not in known)


@pytest.mark.parametrize(("rate", "noise"), [(0.8, 0.0), (0.9, 0.01), (0.5, 0.05)])
def test_what_a_parcel_takes_is_foreseen(rate, noise):
    """Of a matrix of which only a sample is looked at."""
    g, how = torch.Generator().manual_seed(0), as_matrix_shape((300, 400), 32)
    w = falling(1, 300, 400, g, rate) + noise * torch.randn(1, 300, 400, generator=g)
    parts = strongest_components("w", w.double(), 32, make_ctx([0]))
    some, items = piece(w.double(), parts), {"w": Item(Leaf(w), w.double(), how)}
    for step in (0.02, 0.01):
        choice = judged(some, step)
        size, nothing = (
            _written_parcel(Parcel({}, {}), items, {"w": parts}, step, chosen)[1] for chosen in ({"w": choice}, {})
        )
        assert 0.95 < (nothing + choice.bits / 8) / size < 1.05


# ---------------------------------------------------------------------------------------------------- whole methods


METHODS = [
    [{"budget": "1kB"}],
    [{"budget": {"bytes": 500, "by": "values"}}, "fedavgm"],
    ["personal", {"budget": {"bytes": "700B", "by": "components", "memory": False}}],
    [{"psfed": {"per_client": True, "fraction": 0.3}}, {"budget": 600}],
    ["psfed", {"budget": {"bytes": 600, "memory": False}}],
]


def name(method):
    return "+".join(p if isinstance(p, str) else next(iter(p)) for p in method)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=name)
def test_both_engines_agree_and_nobody_sends_more(method):
    study = {"rounds": 2, "sample": 3, "seed": 2, "local": {"steps": 2}, "fleet": {"dropout": 0.2}}
    fast, plain = (
        sparing.run("digits", method, engine=engine, plan={"path": "loop", "chunk": 2}, evaluate={"every": 2}, **study)
        for engine in ("vector", "debug")
    )
    assert fast.model_sha256 == plain.model_sha256
    assert [r.up_bytes for r in fast.table] == [r.up_bytes for r in plain.table]
    entry = next(p for p in method if isinstance(p, dict) and "budget" in p)["budget"]
    most = {"1kB": 1000, "700B": 700}.get(said := entry["bytes"] if isinstance(entry, dict) else entry, said)
    for r in fast.table:
        assert 0.8 * most * r.clients < r.up_bytes <= most * r.clients


@pytest.mark.slow
def test_a_deadline_is_a_budget():
    study = {"rounds": 2, "sample": 4, "local": {"steps": 1}}
    fleet = {"deadline": 1.0, "links": {"up": 0.008, "down": 100.0}}
    late = sparing.run("digits", "fedavg", fleet=fleet, **study)
    assert all(r.clients == 0 for r in late.table) or late.up_bytes == 0
    told = sparing.run("digits", "budget", fleet=fleet, **study)
    assert all(0 < r.up_bytes <= 1000 * 4 for r in told.table)
    with pytest.raises(ConfigError, match="budget names no bytes and rounds have no deadline; write budget: 20kB, or"):
        sparing.run("digits", "budget", **study)


def test_what_makes_no_sense_is_refused():
    make = find_recipe("budget").make
    for bad in ("20 apples", "1.2.3kB", ".", -5, ""):
        with pytest.raises(ConfigError, match=r"budget.bytes is .*; write a number of bytes, such as 20000 or 20kB"):
            make(bytes=bad)
    with pytest.raises(ConfigError, match=r"budget.bytes is 50, but \d\d bytes say nothing yet"):
        compose(LAYOUT, make(bytes=50))
    with pytest.raises(ConfigError, match=r"budget.by is 'rank'; use best, values or components"):
        budget_codec(LAYOUT, 500, "rank")
    with pytest.raises(MethodError, match="would factor nothing"):
        budget_codec(Layout({"w": (9,)}, {"w": torch.float32}), 500, "components")
    down = find_recipe("broadcast").make
    with pytest.raises(MethodError, match="cannot count the buffers that go down with it"):
        compose(LAYOUT, down(by=[make(bytes=5000)]))
    with pytest.raises(MethodError, match="a server has no deadline; write budget: 20kB"):
        compose(LAYOUT, down(by=[make()]))
    for after in ("topk", "ecsq", "fp16"):
        with pytest.raises(MethodError, match="another basis"):
            compose(LAYOUT, make(bytes=500), find_recipe(after).make())
    with pytest.raises(MethodError, match="changes the basis, so positions"):
        compose(LAYOUT, find_recipe("topk").make(), make(bytes=500))
    with pytest.raises(MethodError, match=r"'budget' cannot count .* which goes up past it as it is"):
        sparing.run("digits", [{"pfedsim": {"mode": "published", "warmup": 0.4}}, {"budget": "9kB"}], rounds=1)


def test_the_smallest_budget_that_is_taken_is_named():
    with pytest.raises(ConfigError) as caught:
        compose(LAYOUT, find_recipe("budget").make(bytes=1))
    least = int(str(caught.value).split("but ")[1].split()[0])
    assert int(nbytes(through(update(), least + 1)[0])[0]) <= least + 1
    assert compose(LAYOUT, find_recipe("budget").make(bytes=least + 1)).memory
    assert not compose(LAYOUT, find_recipe("budget").make(bytes="0.5 kB", memory=False)).memory


def test_odd_names_and_empty_tensors_come_back():
    shapes = {"w": (20, 20), "w/p": (3,), "a|b": (4,), "empty": (0, 4), "one": (), "z": (30, 20)}
    layout = Layout(shapes, dict.fromkeys(shapes, torch.float32))
    g = torch.Generator().manual_seed(0)
    parcel = Parcel({n: Leaf(torch.randn(2, *s, generator=g)) for n, s in shapes.items()}, {"n": torch.ones(2)})
    for by in WAYS:
        out, _, error = through(parcel, 900, by, layout)
        back = budget_codec(layout, 900, by).decode(out, make_ctx([0, 1])).leaves
        assert {n: back[n].value.shape for n in shapes} == {n: (2, *s) for n, s in shapes.items()}
        assert error < 1


def test_a_round_without_parameters_passes():
    codec, ctx = budget_codec(LAYOUT, 500), make_ctx([0])
    parcel = Parcel({"steps": Leaf(torch.tensor([7]))}, {"n": torch.ones(1)})
    assert codec.encode(parcel, {}, view_of(ctx))[0] == parcel == codec.decode(parcel, ctx)
    assert codec.schema(Schema({}, {}), context(0, 1, 1, *[torch.ones(1)] * 2, 1, 1)).leaves == {}
