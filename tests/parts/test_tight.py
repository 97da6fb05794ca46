"""Tight: the same values in fewer bytes, whatever stands before it."""

import pytest
import torch

import sparing
from sparing.core.codec import chain, feedback
from sparing.core.errors import MethodError
from sparing.core.method import View
from sparing.core.parcel import Leaf, Parcel, Schema, Spec
from sparing.core.tree import Layout
from sparing.parts.code import quantisers, sparsifiers
from sparing.parts.code.tight import tight_codec
from sparing.wire import from_bytes, nbytes, to_bytes
from support import make_ctx

LAYOUT = Layout({"w": (60, 80), "b": (60,)}, {"w": torch.float32, "b": torch.float32}, frozenset())
STAGES = {
    "topk": [sparsifiers.topk_codec(LAYOUT, 0.05)],
    "int8": [quantisers.uniform_codec(LAYOUT, 8)],
    "topk+int8": [sparsifiers.topk_codec(LAYOUT, 0.05), quantisers.uniform_codec(LAYOUT, 8)],
    "topk+sign": [sparsifiers.topk_codec(LAYOUT, 0.05), quantisers.sign_codec(LAYOUT)],
    "ternary": [quantisers.ternary_codec(LAYOUT)],
    "fp16": [quantisers.half_codec(LAYOUT, torch.float16)],
}


def updates(k: int = 3) -> Parcel:
    g = torch.Generator().manual_seed(0)
    scale = torch.rand(k, 60, 1, generator=g) ** 4 * torch.rand(k, 1, 80, generator=g) ** 4  # rows and columns differ
    w, b = torch.randn(k, 60, 80, generator=g) * scale, torch.randn(k, 60, generator=g)
    return Parcel({"w": Leaf(w), "b": Leaf(b)}, {"n": torch.ones(k)})


def plain() -> Schema:
    return Schema({"w": Spec((60, 80)), "b": Spec((60,))}, {"n": 1})


@pytest.mark.parametrize("stages", STAGES)
def test_the_same_values_arrive_in_no_more_bytes(stages):
    ctx = make_ctx([1, 4, 7])
    loose, narrow = chain(*STAGES[stages]), chain(*STAGES[stages], tight_codec())
    view = View(ctx, {}, {}, {})
    sent, shorter = loose.encode(updates(), {}, view)[0], narrow.encode(updates(), {}, view)[0]
    for k in range(3):
        data = to_bytes(shorter, k)
        assert len(data) == int(nbytes(shorter)[k]) <= int(nbytes(sent)[k])
        one = ctx.at(slice(k, k + 1))
        arrived = narrow.decode(from_bytes(data, narrow.schema(plain(), one)), one)
        for name, leaf in loose.decode(sent, ctx).leaves.items():
            assert torch.equal(arrived.leaves[name].value[0], leaf.value[k])
            assert not arrived.leaves[name].tight


def test_positions_that_cluster_cost_less():
    ctx = make_ctx([1, 4, 7])
    sent = [
        chain(*c).encode(updates(), {}, View(ctx, {}, {}, {}))[0]
        for c in (STAGES["topk"], [*STAGES["topk"], tight_codec()])
    ]
    assert bool((nbytes(sent[1]) < nbytes(sent[0])).all())


def test_memory_remembers_the_same():
    ctx = make_ctx([1, 4, 7])
    stages, view = STAGES["topk+int8"], View(ctx, {}, {}, {})
    left = [feedback(chain(*codecs)) for codecs in (stages, [*stages, tight_codec()])]
    states = [
        codec.encode(updates(), {n: x.expand(3, *x.shape[1:]) for n, x in codec.init(LAYOUT).items()}, view)[1]
        for codec in left
    ]
    for name in ("w", "b"):
        assert torch.equal(states[0][f"residual/{name}"], states[1][f"residual/{name}"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        ["topk", "int8", "tight", "memory"],
        [{"psfed": {"selector": "magnitude"}}, "topk", "tight"],
        ["personal", "powersgd", "tight"],
        ["fedscr", "qsgd", "tight"],
        ["lowrank", "tight"],
        ["topk", "ecsq", "tight"],
    ],
    ids=str,
)
def test_both_engines_count_the_bytes_they_write(method):
    study = {"rounds": 3, "sample": 4, "seed": 1, "local": {"steps": 3}, "evaluate": {"every": 3}}
    fast, plain = (sparing.run("digits", method, engine=e, plan={"path": "loop"}, **study) for e in ("vector", "debug"))
    assert fast.model_sha256 == plain.model_sha256
    assert fast.up_bytes == plain.up_bytes
    loose = sparing.run("digits", [part for part in method if part != "tight"], plan={"path": "loop"}, **study)
    assert loose.model_sha256 == fast.model_sha256
    assert fast.up_bytes <= loose.up_bytes


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (["tight"], "tight has nothing to write"),
        (["tight", "topk"], "tight has nothing to write"),
        (["topk", "tight", "int8"], "'int8' cannot change what is written already; put 'tight' last"),
    ],
    ids=str,
)
def test_out_of_place(method, words):
    with pytest.raises(MethodError, match=words):
        sparing.run("digits", method, rounds=1, sample=2)
