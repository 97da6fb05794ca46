"""What joins the base: the residual of exact blends, and how products are written."""

import torch

from sparing.core.method import View
from sparing.core.parcel import Leaf, Parcel, Schema, Spec
from sparing.parts.size.lora.exact import residual_factors
from sparing.parts.size.lora.merged import change_of, products_codec
from sparing.wire import from_bytes, nbytes, to_bytes
from support import make_ctx

SHAPES = {"q.merged.weight": (5, 8), "c.merged.weight": (4, 3, 2, 2)}


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def test_the_residual_is_what_the_mean_of_products_has_beyond_the_product_of_means():
    b, a, weight = drawn(4, 7, 2), drawn(4, 2, 9), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    mean_b, mean_a = (torch.einsum("k,kij->ij", weight, x) for x in (b, a))
    wanted = 3.0 * (torch.einsum("k,kij,kjl->il", weight, b, a) - mean_b @ mean_a)
    left, right = residual_factors(b, a, weight, 3.0)
    assert left.shape == (7, 3 * 2)
    assert torch.allclose(left @ right, wanted, atol=1e-12)
    common_b, common_a = drawn(7, 2), drawn(2, 9)
    again = residual_factors(b + common_b, a + common_a, weight, 3.0)
    assert torch.allclose(again[0] @ again[1], wanted, atol=1e-12), "what is common to all takes no part"
    assert torch.linalg.matrix_rank(wanted) == 6


def test_products_are_written_as_factors_or_whole_whichever_is_shorter():
    codec, ctx, held = products_codec(SHAPES), make_ctx([1]), {name: torch.zeros(1, *s) for name, s in SHAPES.items()}
    for rank, whole in ((0, False), (1, False), (3, False), (4, True), (9, True)):
        pairs = {path: (drawn(m, rank), drawn(rank, n)) for path, m, n in (("q", 5, 8), ("c", 4, 12))}
        leaves = {name: Leaf(x) for path, pair in pairs.items() for name, x in change_of(path, pair).items()}
        parcel, _ = codec.encode(Parcel(leaves, {}), {}, View(ctx, held, {}, {}))
        expected = codec.schema(Schema({name: Spec(shape) for name, shape in SHAPES.items()}, {}, "x"), ctx)
        data = to_bytes(parcel, 0, "x")
        assert len(data) == int(nbytes(parcel)[0])
        assert bool(parcel.leaves["q.merged.weight/whole"].keep[0].all()) is whole
        values = 40 + 48 if whole else rank * (5 + 8 + 4 + 12)
        assert 4 * values <= len(data) < 4 * values + 60
        got = codec.decode(from_bytes(data, expected), ctx).leaves
        for path, (b, a) in pairs.items():
            name = f"{path}.merged.weight"
            assert torch.allclose(got[name].value[0].flatten(1).double(), b @ a, atol=1e-5)


def test_a_layer_that_nobody_changed_has_no_values():
    codec, ctx = products_codec(SHAPES), make_ctx([1])
    leaves = {name: Leaf(x) for name, x in change_of("q", (drawn(5, 2), drawn(2, 8))).items()}
    parcel, _ = codec.encode(Parcel(leaves, {}), {}, View(ctx, {n: torch.zeros(1) for n in SHAPES}, {}, {}))
    assert not codec.decode(parcel, ctx).leaves["c.merged.weight"].value.any()
    assert len(to_bytes(parcel, 0, "x")) < 4 * 2 * 13 + 50
