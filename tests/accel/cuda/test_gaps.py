import pytest
import torch

from sparing.core.parcel import Leaf, Parcel, map_tensors
from sparing.wire import parcel_sizes, sizes_later, to_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

K = 3


def bools(*shape: int, share: float) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(len(shape))) < share


def parcel(share: float) -> Parcel:
    wide, many = bools(1, 300, 70, share=0.4), bools(K, 300, 70, share=0.4)
    kept = bools(K, 300, 70, share=share)
    filters, channels = bools(K, 30, 1, 1, 1, share=share), bools(K, 1, 20, 1, 1, share=share)
    x = torch.randn(K, 300, 70)
    leaves = {
        "plain": Leaf(torch.randn(K, 7)),
        "scope": Leaf(x * wide, wide),
        "told": Leaf(x * many, many, told=True),
        "kept": Leaf(x * kept, keep=(kept,)),
        "kept in scope": Leaf(x * kept * many, many, keep=(kept & many,)),
        "kept in one scope": Leaf(x * kept * wide, wide, keep=(kept & wide,)),
        "filters": Leaf(torch.randn(K, 30, 20, 3, 3) * filters * channels, keep=(filters, channels)),
        "codes": Leaf((x * kept).sign().to(torch.int8), keep=(kept,), scale=torch.ones(K, 1), bits=2),
        "nothing": Leaf(torch.zeros(K, 9), keep=(torch.zeros(K, 9, dtype=torch.bool),)),
    }
    leaves["both"] = leaves["kept"]._replace(keep=(bools(K, 300, 1, share=0.5), kept))
    leaves["both"] = leaves["both"]._replace(value=leaves["both"].value * leaves["both"].keep[0])
    return Parcel(leaves, {"n": torch.ones(K)})


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.1, 0.3, 0.7, 1.0])
def test_sizes_are_those_of_the_bytes(share):
    here = parcel(share)
    there = parcel_sizes(map_tensors(here, lambda x: x.cuda()))
    assert all(torch.equal(there[kind], x) for kind, x in parcel_sizes(here).items())
    assert sum(there.values()).tolist() == [len(to_bytes(here, k)) for k in range(K)]


def test_what_travels_nowhere_is_only_counted():
    whole = parcel(0.5)
    here = Parcel({name: whole.leaves[name] for name in ("plain", "scope")}, whole.notes)
    later = sizes_later(map_tensors(here, lambda x: x.cuda()))
    assert all(torch.equal(later()[kind], x) for kind, x in parcel_sizes(here).items())
