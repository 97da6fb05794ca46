"""Laws of codecs: chains associate, lossless chains are the identity, feedback conserves, rows are as alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparing.core.codec import chain, feedback
from sparing.core.parcel import Cut, Parcel, Schema, parcel_row, spec_of_cut
from sparing.core.tree import expand_rows, take_rows
from sparing.parts.code import dgc, ecsq, eden, ef21, lowrank, powersgd, quantisers, sparsifiers
from sparing.parts.code.budget import byte_budget
from sparing.wire import from_bytes, nbytes, to_bytes
from support import make_ctx, small_layout, update_parcel, view_of

LAYOUT = small_layout()
FLOATS = LAYOUT.params

CODECS = {
    "topk": lambda: sparsifiers.topk_codec(LAYOUT, 0.1),
    "topk model": lambda: sparsifiers.topk_codec(LAYOUT, 0.2, over="model"),
    "topk quantile": lambda: sparsifiers.topk_codec(LAYOUT, 0.3, mode="quantile"),
    "randk": lambda: sparsifiers.randk_codec(LAYOUT, 0.3),
    "int8": lambda: quantisers.uniform_codec(LAYOUT, 8),
    "int8 stochastic": lambda: quantisers.uniform_codec(LAYOUT, 8, stochastic=True),
    "int3": lambda: quantisers.uniform_codec(LAYOUT, 3),
    "fp16": lambda: quantisers.half_codec(LAYOUT, torch.float16),
    "bf16": lambda: quantisers.half_codec(LAYOUT, torch.bfloat16),
    "topk+int8": lambda: chain(sparsifiers.topk_codec(LAYOUT, 0.1), quantisers.uniform_codec(LAYOUT, 8)),
    "int8+topk": lambda: chain(quantisers.uniform_codec(LAYOUT, 8), sparsifiers.topk_codec(LAYOUT, 0.1)),
    "topk+randk": lambda: chain(sparsifiers.topk_codec(LAYOUT, 0.3), sparsifiers.randk_codec(LAYOUT, 0.3)),
    "randk+topk+fp16": lambda: chain(
        sparsifiers.randk_codec(LAYOUT, 0.5),
        sparsifiers.topk_codec(LAYOUT, 0.3),
        quantisers.half_codec(LAYOUT, torch.float16),
    ),
    "qsgd": lambda: quantisers.qsgd_codec(LAYOUT, 127),
    "qsgd buckets": lambda: quantisers.qsgd_codec(LAYOUT, 5, bucket=7),
    "ternary": lambda: quantisers.ternary_codec(LAYOUT),
    "sign": lambda: quantisers.sign_codec(LAYOUT),
    "topk+sign": lambda: chain(sparsifiers.topk_codec(LAYOUT, 0.2), quantisers.sign_codec(LAYOUT)),
    "sign+topk": lambda: chain(quantisers.sign_codec(LAYOUT), sparsifiers.topk_codec(LAYOUT, 0.2)),
    "randk+qsgd": lambda: chain(sparsifiers.randk_codec(LAYOUT, 0.4), quantisers.qsgd_codec(LAYOUT, 9)),
    "eden": lambda: eden.eden_codec(LAYOUT),
    "eden least": lambda: eden.eden_codec(LAYOUT, unbiased=False),
    "eden 3 bits": lambda: eden.eden_codec(LAYOUT, bits=3),
    "dgc": lambda: dgc.dgc_codec(LAYOUT, FLOATS, lambda t: sparsifiers.topk_codec(LAYOUT, 0.2), clip=1.0),
    "powersgd": lambda: powersgd.powersgd_codec(LAYOUT, 2),
    "ef21": lambda: ef21.ef21_codec(LAYOUT, FLOATS, sparsifiers.topk_codec(LAYOUT, 0.2)),
    "ecsq": lambda: ecsq.ecsq_codec(LAYOUT),
    "ecsq layer": lambda: ecsq.ecsq_codec(LAYOUT, 2.0, over="layer"),
    "topk+ecsq": lambda: chain(sparsifiers.topk_codec(LAYOUT, 0.2), ecsq.ecsq_codec(LAYOUT, 0.5)),
    "ecsq+topk": lambda: chain(ecsq.ecsq_codec(LAYOUT, 0.5), sparsifiers.topk_codec(LAYOUT, 0.2)),
    "lowrank": lambda: lowrank.components_codec(LAYOUT),
    "lowrank 2": lambda: lowrank.components_codec(LAYOUT, 1.0, rank=2),
    "budget": lambda: byte_budget.budget_codec(LAYOUT, 220),
    "budget values": lambda: byte_budget.budget_codec(LAYOUT, 200, "values"),
    "budget components": lambda: byte_budget.budget_codec(LAYOUT, 240, "components"),
}
WHOLE = {"powersgd", "ef21", "lowrank", "lowrank 2"}  # no part of a tensor alone
KINDS = ["whole", "shared", "per client"]


def scoped(k, seed, kind):
    """Whole tensors, one mask for all, or one per client."""
    if kind == "whole":
        return {}
    g = torch.Generator().manual_seed(seed)
    rows = 1 if kind == "shared" else k
    return {name: torch.rand(rows, *LAYOUT.shapes[name], generator=g) < 0.6 for name in LAYOUT.params}


def equal(a: Parcel, b: Parcel):
    assert a.leaves.keys() == b.leaves.keys()
    for name, leaf in a.leaves.items():
        other = b.leaves[name]
        assert leaf.value.dtype == other.value.dtype
        assert torch.equal(leaf.value, other.value), name
        assert len(leaf.keep) == len(other.keep)
        assert all(
            torch.equal(x.expand_as(leaf.value), y.expand_as(leaf.value))
            for x, y in zip(leaf.keep, other.keep, strict=True)
        )
        assert (leaf.scope is None) == (other.scope is None)
        assert leaf.scope is None or torch.equal(leaf.scope.expand_as(leaf.value), other.scope.expand_as(leaf.value))
        assert (leaf.scale is None) == (other.scale is None)
        assert leaf.scale is None or torch.equal(leaf.scale, other.scale)


everything = pytest.mark.parametrize("name", CODECS)
everywhere = pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in CODECS for kind in KINDS if kind == "whole" or name not in WHOLE]
)


@everywhere
def test_every_row_is_encoded_as_if_alone(name, kind):
    codec, ctx = CODECS[name](), make_ctx([2, 5, 9])
    parcel = update_parcel(LAYOUT, 3, scope=scoped(3, 1, kind))
    state = expand_rows(codec.init(LAYOUT), 3)
    for t in range(2):  # the second time with a memory
        ctx = ctx._replace(round=t)
        out, after = codec.encode(parcel, state, view_of(ctx))
        for k in range(3):
            one = slice(k, k + 1)
            alone, memory = codec.encode(parcel_row(parcel, k), take_rows(state, one), view_of(ctx.at(one)))
            equal(parcel_row(out, k), alone)
            assert all(torch.equal(x, after[name][one]) for name, x in memory.items())
        state = after


@everywhere
def test_the_receiver_builds_the_schema_itself_and_decodes_what_was_sent(name, kind):
    codec, ctx = CODECS[name](), make_ctx([2, 5, 9])
    scope = scoped(3, 2, kind)
    out, _ = codec.encode(update_parcel(LAYOUT, 3, scope=scope), codec.init(LAYOUT), view_of(ctx))
    for k in range(3):
        one = ctx.at(slice(k, k + 1))
        cuts = {
            n: Cut(scope[n] if scope[n].shape[0] == 1 else scope[n][k : k + 1]) if n in scope else Cut()
            for n in LAYOUT.shapes
        }
        plain = Schema(
            {n: spec_of_cut(LAYOUT.shapes[n], LAYOUT.dtypes[n], cut) for n, cut in cuts.items()},
            {"n": 1, "loss": 1},
            "x",
        )
        data = to_bytes(out, k, "x")
        assert len(data) == int(nbytes(out).expand(3)[k])
        back = from_bytes(data, codec.schema(plain, one))
        equal(parcel_row(out, k), back)
        equal(codec.decode(parcel_row(out, k), one), codec.decode(back, one))


@settings(max_examples=20, deadline=None)
@given(st.permutations(["topk", "randk", "int8"]), st.integers(0, 1000))
def test_chain_is_associative(names, seed):
    a, b, c = (CODECS[name]() for name in names)
    parcel, view = update_parcel(LAYOUT, 2, seed), view_of(make_ctx([1, 2]))
    left, right = chain(chain(a, b), c), chain(a, chain(b, c))
    one, two = left.encode(parcel, left.init(LAYOUT), view)[0], right.encode(parcel, right.init(LAYOUT), view)[0]
    equal(one, two)
    equal(left.decode(one, view.ctx), right.decode(two, view.ctx))


def test_lossless_chains_are_the_identity_bit_for_bit():
    parcel, view = update_parcel(LAYOUT, 2), view_of(make_ctx([1, 2]))
    for codec in (
        chain(),
        sparsifiers.topk_codec(LAYOUT, 1.0),
        sparsifiers.randk_codec(LAYOUT, 1.0),
        chain(sparsifiers.topk_codec(LAYOUT, 1.0), chain()),
    ):
        assert not codec.effect.lossy
        out, _ = codec.encode(parcel, codec.init(LAYOUT), view)
        equal(parcel, codec.decode(out, view.ctx))


EXACT = {"topk", "topk model", "topk quantile", "randk", "topk+randk"}


@everywhere
def test_feedback_conserves(name, kind):
    """decoded + residual = update + old residual, over several rounds with changing masks."""
    codec = feedback(CODECS[name]())
    state = expand_rows(codec.init(LAYOUT), 2)
    for t in range(1, 4):
        ctx = make_ctx([4, 6], t=t)
        parcel = update_parcel(LAYOUT, 2, seed=t, scope=scoped(2, t, kind))
        before = {n: state[f"residual/{n}"].clone() for n in FLOATS}
        inputs = {n: parcel.leaves[n].value.clone() for n in FLOATS}
        out, state = codec.encode(parcel, state, view_of(ctx))
        decoded = codec.decode(out, ctx)
        for n in FLOATS:
            assert torch.equal(parcel.leaves[n].value, inputs[n]), "inputs are not mutated"
            residual = state[f"residual/{n}"]
            scope = parcel.leaves[n].scope
            wanted = before[n] + inputs[n]
            got = decoded.leaves[n].value + residual
            inside = torch.ones_like(wanted, dtype=torch.bool) if scope is None else scope.expand_as(wanted)
            if name in EXACT:
                assert torch.equal(got[inside], wanted[inside])
            assert torch.allclose(got[inside], wanted[inside], rtol=1e-5, atol=1e-6)
            assert torch.equal(residual[~inside], before[n][~inside]), "out of scope the residual waits"


@everything
def test_a_lost_parcel_is_put_back(name):
    codec = feedback(CODECS[name]())
    state = expand_rows(codec.init(LAYOUT), 2)
    ctx = make_ctx([4, 6])
    parcel = update_parcel(LAYOUT, 2)
    out, after = codec.encode(parcel, state, view_of(ctx))
    put_back = codec.lost(out, after, ctx)
    for n in FLOATS:
        assert torch.allclose(put_back[f"residual/{n}"], parcel.leaves[n].value, rtol=1e-5, atol=1e-6)


def test_a_lost_parcel_is_put_back_inside_a_chain_too():
    codec = chain(feedback(sparsifiers.topk_codec(LAYOUT, 0.2)), quantisers.uniform_codec(LAYOUT, 8))
    ctx, parcel = make_ctx([4, 6]), update_parcel(LAYOUT, 2)
    out, state = codec.encode(parcel, expand_rows(codec.init(LAYOUT), 2), view_of(ctx))
    put_back = codec.lost(out, state, ctx)
    for n in FLOATS:
        step = parcel.leaves[n].value.abs().amax() / 127
        assert (put_back[f"0/residual/{n}"] - parcel.leaves[n].value).abs().max() <= step
