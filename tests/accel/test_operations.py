"""Every operation's fast body gives what its plain one gives; with all of them plain a run has the same bits."""

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import sparing
from sparing.accel.grown import Grown
from sparing.accel.lazy_product import Product
from sparing.core import fold, gaussian, keys, ops, reduce, tree, versions, votes
from sparing.core.compose import compose
from sparing.core.grid import Grid, limits_of
from sparing.core.method import Blended
from sparing.core.operation import OPERATIONS
from sparing.core.parcel import Leaf, Parcel
from sparing.core.reduce import Term
from sparing.core.tree import layout_of
from sparing.core.votes import Votes
from sparing.engines import divergence, parcel_sizes
from sparing.parts import factors
from sparing.parts.blend import stein
from sparing.parts.code import dead_zone, fedscr, quantisers
from sparing.parts.code.budget import byte_budget, matrices, rate_distortion, subspace
from sparing.parts.share import selectors
from sparing.parts.size.fedhm import low_rank, svd
from sparing.parts.size.fedhm.low_rank import LowRank, rank_of
from sparing.storage import bank
from sparing.train import call, optim
from sparing.wire import count, index, levels, rans, schema_of, tight_index, tight_values, to_bytes
from sparing.wire.count import Mask
from support import changed, make_ctx, plain_bodies, small_layout, update_parcel

K = 5
SMALL = {"conv": (4, 3, 3, 3), "bias": (7,), "one": (), "none": (0, 3)}
LARGE = {"conv": (40, 30, 3, 3), "dense": (300, 400), "bias": (400,), "long": (1 << 18,)}
SHARES = torch.tensor([0.25, 0.5, 0.0, 0.125, 0.0625], dtype=torch.float64)


class Draw:
    """Tensors drawn on the CPU, alike for every device."""

    def __init__(self, device: str, large: bool):
        self.g, self.device, self.large = torch.Generator().manual_seed(0), torch.device(device), large
        self.shapes = LARGE if large else SMALL
        self.n = (1 << 18) + 3 if large else 70  # numbers of a row

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g).to(self.device)

    def coin(self, *shape: int, share: float = 0.5) -> Tensor:
        return (torch.rand(*shape, generator=self.g) < share).to(self.device)

    def tree(self, k: int) -> dict[str, Tensor]:
        return {name: self.normal(k, *shape) for name, shape in self.shapes.items()}

    def masks(self, k: int) -> dict[str, Tensor | None]:
        drawn: dict[str, Tensor | None] = {name: self.coin(k, *shape) for name, shape in self.shapes.items()}
        return drawn | {"bias": None}

    def placed(self, numbers: list) -> Tensor:
        return torch.tensor(numbers, device=self.device)

    @property
    def ctx(self):
        return changed(make_ctx(list(range(K))), device=str(self.device))


Case = Callable[[Draw], tuple]


def summands(d: Draw, *, before: bool = False, dtype: torch.dtype = torch.float32) -> tuple:
    model, update = d.tree(1), {name: x.to(dtype) for name, x in d.tree(K).items()}
    if not d.large and dtype == torch.float64:
        model["steps"], update["steps"] = torch.full((1,), 9, device=d.device), torch.arange(K, device=d.device)
    sums = {name: x.double() * 2.0**-20 for name, x in model.items()} if before else {}
    grid = Grid(limits_of(model), 1.0)
    sums = {name: (x + 3 * grid.limit(name)) - 3 * grid.limit(name) for name, x in sums.items()}
    return sums, update, SHARES, grid, d.ctx


def planes_and_codes(d: Draw, rows: int, columns: int, size: float = 40.0, turned: bool = False) -> tuple:
    def whole(*shape: int) -> Tensor:
        return (d.normal(*shape).abs() * size).clamp(max=127).to(torch.int8)

    high, low = (whole(K, columns, rows).mT if turned else whole(K, rows, columns) for _ in range(2))
    return subspace.Planes(high, low, d.placed([1.0])), whole(K, columns, 9)


def one_row_for_all(d: Draw) -> tuple:
    model, update = d.tree(1), d.tree(1)
    return {}, update, SHARES, Grid(limits_of(model), 1.0), d.ctx


def voted(d: Draw) -> tuple:
    sums, counted = {name: x.double() for name, x in d.tree(1).items() if x.numel()}, {}
    for i, (name, x) in enumerate(sums.items()):
        counted[name] = Votes()
        scope = (None, d.coin(1, *x.shape[1:]), d.coin(K, *x.shape[1:]))[i % 3]
        counted[name].add(scope, SHARES, SHARES.sum())
        sums[name] = x if scope is None else x * scope.any(0, keepdim=True)
    return sums, counted


def quantised(d: Draw, *, bits: int = 8, drawn: bool = False, share: float = 0.05, codes: bool = False) -> tuple:
    top = 2 ** (bits - 1) - 1
    quantiser = quantisers.Quantiser(quantisers.equal_steps(top, quantisers.largest_magnitudes, drawn), drawn)
    keep = d.coin(K, d.n, share=share)
    value = d.normal(K, d.n) * keep
    if not codes:
        return quantiser, "w", Leaf(value, keep=(keep,)), d.ctx
    written = (value * 20).round().clamp(-top, top).to(torch.int8)
    return quantiser, Leaf(written, keep=(keep,)), d.normal(K, 1).abs()


def shrunk(d: Draw, *, c: bool | None = None) -> tuple:
    settings = stein.SteinSettings(warmup=1)
    names = [name for name, shape in d.shapes.items() if math.prod(shape)]
    state = stein.first_state({name: x for name, x in d.tree(1).items() if name in names}, settings)
    state |= {n: d.normal(*x.shape).double() for n, x in state.items() if n.startswith(("sum", "target"))}
    state |= {name: torch.full_like(x, 0.5) for name, x in state.items() if name.startswith("mass")}
    state |= {f"target0/{name}": state[f"sum0/{name}"] / 0.5 for name in names}
    state["rounds"] += 3
    update = {name: x.double() for name, x in d.tree(1).items() if name in names}
    away = {"away": d.normal(K, len(names)).double().square() * 1e4}
    blended = Blended(update, dict.fromkeys(names), torch.arange(K), SHARES.to(d.device), away)
    aims = stein.this_rounds_targets(state, dict.fromkeys(names, 0), blended, settings)
    if c is None:
        return blended, aims, state, d.ctx, settings
    given = torch.linspace(0.1, 1.0, len(names), dtype=torch.float64, device=d.device) if c else None
    return state, names, blended, aims, given, settings


def aimed(d: Draw) -> tuple:
    _, _, state, _, settings = shrunk(d)
    return state, {name.partition("/")[2]: 0 for name in state if name.startswith("sum0/")}, settings


def grams(d: Draw) -> tuple:
    shapes = [(2, 60, 40), (1, 30, 50)] if d.large else [(1, 6, 5)]
    tall = [svd.upright(d.normal(*shape)) for shape in shapes]
    return [x.mT @ x for x in tall], [min(4, x.shape[2]) for x in tall]


def decomposition(d: Draw) -> tuple:
    net = torch.nn.Sequential(*[torch.nn.Linear(80 if d.large else 9, 80 if d.large else 9) for _ in range(4)])
    layout = layout_of(net)
    ranks = {name: rank_of(layout.shapes[name], 0.3) for name in ("1.weight", "2.weight")}
    plan = LowRank(layout, (ranks,), ranks, ranks, lambda ctx: torch.zeros_like(ctx.ids))
    return plan, {name: d.normal(1, *shape) for name, shape in layout.shapes.items()}, {}, None


def sparse(d: Draw) -> tuple:
    few, many = d.coin(K, d.n, share=0.01), d.coin(1, d.n, share=0.4)
    return ([Mask(few), Mask(few & many, many), Mask(many, None, travels=False), Mask(few[:, :9])],)


def parcels(d: Draw, *, up: bool) -> tuple:
    layout = small_layout()
    method, parcel = compose(layout), update_parcel(layout, K)
    leaves = {name: leaf._replace(value=leaf.value.to(d.device)) for name, leaf in parcel.leaves.items()}
    parcel = parcel._replace(leaves=leaves, notes={name: x.to(d.device) for name, x in parcel.notes.items()})
    return (method, parcel, 3, d.ctx) if up else (method, {}, parcel, d.ctx)


def coded_leaves(d: Draw, k: int) -> dict[str, Leaf]:
    """Tight codes, mostly zero, of some of which whole rows are kept back."""

    def codes(*shape: int) -> Tensor:
        return (d.normal(k, *shape) * d.coin(k, *shape, share=0.2) * 3).round().to(torch.int8)

    some, keep = codes(9, 20), d.coin(k, 9, 1)
    parts = Leaf(some * keep, keep=(keep,), scale=d.normal(k, 1).abs(), bits=8, tight=True)
    return {"few": parts, "many": Leaf(codes(d.n), bits=8, tight=True)}


def written_update(d: Draw) -> tuple:
    parcel = Parcel(coded_leaves(d, 1) | {"whole": Leaf(d.normal(1, 7))}, {})
    schema = schema_of(parcel, "update")
    return parcel, to_bytes(parcel, 0, "update"), schema, changed(make_ctx([0], t=2), device=str(d.device))


def doubled_by_each(d: Draw) -> tuple:
    part = Leaf(d.normal(K, d.n), scope=d.coin(1, d.n), scale=d.normal(K, 2), bits=8, tight=True)
    parts = {"w": subspace.Components(*(d.normal(K, n).double() for n in (3, 1, 4)))}

    def send(k, parcel, parts):
        value = parcel.leaves["w"].value * 2 + k + float(parts["w"].s)
        return Parcel(parcel.leaves | {"w": parcel.leaves["w"]._replace(value=value)}, parcel.notes)

    return send, Parcel({"w": part, "whole": Leaf(d.normal(1, 7))}, {"n": d.normal(K)}), parts, K


def components(d: Draw, shape: tuple[int, ...], last: float = 1.0) -> tuple:
    """Of which some are zero, of one client all."""
    how = matrices.as_matrix_shape(shape, 6)
    assert how is not None
    a, b = ((d.normal(K, how.rank, n) * 40).to(torch.int8) for n in (how.rows, how.columns))
    a[:, 2], b[:, 4:], a[3] = 0, 0, 0
    return d.normal(K, *shape), a, b, d.normal(K).abs() * d.placed([1.0, 1.0, last, last, 1.0]), how


def symmetric(d: Draw) -> tuple:
    x = torch.randn(K, 12, 40, generator=d.g, dtype=torch.float64)
    x[3, 0, 0] = math.nan
    return ((x @ x.mT).to(d.device),)


def after_training(d: Draw, *, grown: bool = False, moved: bool = False) -> tuple:
    base, added = d.tree(1), d.tree(K)
    start = {name: x + 1 for name, x in base.items()} if moved else base
    after = Grown(start, added) if grown else {name: start[name] + x for name, x in added.items()}
    return after, {name: x for name, x in base.items() if name != "bias"}, d.masks(1)


def differences(d: Draw) -> tuple:
    model, base = d.tree(1), d.tree(1)
    base = {name: model[name] if name == "conv" else x for name, x in base.items() if name != "bias"}
    return model, base, d.tree(K), d.masks(1)


def terms(d: Draw, *, other: bool = True) -> tuple:
    drawn = [
        Term(
            x,
            d.normal(1, *x.shape[1:]),
            None,
            d.normal(*x.shape) if other else None,
            None if i % 2 else d.coin(*x.shape),
        )
        for i, x in enumerate(d.tree(K).values())
    ]
    return drawn, K


def from_target(d: Draw) -> tuple:
    return [Term(x, minus=d.normal(1, *x.shape[1:]).double()) for x in d.tree(K).values() if x.numel()], K


def keys_of(d: Draw) -> Tensor:
    return d.ctx.keys("m")


CASES: dict[tuple[object, str], Case] = {
    (ops.place, ""): lambda d: (torch.arange(6).view(2, 3).T, d.device),
    (ops.constants, ""): lambda d: ((3, 5, 2**40), d.device),
    (ops.to_host, ""): lambda d: ([d.normal(3, 4).T, d.coin(5), d.normal(2).double()],),
    (ops.restrict, ""): lambda d: (d.tree(K), ["bias"]),
    (ops.restrict, "grown"): lambda d: (Grown(d.tree(1), d.tree(K)), ["bias", "conv"]),
    (ops.is_formed, ""): lambda d: (d.normal(3),),
    (ops.clear, "each"): lambda d: (d.tree(K), d.masks(K)),
    (ops.clear, "shared"): lambda d: (d.tree(K), d.masks(1)),
    (ops.clear, "one row by many masks"): lambda d: (d.tree(1), d.masks(K)),
    (ops.clear, "masks by rows"): lambda d: (
        {"w": d.normal(K, 90, 700), "v": d.normal(K, 700, 90).mT},
        {"w": d.coin(K, 90, 1), "v": d.coin(1, 1, 700)},
    ),
    (ops.overlay, "each"): lambda d: (d.tree(K), d.tree(K), d.masks(K)),
    (ops.overlay, "on one"): lambda d: (d.tree(1), d.tree(1), d.masks(K)),
    (ops.overlay, "shared"): lambda d: (d.tree(K), d.tree(1), d.masks(1)),
    (ops.increments, ""): after_training,
    (ops.increments, "grown from another start"): partial(after_training, grown=True, moved=True),
    (ops.against_model, ""): differences,
    (ops.add_each, ""): lambda d: (list(d.tree(K).values()), list(d.tree(1).values())),
    (ops.add_each, "nothing"): lambda d: ([], []),
    (ops.move_model, ""): lambda d: (d.tree(1), {name: x.double() for name, x in d.tree(1).items()}, d.masks(1)),
    (ops.bounds, ""): lambda d: (d.tree(K) | {"odd": d.placed([1.0, math.nan]), "n": d.placed([-7, 3])},),
    (ops.bounds, "nothing"): lambda d: ({},),
    (tree.cleared, ""): lambda d: (d.normal(K, d.n), d.coin(1, d.n)),
    (tree.cleared, "everywhere"): lambda d: (d.normal(K, 3), None),
    (fold.add_to_sums, ""): summands,
    (fold.add_to_sums, "more"): partial(summands, before=True),
    (fold.add_to_sums, "float64"): partial(summands, before=True, dtype=torch.float64),
    (fold.add_to_sums, "one row for all"): one_row_for_all,
    (votes.add_votes, ""): lambda d: (d.normal(1, d.n).double().round(), d.coin(K, d.n), SHARES),
    (votes.divide_by_votes, ""): voted,
    (reduce.total, ""): lambda d: (d.normal(K, d.n),),
    (reduce.total, "doubles"): lambda d: (d.normal(d.n, 77).double().T,),
    (reduce.total, "short rows"): lambda d: (d.normal(d.n, 1),),
    (reduce.total, "booleans"): lambda d: (d.coin(K, 3, d.n),),
    (reduce.peaks, ""): lambda d: (d.normal(K, 3, d.n),),
    (reduce.peaks, "not a number"): lambda d: (d.normal(K, d.n) / 0 * d.placed([[0.0], [-1.0], [1.0], [2.0], [0.5]]),),
    (reduce.peaks, "nothing"): lambda d: (d.normal(K, 0),),
    (reduce.count_true, ""): lambda d: (d.coin(K, 7, d.n),),
    (reduce.count_true, "one number"): lambda d: (d.coin(K),),
    (reduce.dots, ""): terms,
    (reduce.dots, "squares"): partial(terms, other=False),
    (reduce.dots, "from a target"): from_target,
    (reduce.dots, "with one for all"): lambda d: (
        [Term(d.normal(K, d.n), other=d.normal(1, d.n), mask=d.coin(1, d.n))],
        K,
    ),
    (reduce.dots, "masks by rows"): lambda d: (
        [Term(d.normal(1, 9, 700), other=d.normal(K, 9, 700), mask=d.coin(K, 9, 1))],
        K,
    ),
    (reduce.largest_in_rows, ""): lambda d: (d.normal(K, d.n), 20),
    (reduce.largest_in_rows, "ties"): lambda d: (
        d.normal(K, d.n).round(),
        torch.tensor([0, 1, 20, 60, d.n]).to(d.device),
    ),
    (reduce.keep_largest, ""): lambda d: (list(d.tree(K).values()), [3] * len(d.shapes)),
    (keys.choose, ""): lambda d: (keys_of(d), d.n, 20),
    (keys.choose, "none"): lambda d: (keys_of(d), d.n, 0),
    (gaussian.exact_root, ""): lambda d: (d.normal(K, d.n).double().abs(),),
    (selectors.kth_largest, ""): lambda d: (d.normal(2, d.n), 20),
    (quantisers.codes_of_leaf, "scarce"): quantised,
    (quantisers.codes_of_leaf, "many"): partial(quantised, share=0.5),
    (quantisers.codes_of_leaf, "drawn"): partial(quantised, bits=4, drawn=True),
    (quantisers.values_of_leaf, "scarce"): partial(quantised, codes=True),
    (quantisers.values_of_leaf, "many"): partial(quantised, codes=True, share=0.5),
    (stein.stein_targets, ""): aimed,
    (stein.stein_coefficients, ""): shrunk,
    (stein.shrink_and_follow, ""): partial(shrunk, c=True),
    (stein.shrink_and_follow, "warmup"): partial(shrunk, c=False),
    (factors.factor_product, "dense"): lambda d: (d.normal(K, 30, 4), d.normal(K, 4, d.n // 999 + 20)),
    (factors.factor_product, "conv"): lambda d: (d.normal(K, 6, 4, 3, 1), d.normal(K, 4, 8, 1, 2)),
    (factors.gram_of_rows, ""): lambda d: (d.normal(2, 6, 4096 if d.large else 50).double(),),
    (svd.begins_anew, ""): lambda d: (d.normal(1, 300, 300), 20),
    (svd.strongest_eigenvectors, ""): grams,
    (low_rank.decompose_weights, ""): decomposition,
    (fedscr.keep_structures, "dense"): lambda d: (d.normal(K, 30, d.n), d.coin(K, 30, 1), d.coin(K, 1, d.n)),
    (fedscr.keep_structures, "conv"): lambda d: (
        d.normal(K, 60, 40, 3, 3),
        d.coin(K, 60, 1, 1, 1),
        d.coin(K, 1, 40, 1, 1),
    ),
    (fedscr.structure_strengths, "dense"): lambda d: (d.normal(K, 300 if d.large else 9, 700 if d.large else 7),),
    (fedscr.structure_strengths, "conv"): lambda d: (d.normal(K, 20, 4500 if d.large else 30, 3, 3),),
    (fedscr.structure_strengths, "one column"): lambda d: (d.normal(K, 3, 1),),
    (dead_zone.codes_of, ""): lambda d: (d.normal(K, 3, d.n) * 40, d.normal(K).abs() * 0.3),
    (dead_zone.codes_of, "double"): lambda d: (
        d.normal(K, d.n).double(),
        d.placed([0.1, 0.0, 1.0, 3.0, 0.01]).double(),
    ),
    (dead_zone.codes_of, "both"): lambda d: (d.normal(K, d.n), d.normal(K).abs().double()),
    (dead_zone.values_of_codes, ""): lambda d: ((d.normal(K, 3, d.n) * 40).to(torch.int8), d.normal(K)),
    (dead_zone.values_of_codes, "turned"): lambda d: ((d.normal(K, d.n, 3) * 40).to(torch.int8).mT, d.normal(K)),
    (matrices.add_components, "dense"): lambda d: components(d, (90, 40)),
    (matrices.add_components, "not a number"): lambda d: components(d, (90, 40), math.nan),
    (matrices.add_components, "conv"): lambda d: components(d, (9, 8, 5, 5)),
    (dead_zone.rounded, ""): lambda d: (d.normal(K, d.n).double() * d.placed([[0.0], [1.0], [3.0], [1e-9], [1e9]]), 20),
    (dead_zone.rounded, "turned"): lambda d: (d.normal(K, 9, d.n // 9).double().mT, 26),
    (dead_zone.rounded, "tiny"): lambda d: (d.normal(K, 9).double() * 2.0**-1030, 20),
    (dead_zone.rounded, "halves"): lambda d: (d.normal(K, d.n).mul(8).round().double() / 2, 5),
    (dead_zone.rounded, "no number"): lambda d: (d.normal(K, 9).double() / 0, 12),
    (count.index_sizes, ""): sparse,
    (index.places_of, ""): lambda d: (d.coin(d.n),),
    (count.written_sizes, ""): lambda d: (coded_leaves(d, K),),
    (count.written_sizes, "nothing"): lambda d: ({},),
    (versions.read_back, ""): written_update,
    (byte_budget.sent_by_each, ""): doubled_by_each,
    (subspace.eigen_pairs, ""): symmetric,
    (subspace.in_two_planes, ""): lambda d: (
        d.normal(K, 9, d.n).double() * d.placed([[[0.0]], [[1.0]], [[1e9]], [[3.0]], [[1e-9]]]),
    ),
    (subspace.in_two_planes, "turned"): lambda d: (d.normal(K, 9, d.n).double().mT,),
    (subspace.in_two_planes, "no number"): lambda d: (d.normal(K, 9, 9).double() / 0,),
    (subspace.whole_numbers, ""): lambda d: (d.normal(K, 9, 5).double() * d.placed([0.0, 1.0, 1e9, 3.0, 1e-9]),),
    (subspace.whole_numbers, "wide"): lambda d: (d.normal(K, d.n, 40).double(),),
    (subspace.whole_numbers, "turned"): lambda d: (d.normal(K, 9, d.n).double().mT,),
    (subspace.whole_product, ""): lambda d: planes_and_codes(d, d.n, 30),
    (subspace.whole_product, "turned"): lambda d: planes_and_codes(d, 30, d.n, turned=True),
    (subspace.whole_product, "largest"): lambda d: planes_and_codes(d, 5, 140_000 if d.large else 1000, 1e9),
    (parcel_sizes.upload_sizes, ""): partial(parcels, up=True),
    (parcel_sizes.download_sizes, ""): partial(parcels, up=False),
    (divergence.difference_sums, ""): lambda d: (
        [(d.normal(K, d.n), d.normal(1, d.n)), (d.normal(1, 3), d.normal(1, 3))],
        K,
    ),
    (bank.put_rows, ""): lambda d: (d.normal(9, 3, d.n), d.placed([4, 0, 7]), d.normal(3, 3, d.n)),
    (bank.put_rows, "one for all"): lambda d: (
        d.normal(9, d.n),
        d.placed([4, 0, 7]),
        d.normal(1, d.n).expand(3, -1),
    ),
    (bank.mix_rows, ""): lambda d: ({"w": d.normal(9, d.n)}, np.array([4, 0, 7]), d.normal(K, 3).cpu().double()),
    (optim.add_product, ""): lambda d: (d.normal(K, 20, 30), d.normal(K, 20, 4), d.normal(K, 4, 30), 0.1),
    (call.seems_finite, ""): lambda d: (d.normal(K, d.n),),
    (call.seems_finite, "not"): lambda d: (d.normal(K, d.n) / 0,),
}
ELSEWHERE = {
    parcel_sizes.join_sizes,  # takes a whole job: tests/accel/test_joined_sizes.py
    *(rans.plan_rans, rans.in_one_state, rans.read_one_state, rans.in_lanes, rans.read_lanes),  # test_compiled.py
    *(index.quotient_sum, levels.class_of_kept, tight_values.sums_of, rate_distortion.judged),  # there too
    *(tight_index.encode_tight_index, tight_values.encode_tight_values),  # test_tight_bodies.py
}
NEAR = {
    factors.factor_product: 1e-4,
    factors.gram_of_rows: 1e-9,
    optim.add_product: 1e-5,
    divergence.difference_sums: 1e-9,
    bank.mix_rows: 1e-5,
}
"""On a GPU: what its bodies' docstrings leave to rounding."""
BY_SIGN = {svd.strongest_eigenvectors, low_rank.decompose_weights}
"""Vectors whose sign is anyone's: on a GPU their products are compared, in tests of their own."""


def ids(case: tuple[object, str]) -> str:
    op, kind = case
    return f"{op.__name__} {kind}".strip()  # type: ignore[attr-defined]


WRITING = {votes.add_votes, bank.put_rows, matrices.add_components}
"""They write over what they are given first."""


def outcome(run: Callable, op: object, args: tuple) -> object:
    found = run(*args)
    return (
        args[0] if op in (votes.add_votes, bank.put_rows, matrices.add_components) else found
    )  # it writes over what it was given


def compare(fast: object, plain: object, within: float) -> None:
    if isinstance(plain, Tensor):
        assert isinstance(fast, Tensor)
        fast, plain = fast.detach().cpu(), plain.detach().cpu()
        if fast.dtype == torch.int8:  # codes, which the plain body leaves as whole float numbers
            fast = fast.to(plain.dtype)
        torch.testing.assert_close(fast, plain, rtol=within, atol=within, equal_nan=True)
    elif isinstance(plain, Mapping):
        assert isinstance(fast, Mapping)
        assert list(fast) == list(plain)
        for name in plain:
            compare(fast[name], plain[name], within)
    elif isinstance(plain, (list, tuple)):
        assert len(fast) == len(plain)  # type: ignore[arg-type]
        for one, other in zip(fast, plain, strict=True):  # type: ignore[call-overload]
            compare(one, other, within)
    elif isinstance(plain, np.ndarray):
        assert np.array_equal(*np.broadcast_arrays(fast, plain))  # type: ignore[arg-type]
    elif callable(plain):
        compare(fast(), plain(), within)  # type: ignore[operator]
    else:
        assert fast == plain


def test_every_body_is_compared():
    faster = {op for op in OPERATIONS if op.body is not op.plain}
    assert faster == {op for op, _ in CASES} | ELSEWHERE


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_both_bodies_give_the_same_bits(case, large):
    op, make = case[0], CASES[case]
    fast, plain = (outcome(run, op, make(Draw("cpu", large))) for run in (op.body, op.plain))
    compare(fast, plain, 0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("case", [case for case in CASES if case[0] not in {*BY_SIGN, svd.begins_anew}], ids=ids)
def test_a_gpu_gives_what_the_plain_body_gives_on_the_cpu(case, large):
    op, make = case[0], CASES[case]
    fast = outcome(op.body, op, make(Draw("cuda", large)))
    compare(fast, outcome(op.plain, op, make(Draw("cpu", large))), NEAR.get(op, 0.0))


@pytest.mark.gpu
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_a_gpu_spans_what_the_cpu_spans(large):
    (found, plain), (state, want) = (
        (op.body(*make(Draw("cuda", large))), op.plain(*make(Draw("cpu", large))))
        for op, make in ((svd.strongest_eigenvectors, grams), (low_rank.decompose_weights, decomposition))
    )
    for v, w in zip(found, plain, strict=True):
        torch.testing.assert_close((v @ v.mT).cpu(), w @ w.mT, rtol=1e-7, atol=1e-7)
    for name in ("1.weight", "2.weight"):
        a, b = (state[0][f"{part}/{name}"].cpu() for part in "ab")
        torch.testing.assert_close(a @ b, want[0][f"a/{name}"] @ want[0][f"b/{name}"], rtol=1e-4, atol=1e-4)
    assert dict(state[1]) == pytest.approx(dict(want[1]), abs=1e-5)


def product(d: Draw) -> Product:
    return Product(d.normal(K, 4, 30), d.normal(K, 4, 20))


LAZY: dict[tuple[object, str], Case] = {
    (ops.add_each, ""): lambda d: ([product(d)], [d.normal(1, 30, 20)]),
    (ops.increments, ""): lambda d: ({"w": product(d)}, {"w": d.normal(1, 30, 20)}, {"w": None}),
    (ops.increments, "masked"): lambda d: ({"w": product(d)}, {"w": d.normal(1, 30, 20)}, {"w": d.coin(1, 30, 20)}),
    (ops.increments, "sums"): partial(after_training, grown=True),
    (ops.increments, "grown"): lambda d: (Grown(w := {"w": d.normal(1, 30, 20)}, {"w": product(d)}), w, {"w": None}),
    (ops.against_model, ""): lambda d: (
        {"w": d.normal(1, 30, 20)}, {"w": d.normal(1, 30, 20)}, {"w": product(d)}, {"w": d.coin(1, 30, 20)},
    ),
    (reduce.dots, ""): lambda d: ([Term(product(d), d.normal(1, 30, 20))], K),
    (reduce.keep_largest, ""): lambda d: ([product(d)], [9]),
    (call.seems_finite, ""): lambda d: (product(d),),
    (fold.add_to_sums, ""): lambda d: (
        {}, {"w": product(d)}, SHARES, Grid(limits_of({"w": torch.zeros(1, 30, 20, device=d.device)}), 1.0), d.ctx,
    ),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", LAZY, ids=ids)
def test_sums_and_products_that_nobody_formed_come_out_within_rounding(case, device):
    op, make = case[0], LAZY[case]
    compare(op.body(*make(Draw(device, False))), op.plain(*make(Draw("cpu", False))), 1e-4)


METHODS: dict[str, list] = {
    "fedavg": ["fedavg"],
    "psfed+topk+int8+memory": ["psfed", "topk", "int8", "memory"],
    "fedscr": ["fedscr"],
    "sr-fedavg+topk": ["sr-fedavg", "topk"],
    "pfedsim": ["pfedsim"],
    "pfedsim, published": [{"pfedsim": {"mode": "published"}}],
    "fedhm": ["fedhm"],
    "stein with masks": ["psfed", "stein"],
    "median": ["median"],
}


@pytest.mark.parametrize("engine", ["vector", "debug"])
@pytest.mark.parametrize("name", METHODS)
def test_with_plain_bodies_a_run_has_the_same_bits_and_bytes(name, engine):
    def run():
        how = {"rounds": 3, "sample": 5, "seed": 3, "local": {"steps": 2}, "engine": engine}
        return sparing.run("digits", METHODS[name], plan={"path": "loop", "chunk": 3}, **how)

    fast = run()
    with plain_bodies():
        plain = run()
    assert plain.model_sha256 == fast.model_sha256
    assert (plain.up_bytes, plain.down_bytes) == (fast.up_bytes, fast.down_bytes)
    assert [record.metrics for record in plain.table] == [record.metrics for record in fast.table]
