"""The Triton kernels in Triton's interpreter, on a CPU and on few numbers, against the plain bodies: `make kernels`.

Every test names the kernels that it goes through, and fails if it goes through others. What no test names must be
excused below, with the reason; that is checked without Triton too.
"""

import ast
import functools
import math
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sparing
from sparing.accel import lazy_product
from sparing.accel.cuda import has_triton
from sparing.accel.grown import Grown
from sparing.core import fold, keys, ops, reduce
from sparing.core.errors import UploadError
from sparing.core.grid import Grid, limits_of
from sparing.core.method import Blended
from sparing.core.reduce import Term
from sparing.engines import divergence
from sparing.parts import factors
from sparing.parts.blend import stein
from sparing.storage import bank
from sparing.train.keyed_layers import KeyedStep
from sparing.wire import count
from sparing.wire.count import Mask
from support import make_ctx

FOLDERS = [Path(sparing.__file__).parent / "accel" / part for part in ("cuda", "train_cuda/kernels")]
BODIES = ("fold", "reduce", "tree", "wire", "fedhm", "engine", "stein")
EXCUSED: dict[str, str] = {}
"""Kernels that the interpreter cannot run, and why."""
NAMED: set[str] = set()
K = 3
SHAPES = {"conv": (4, 3, 3, 3), "bias": (7,), "one": (), "long": (1100,)}
SHARES = torch.tensor([0.25, 0.0, 0.125], dtype=torch.float64)


def kernels_in_source() -> dict[str, Path]:
    """Every function of the two folders under `triton.jit`, and its file."""
    return {
        node.name: path
        for folder in FOLDERS
        for path in sorted(folder.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    }


def runs(*names: str) -> Callable[[Callable], Callable]:
    """A test that goes through just these kernels."""
    NAMED.update(names)

    def marked(test: Callable) -> Callable:
        @functools.wraps(test)
        def watched(*args: object, **kwargs: object) -> None:
            entered: set[str] = set()
            files = {str(path) for path in kernels_in_source().values()}

            def note(frame, event, _):
                if event == "call" and frame.f_code.co_filename in files:
                    entered.add(frame.f_code.co_name)

            before = sys.getprofile()
            sys.setprofile(note)
            try:
                with np.errstate(all="ignore"):  # a GPU does not warn of 0 * inf either
                    test(*args, **kwargs)
            finally:
                sys.setprofile(before)
            assert entered & kernels_in_source().keys() == set(names)

        interpreted = has_triton() and os.environ.get("TRITON_INTERPRET") == "1"
        skip = pytest.mark.skipif(not interpreted, reason="needs Triton and TRITON_INTERPRET=1: make kernels")
        return pytest.mark.kernels(skip(watched))

    return marked


def test_every_kernel_is_run_or_excused():
    assert kernels_in_source().keys() == NAMED | EXCUSED.keys()
    assert not NAMED & EXCUSED.keys()


# ------------------------------------------------------------------------------------------------------ accel/cuda


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tree(rows: int, seed: int = 0) -> dict[str, Tensor]:
    return {name: normal(rows, *shape, seed=seed + i) for i, (name, shape) in enumerate(SHAPES.items())}


def masks(rows: int, seed: int) -> dict[str, Tensor | None]:
    drawn: dict[str, Tensor | None] = {name: x > 0 for name, x in tree(rows, seed).items()}
    return drawn | {"bias": None}


def by_kernels(op, *args: object) -> object:
    """What the faster body gives where it takes its kernels for tensors of a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        for name in BODIES:
            patch.setattr(f"sparing.accel.{name}_bodies.takes_kernels", lambda x: True)
        return op.body(*args)


def same(found: object, wanted: object, within: float = 0.0) -> None:
    torch.testing.assert_close(found, wanted, rtol=within, atol=within, equal_nan=True)


@pytest.fixture
def loops_count_in_tensors(monkeypatch):
    """As on a device; in the interpreter a loop gives plain numbers, which have no `.to`."""
    if not has_triton():
        return
    from sparing.accel.cuda import fold as room

    def counted(stop):
        from triton.runtime.interpreter import interpreter_semantic

        return (interpreter_semantic.to_tensor(k, False) for k in range(int(stop)))

    monkeypatch.setattr(room, "range", counted, raising=False)


@runs("fold_kernel")
@pytest.mark.usefixtures("loops_count_in_tensors")
def test_updates_are_added_up_on_their_grids():
    model, ctx = tree(1, 9), make_ctx(list(range(K)))
    grid = Grid(limits_of(model), 1.0)
    once = by_kernels(fold.add_to_sums, {}, tree(K), SHARES, grid, ctx)
    same(once, fold.add_to_sums.plain({}, tree(K), SHARES, grid, ctx))
    twice = by_kernels(fold.add_to_sums, once, tree(K, 50), SHARES, grid, ctx)
    same(twice, fold.add_to_sums.plain(once, tree(K, 50), SHARES, grid, ctx))


@runs("fold_kernel")
@pytest.mark.usefixtures("loops_count_in_tensors")
@pytest.mark.parametrize("size", [1e9, math.inf, math.nan])
def test_an_update_beyond_its_grid_is_refused_by_name(size):
    update, ctx = tree(K), make_ctx([5, 8, 2])
    grid = Grid(limits_of(tree(1)), 1.0)
    update["long"][1, 1050] = size
    with pytest.raises(UploadError, match=r"client 8.*long"):
        by_kernels(fold.add_to_sums, {}, update, SHARES, grid, ctx)


@runs("thirds_kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_stand_in_three_parts(dtype):
    from sparing.accel.cuda.fold import left_in_thirds

    left = normal(K, 2, 5).to(dtype)
    thirds = [left_in_thirds(left, SHARES), lazy_product._in_thirds(left, SHARES)]
    found, wanted = (x.double().unflatten(1, (3, 5)).sum(1) for x in thirds)
    same(found, wanted)  # each part alone may differ: the interpreter cuts off what a GPU rounds to bfloat16


@runs("sum_kernel", "fold_halves")
@pytest.mark.parametrize("n", [1, 7, 300, 5000])
def test_rows_are_added_up_in_the_same_order(n):
    same(by_kernels(reduce.total, normal(K, n)), reduce.total.plain(normal(K, n)))
    same(by_kernels(reduce.total, normal(K, n) > 0), reduce.total.plain(normal(K, n) > 0))


@runs("dot_kernel", "shifted_term", "sum_kernel", "fold_halves")
@pytest.mark.parametrize("paired", [False, True])
def test_products_are_added_up_in_the_same_order(paired):
    terms = [
        Term(x, normal(1, *x.shape[1:], seed=3), None, x * 2 + 1 if paired else None, None if i % 2 else x > 0)
        for i, x in enumerate([*tree(K).values(), normal(K, 5000)])
    ]
    same(by_kernels(reduce.dots, terms, K), reduce.dots.plain(terms, K))


SELECTING = ("digits_kernel", "mark_kernel", "compared_numbers", "settled", "sharing", "undecided")


@runs(*SELECTING)
@pytest.mark.parametrize("kind", ["normal", "ties", "nan"])
def test_the_largest_are_those_of_the_plain_body(kind, monkeypatch):
    from sparing.accel.cuda import select

    monkeypatch.setattr(select, "BLOCK", 256)
    monkeypatch.setattr(select, "TILE", 64)
    xs = [normal(K, 600), normal(K, 1, seed=1), normal(K, 3, 30, seed=2)]
    xs = [x.round() for x in xs] if kind == "ties" else xs
    if kind == "nan":
        xs[0][0, :9], xs[0][1, 300] = math.nan, -math.inf
    counts = [torch.tensor([5, 40, 600]), 1, 17]
    same(by_kernels(reduce.keep_largest, xs, counts), reduce.keep_largest.plain(xs, counts))


@runs(*SELECTING, "word", "mix_words")
@pytest.mark.parametrize(("d", "k"), [(10, 3), (700, 1), (700, 650)])
def test_positions_are_chosen_as_by_the_plain_body(d, k, monkeypatch):
    from sparing.accel.cuda import select

    monkeypatch.setattr(select, "BLOCK", 256)
    monkeypatch.setattr(select, "TILE", 64)
    of = make_ctx([3, 8, 11]).keys("m")
    same(by_kernels(keys.choose, of, d, k), keys.choose.plain(of, d, k))


@runs(*SELECTING, "next_below", "word", "mix_words")
def test_words_that_share_all_digits_looked_for_are_told_apart(monkeypatch):
    from sparing.accel.cuda import select

    monkeypatch.setattr(select, "PASSES", 1)
    of = make_ctx([3, 8]).keys("m")
    same(by_kernels(keys.choose, of, 900, 400), keys.choose.plain(of, 900, 400))


@runs("look_kernel", "join_kernel", "gaps_kernel", "load_block", "larger")
@pytest.mark.parametrize("share", [0.0, 0.02, 0.4, 1.0])
def test_indices_take_the_bytes_that_the_plain_body_counts(share, monkeypatch):
    from sparing.accel.cuda import gaps

    monkeypatch.setattr(gaps, "BLOCK", 128)
    monkeypatch.setattr(gaps, "MANY", 4)
    few, many = torch.rand(K, 900, generator=torch.Generator().manual_seed(0)) < share, normal(1, 900) > 0
    some = [Mask(few), Mask(few & many, many), Mask(many, None, travels=False), Mask(few[:, :9])]
    found, wanted = by_kernels(count.index_sizes, some)(), count.index_sizes.plain(some)()
    for one, other, mask in zip(found, wanted, some, strict=True):
        assert np.all(one.kept == other.kept)
        assert np.all(one.size == other.size) or not mask.travels


@runs("overlay_kernel", "block_of")
@pytest.mark.parametrize("rows", [1, K])
def test_what_came_is_written_over_what_a_client_has(rows, monkeypatch):
    from sparing.accel.cuda import cut

    monkeypatch.setattr(cut, "BLOCK", 512)
    given = tree(K), tree(rows, 20), masks(rows, 40)
    same(by_kernels(ops.overlay, *given), ops.overlay.plain(*given))


@runs("cut_kernel", "block_of")
@pytest.mark.parametrize("grown", [False, True])
@pytest.mark.parametrize("rows", [1, K])
def test_what_was_learned_is_cut_to_what_goes_up(grown, rows, monkeypatch):
    from sparing.accel.cuda import cut

    monkeypatch.setattr(cut, "BLOCK", 512)
    base, start, added, inside = tree(1), tree(rows, 20), tree(K, 40), masks(rows, 60)
    after = {name: start[name] + x for name, x in added.items()}
    wanted = ops.increments.plain(after, base, inside)
    same(by_kernels(ops.increments, Grown(start, added) if grown else after, base, inside), wanted)


@runs("factor_kernel")
def test_factors_are_multiplied_out_within_rounding():
    for a, b in ((normal(K, 30, 18), normal(K, 18, 70)), (normal(K, 6, 4, 3, 1), normal(K, 4, 8, 1, 2))):
        same(by_kernels(factors.factor_product, a, b), factors.factor_product.plain(a, b), 1e-5)


@runs("mix_kernel")
def test_rows_are_mixed_within_rounding():
    weight = normal(20, 3).double()
    weight[0, 1] = 0
    rows, index = {"w": normal(9, 2, 150), "b": normal(9, 1)}, np.array([4, 0, 7])
    same(by_kernels(bank.mix_rows, rows, index, weight), bank.mix_rows.plain(rows, index, weight), 1e-5)


@runs("spread_kernel", "block_of")
@pytest.mark.parametrize("k", [1, 20])
def test_differences_are_added_up_within_rounding(k):
    pairs = [(normal(*shape), normal(1, *shape[1:], seed=1)) for shape in ((1, 30, 7), (k, 150), (k, 1))]
    found, wanted = by_kernels(divergence.difference_sums, pairs, k), divergence.difference_sums.plain(pairs, k)
    same(found, wanted, 1e-12)


def shrinking() -> tuple[stein.SteinSettings, dict[str, Tensor], Blended, dict[str, stein.SteinAim]]:
    settings, names = stein.SteinSettings(warmup=1), list(SHAPES)
    state = stein.first_state(tree(1), settings)
    state |= {n: normal(*x.shape, seed=7).double() for n, x in state.items() if n.startswith(("sum", "target"))}
    state |= {name: torch.full_like(x, 0.5) for name, x in state.items() if name.startswith("mass")}
    state["rounds"] += 3
    away = {"away": normal(K, len(names)).double().square() * 1e4}
    update = {name: x.double() for name, x in tree(1, 30).items()}
    blended = Blended(update, dict.fromkeys(names), torch.arange(K), SHARES, away)
    return settings, state, blended, stein.this_rounds_targets(state, dict.fromkeys(names, 0), blended, settings)


@runs("measure_kernel", "fold_halves", "dot_kernel", "shifted_term", "sum_kernel")
def test_layers_have_the_same_coefficients():
    settings, state, blended, aims = shrinking()
    given = blended, aims, state, make_ctx(list(range(K))), settings
    same(by_kernels(stein.stein_coefficients, *given), stein.stein_coefficients.plain(*given))


@runs("shrink_kernel", "block_of")
@pytest.mark.parametrize("pulled", [False, True])
def test_layers_are_shrunk_alike(pulled):
    settings, state, blended, aims = shrinking()
    c = torch.linspace(0.1, 1.0, len(SHAPES), dtype=torch.float64) if pulled else None
    given = state, list(SHAPES), blended, aims, c, settings
    same(by_kernels(stein.shrink_and_follow, *given), stein.shrink_and_follow.plain(*given))


# ------------------------------------------------------------------------------------------ accel/train_cuda/kernels


def layer(name: str):
    return import_module(f"sparing.accel.train_cuda.kernels.{name}")


def same_with_gradients(mine: Callable, torchs: Callable, *given: Tensor, within: float) -> None:
    """Both layers of K clients, and the gradients of all that they were given."""
    wanted = torch.stack([torchs(*row) for row in zip(*given, strict=True)])
    slope = normal(*wanted.shape, seed=5)

    def one(layer: Callable, slope: Tensor, *row: Tensor) -> tuple:
        out, back = torch.func.vjp(layer, *row)
        return out, back(slope)

    out, grads = torch.func.vmap(functools.partial(one, mine))(slope, *given)
    same(out, wanted, within)
    for k, row in enumerate(zip(slope, *given, strict=True)):
        same(tuple(x[k] for x in grads), one(torchs, *row)[1], within)


@runs("gather_kernel", "correlate_kernel")
@pytest.mark.parametrize(("channels", "stride", "relu"), [(3, 1, False), (16, 2, True)])
def test_convolutions_gather_their_patches(channels, stride, relu):
    taps = layer("gather").Taps(3, 3, stride, 1, relu)
    given = normal(2, 2, channels, 5, 6), normal(2, 4, channels, 3, 3, seed=1), normal(2, 4, seed=2)

    def plain(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        z = F.conv2d(x, w, bias, stride, 1)
        return z.relu() if relu else z

    apply = layer("convolve").Convolution.apply
    same_with_gradients(lambda x, w, b: apply(x, w, b, taps, "ieee"), plain, *given, within=1e-4)


@runs("slide_kernel", "row_kernel")
@pytest.mark.parametrize("relu", [False, True])
def test_convolutions_slide_over_tiles(relu):
    taps = layer("gather").Taps(3, 3, 1, 1, relu)
    given = normal(2, 2, 16, 5, 6), normal(2, 16, 16, 3, 3, seed=1), normal(2, 16, seed=2)

    def plain(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        z = F.conv2d(x, w, bias, 1, 1)
        return z.relu() if relu else z

    apply = layer("convolve").Convolution.apply
    same_with_gradients(lambda x, w, b: apply(x, w, b, taps, "tf32"), plain, *given, within=1e-4)


@runs("pool_kernel")
@pytest.mark.parametrize(("relu", "flat"), [(False, False), (True, True)])
def test_pools_take_the_largest_of_a_window(relu, flat):
    def plain(x: Tensor) -> Tensor:
        return F.max_pool2d(x.relu() if relu else x, 2)

    apply = layer("pool").Pool.apply
    same_with_gradients(lambda x: apply(x, 2, relu, flat), plain, normal(2, 2, 3, 5, 6).round(), within=0.0)


@runs("entropy_kernel")
def test_cross_entropy_is_that_of_torch():
    y = torch.tensor([0, 4, -100])
    apply = layer("entropy").Entropy.apply
    same_with_gradients(
        lambda z: apply(z, y), lambda z: F.cross_entropy(z, y, reduction="none"), normal(2, 3, 5), within=1e-5
    )


@runs("drop_kernel", "mix_words")
def test_dropout_draws_what_the_keyed_layer_draws():
    of, x, apply = make_ctx([3, 8]).keys("drop"), normal(2, 30, 50), layer("drop").Drop.apply
    step = KeyedStep()
    step.begin(of)
    step.uniform(2)
    scale = step.scale(x.numel(), 0.3, torch.float32).view_as(x)

    def one(x: Tensor, key: Tensor) -> tuple:
        out, back = torch.func.vjp(lambda x: apply(x, key, 2, 0.3), x)
        return out, back(torch.ones_like(x))[0]

    out, slope = torch.func.vmap(one)(x, of)
    same(out, x * scale)
    same(slope, scale)


@runs("gram_kernel")
def test_inputs_meet_those_of_earlier_steps():
    h, past = normal(2, 3, 200), normal(2, 6, 200, seed=1)
    found = layer("dense").gram(h, past, torch.tensor([1]), "ieee")
    wanted = h @ past.mT
    wanted[:, :, 3:] = 0
    same(found, wanted, 1e-4)


@runs("spread_moves_kernel")
def test_gradients_go_back_through_earlier_steps():
    base, p, past = normal(2, 3, 200), normal(2, 3, 6, seed=1), normal(2, 6, 200, seed=2)
    found = layer("dense").spread_moves(base, p, past, torch.tensor([1]), "ieee")
    same(found, base + p[:, :, :3] @ past[:, :3], 1e-4)


@runs("put_kernel")
def test_visits_are_put_behind_earlier_ones():
    x, past = normal(2, 3, 200), normal(2, 6, 200, seed=1)
    wanted = torch.cat([past[:, :3], x * -0.5], 1)
    layer("dense").put_rows(x, past, torch.tensor([1]), -0.5)
    same(past, wanted)


@runs("step_kernel")
def test_both_factors_of_a_layer_take_their_step():
    a, b, grad = normal(2, 9, 4), normal(2, 4, 200, seed=1), normal(2, 4, 200, seed=2)
    of_a, of_b = factors.along_factors(factors.factor_pace(a, b), a)
    lr, decay = 0.1, 0.01
    wanted_b = b - lr * (grad + decay * of_b * (a.mT @ a) @ b)
    wanted_a = a - lr * decay * a @ (of_a * (b @ b.mT))
    near = torch.empty_like(b, dtype=torch.bfloat16)
    layer("decay").step_together(a, b, near, grad, lr, decay)
    same(b, wanted_b, 1e-5)
    same(a, wanted_a, 1e-5)
    same(near.float(), b, 2**-7)
