"""Law: any order, any grouping, any number of workers, the same bits."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparing.core.errors import TrainingError
from sparing.core.fold import Collect, Fold, add_to_sums
from sparing.core.grid import limits_of
from sparing.core.method import Arrival
from support import make_ctx, plain_bodies, random_tree, small_layout

LAYOUT = small_layout()
MODEL = random_tree(LAYOUT, 1, seed=9)
CTX = make_ctx([0])


@pytest.fixture(scope="module", autouse=True, params=["plain", "fast"])
def bodies(request):
    with plain_bodies() if request.param == "plain" else nullcontext():
        yield


def arrival(rows, update, scope, n):
    ctx = make_ctx(rows, [n[i] for i in rows])
    pick = torch.tensor(rows)
    scopes = {name: m if m is None or m.shape[0] == 1 else m[pick] for name, m in scope.items()}
    masked = {name: x[pick] * (scopes[name] if scopes.get(name) is not None else 1) for name, x in update.items()}
    return Arrival(masked, scopes, {}, MODEL, ctx)


def folded(groups, update, scope, n, kind=Fold):
    """Each group on a worker of its own; partial sums merge at the end."""
    parts = []
    for group in groups:
        fold = kind(limits_of(MODEL), float(sum(n)))
        for rows in group:
            one = arrival(rows, update, scope, n)
            fold.add(one, one.ctx.n.double(), {"0/q": one.ctx.n.double() * 3})
        parts.append(fold)
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.merge(part)
    return whole.mean(CTX)


def same(a, b):
    assert a.update.keys() == b.update.keys()
    for name in a.update:
        assert torch.equal(a.update[name], b.update[name]), name
        ca, cb = a.covered[name], b.covered[name]
        full = torch.ones_like(a.update[name], dtype=torch.bool)
        assert torch.equal(full if ca is None else ca, full if cb is None else cb)
    assert torch.equal(a.ids, b.ids)
    assert torch.equal(a.weight, b.weight)
    assert torch.equal(a.seen["0/q"], b.seen["0/q"])


@st.composite
def grouping(draw, k):
    order = draw(st.permutations(range(k)))
    cuts = sorted(draw(st.sets(st.integers(1, k - 1), max_size=k - 1)))
    chunks = [list(c) for c in np.split(np.array(order), cuts)]
    workers = draw(st.integers(1, len(chunks)))
    return [g for g in ([[int(i) for i in c] for c in chunks[w::workers]] for w in range(workers)) if g]


def wide(k, seed, dtype=torch.float32):
    """Updates over sixty binary orders of magnitude: sums that round differently in every order."""
    g = torch.Generator().manual_seed(seed)
    update = {}
    for name, x in random_tree(LAYOUT, k, seed).items():
        if x.is_floating_point():
            x = (x.double() * 2.0 ** torch.randint(-45, 15, x.shape, generator=g)).to(dtype)
        update[name] = x
    return update


def masks_for(style, k, g):
    scope = {}
    for i, (name, shape) in enumerate(LAYOUT.shapes.items()):
        this = style if style != "mixed" else ["whole", "shared", "per client", "by filter"][i % 4]
        if this == "by filter" and shape:
            scope[name] = torch.rand(k, shape[0], *[1] * (len(shape) - 1), generator=g) < 0.5
        else:
            rows = {"whole": 0, "shared": 1}.get(this, k)
            scope[name] = torch.rand(rows, *shape, generator=g) < 0.5 if rows else None
    return scope


@settings(max_examples=40, deadline=None)
@given(
    st.data(),
    st.integers(0, 10**6),
    st.sampled_from(["whole", "shared", "per client", "mixed"]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_any_order_and_grouping_gives_the_same_bits(data, seed, masks, dtype):
    k = 13
    g = torch.Generator().manual_seed(seed)
    n = torch.randint(1, 2**20, (k,), generator=g).tolist()
    update, scope = wide(k, seed, dtype), masks_for(masks, k, g)
    plain = folded([[list(range(k))]], update, scope, n)
    same(plain, folded(data.draw(grouping(k)), update, scope, n))
    for name, x in update.items():
        votes = torch.ones_like(x) if scope[name] is None else scope[name].expand_as(x)
        weight = torch.tensor(n, dtype=torch.float64).reshape(-1, *[1] * (x.dim() - 1)) * votes
        want = (weight * x).sum(dim=0) / weight.sum(dim=0).clamp(min=1e-9)
        step = 1e-8 if x.is_floating_point() else 1e-4
        assert torch.allclose(plain.update[name][0], want, rtol=1e-9, atol=step), name


def test_without_the_grid_the_law_does_not_hold(monkeypatch):
    """The same test data, folded without rounding to the grid, depends on the order: so the law can fail."""

    def loose(sums, update, share_K, grid, ctx):
        out = {name: torch.zeros(1, *x.shape[1:], dtype=torch.float64) for name, x in update.items()}
        for name, total in out.items():
            for k, share in enumerate(share_K.tolist()):
                total += update[name][k : k + 1].double() * share
        return out

    monkeypatch.setattr(add_to_sums, "body", loose)
    k, n = 13, list(range(1, 14))
    one = folded([[list(range(k))]], wide(k, 0), {}, n)
    two = folded([[list(reversed(range(k)))]], wide(k, 0), {}, n)
    assert not torch.equal(one.update["3.weight"], two.update["3.weight"])


def test_weights_that_add_up_to_too_much_are_refused():
    one = arrival([0, 1, 2], random_tree(LAYOUT, 3), {}, [1, 1, 1])
    fold = Fold(limits_of(MODEL), 1.0)
    fold.add(one, torch.ones(3), {})
    with pytest.raises(TrainingError, match="add up to more than"):
        fold.mean(CTX)


def test_small_weights_keep_their_precision():
    """Weights that are no sample counts, such as a softmax, are scaled by what they add up to."""
    weight = torch.softmax(torch.linspace(0, 3, 50), dim=0).double()
    update = {"w": torch.randn(50, 4, generator=torch.Generator().manual_seed(0))}
    fold = Fold(limits_of({"w": torch.zeros(1, 4)}), 1.0)
    fold.add(Arrival(update, {}, {}, {}, make_ctx(list(range(50)))), weight, {})
    assert torch.allclose(
        fold.mean(CTX).update["w"][0], (weight[:, None] * update["w"]).sum(dim=0), rtol=1e-6, atol=1e-8
    )


def test_a_duplicate_never_counts_twice():
    update, scope = random_tree(LAYOUT, 3), {}
    with pytest.raises(TrainingError, match="client 1 arrived twice"):
        folded([[[0, 1], [1, 2]]], update, scope, [1, 1, 1])
    with pytest.raises(TrainingError, match="client 2 arrived twice"):
        folded([[[0, 2]], [[1, 2]]], update, scope, [1, 1, 1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e30])
@pytest.mark.parametrize("kind", [Fold, lambda m, w: Collect(m, w, lambda v, m, w: (v, m))])
def test_an_update_beyond_the_grid_is_refused_by_name(bad, kind):
    update = random_tree(LAYOUT, 3)
    update["3.weight"][1, 0, 0] = bad
    with pytest.raises(
        TrainingError, match=r"client 1 sent an update of size .* for '3.weight' in round 1.*lower local.lr"
    ):
        folded([[[0, 1, 2]]], update, {}, [1, 1, 1], kind)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_an_update_that_was_refused_leaves_no_trace_in_the_sums(bad):
    model = {"w": torch.zeros(1, 100, 100)}  # large enough for every faster body

    def one(who, value):
        ctx = make_ctx([who], [10])
        return Arrival({"w": torch.full((1, 100, 100), value)}, {"w": None}, {}, model, ctx), torch.tensor([10.0]), {}

    fold = Fold(limits_of(model), 40.0)
    fold.add(*one(0, 0.5))
    with pytest.raises(TrainingError):
        fold.add(*one(1, bad))
    fold.add(*one(2, 0.25))
    assert (fold.mean(make_ctx([0, 2], [10, 10])).update["w"] == 0.375).all()


@pytest.mark.parametrize("weight", [-1.0, float("nan"), 1e9])
def test_a_senseless_weight_is_refused(weight):
    one = arrival([0, 1], random_tree(LAYOUT, 2), {}, [1, 1])
    with pytest.raises(TrainingError, match="client 1 was given weight"):
        Fold(limits_of(MODEL), 2.0).add(one, torch.tensor([1.0, weight]), {})


def test_an_empty_round_is_refused():
    with pytest.raises(TrainingError, match="no client arrived"):
        Fold(limits_of(MODEL), 1.0).mean(CTX)


def test_zero_weight_leaves_the_model_alone():
    one = arrival([0], random_tree(LAYOUT, 1), {}, [1])
    fold = Fold(limits_of(MODEL), 1.0)
    fold.add(one, torch.zeros(1), {})
    blended = fold.mean(CTX)
    assert not any(bool(mask.any()) for mask in blended.covered.values())


@given(grouping(5))
@settings(max_examples=20, deadline=None)
def test_collecting_does_not_depend_on_order_either(groups):
    def median(values, votes, weight):
        middle = {name: x.double().median(dim=0, keepdim=True).values for name, x in values.items()}
        return middle, {name: x.any(dim=0, keepdim=True) for name, x in votes.items()}

    def kind(model, weight):
        return Collect(model, weight, median)

    update, n = random_tree(LAYOUT, 5), [3, 1, 4, 1, 5]
    want = folded([[list(range(5))]], update, {}, n, kind)
    same(want, folded(groups, update, {}, n, kind))
    assert torch.equal(want.update["3.weight"][0], update["3.weight"].double().median(dim=0).values)
