"""A product is its formed self to everybody but the fold, and there within rounding."""

import pytest
import torch

from sparing.accel.grown import Grown, since
from sparing.accel.lazy_product import Product, formed, subtract_lazily
from sparing.core.errors import TrainingError
from sparing.core.fold import Collect, Fold
from sparing.core.grid import limits_of
from sparing.core.method import Arrival
from sparing.core.ops import restrict
from sparing.core.parcel import Leaf, Parcel
from sparing.core.reduce import _rows_at
from sparing.wire import parcel_sizes, to_bytes
from support import make_ctx

K = 5
SHARES = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0], dtype=torch.float64)


def factors(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(K, 4, 3, generator=g), torch.randn(K, 4, 6, generator=g)


def made() -> tuple[Product, torch.Tensor]:
    left, right = factors()
    return Product(left, right), torch.einsum("kro,kri->koi", left, right)


OPERATIONS = {
    "add": lambda x: x + 1,
    "row": lambda x: x[2],
    "rows": lambda x: x[torch.tensor([3, 0])],
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack((x[0], x[1])),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "flat": lambda x: x.reshape(K, -1),
    "sum": lambda x: x.sum(),
    "double": lambda x: x.double(),
    "loop": lambda x: list(x)[1],
    "clone": lambda x: x.clone(),
    "copied over": lambda x: torch.empty(K, 3, 6).copy_(x),
    "expanded": lambda x: x.expand(K, 3, 6) * 2,
    "out": lambda x: torch.add(x, 1, out=torch.empty(K, 3, 6)),
    "numpy": lambda x: torch.from_numpy(x.numpy() + 1),
    "list": lambda x: torch.tensor(x.tolist()),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_any_operation_sees_the_formed_matrices(name):
    x, whole = made()
    out = OPERATIONS[name](x)
    assert type(out) is torch.Tensor
    assert torch.allclose(out, OPERATIONS[name](whole))


def test_what_is_known_without_forming():
    x, whole = made()
    assert (x.shape, x.dtype, x.ndim, x.numel(), x.element_size()) == ((K, 3, 6), torch.float32, 3, K * 18, 4)
    assert x.at_most() >= float(whole.abs().max())
    assert torch.equal(
        parcel_sizes(Parcel({"w": Leaf(x)}, {}))["value"], parcel_sizes(Parcel({"w": Leaf(whole)}, {}))["value"]
    )
    assert x.whole is None
    assert to_bytes(Parcel({"w": Leaf(x)}, {}), 1, "") == to_bytes(Parcel({"w": Leaf(formed(x))}, {}), 1, "")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bound_is_not_finite_where_a_factor_is_not(side, bad):
    x, _ = made()
    getattr(x, side)[1, 2, 0] = bad
    assert not x.at_most() <= 1e300


def arrival(update) -> Arrival:
    return Arrival({"w": update}, {}, {}, {}, make_ctx(list(range(K))))


def mean(update, kind=Fold) -> torch.Tensor:
    fold = kind(limits_of({"w": torch.zeros(1, 3, 6)}), 16.0)
    fold.add(arrival(update), SHARES, {})
    return fold.mean(make_ctx(list(range(K)))).update["w"]


def test_the_fold_adds_products_without_forming_them():
    x, whole = made()
    out = mean(x)
    assert x.whole is None
    assert out.dtype == torch.float64
    assert torch.allclose(out, mean(whole), rtol=0, atol=1e-6)
    assert torch.allclose(out[0], (SHARES[:, None, None] * whole).sum(0) / SHARES.sum(), rtol=0, atol=1e-6)


def test_what_somebody_has_formed_is_folded_as_it_is():
    x, _ = made()
    assert torch.equal(mean(x + 0), mean(formed(x)))
    assert torch.equal(mean(x), mean(formed(x)))


def test_a_blend_that_collects_gets_the_matrices():
    x, whole = made()

    def collect(model, weight):
        return Collect(
            model,
            weight,
            lambda v, m, w: (
                {n: x.double().amax(0, keepdim=True) for n, x in v.items()},
                {n: x.any(0, keepdim=True) for n, x in m.items()},
            ),
        )

    assert torch.allclose(mean(x, collect).float()[0], whole.amax(0))


@pytest.mark.parametrize("bad", [float("nan"), 1e30])
def test_a_product_beyond_the_grid_is_refused_by_name(bad):
    x, _ = made()
    x.left[3, 0, 0] = bad
    with pytest.raises(TrainingError, match="client 3 sent an update of size"):
        mean(x)


def test_a_bound_beyond_the_grid_alone_refuses_nobody():
    left, right = torch.zeros(K, 2, 3), torch.zeros(K, 2, 6)
    left[:, 0], right[:, 1] = 1e10, 1e10  # their entries never meet
    assert not mean(Product(left, right)).any()


def test_a_grown_tree_is_formed_by_whoever_asks():
    x, whole = made()
    start, beside = {"w": torch.ones(1, 3, 6), "b": torch.zeros(1, 2)}, torch.ones(K, 2)
    tree = Grown(start, {"w": x, "b": beside})
    kept = restrict(tree, ["w"])
    assert list(tree) == ["w", "b"]
    assert list(kept) == ["w"]
    assert since(kept, "w", start["w"]) is x
    assert x.whole is None
    assert torch.allclose(since(kept, "w", start["w"].clone()), whole, atol=1e-6)
    assert torch.allclose(since(tree, "w", torch.zeros(1)), 1 + whole)
    assert since(tree, "w", None) is tree["w"]
    assert tree["w"] is tree["w"]
    assert list({**tree, "c": beside}) == ["w", "b", "c"]
    assert torch.equal(since({"w": whole}, "w", torch.ones(1)), whole - 1)


def test_less_a_base_it_stays_a_product():
    (x, whole), base = made(), torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(1))
    apart = subtract_lazily(x, base)
    assert isinstance(apart, Product)
    want = whole - base
    assert torch.allclose(
        apart.weighted(SHARES), (SHARES[:, None, None].float() * want).sum(0, keepdim=True), atol=1e-5
    )
    assert apart.at_most() >= float(want.abs().max())
    assert bool((apart.each_at_most() >= want.flatten(1).abs().amax(1)).all())
    assert apart.whole is None
    assert torch.allclose(_rows_at(apart, slice(1, 3)), want[1:3], atol=1e-6)
    assert torch.allclose(apart + 0, want, atol=1e-6)
    assert torch.allclose(subtract_lazily(apart, base), want - base, atol=1e-6)
    assert torch.equal(subtract_lazily(whole, base), want)
