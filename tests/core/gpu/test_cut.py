import pytest
import torch
from sparing.core.learned import learned, overlaid

from sparing.accel.grown import Grown
from sparing.core.parcel import Cut, Leaf, Parcel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = {"conv": (4, 3, 3, 3), "wide": (70, 300), "bias": (5,)}


def tree(rows: int, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, *shape, generator=g) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("rows", [(1, 1), (6, 1), (1, 6), (6, 6)])
@pytest.mark.parametrize("grown", [False, True])
def test_what_is_learned_is_cut_as_on_the_cpu(rows, grown):
    base, added = tree(rows[0], 0), tree(6, 1)
    masks = {name: x > 0 for name, x in tree(rows[1], 2).items()}
    masks["wide"] = masks["wide"][:, :1, :1].expand(-1, *SHAPES["wide"])
    found = {}
    for device in ("cpu", "cuda"):
        start, more = ({name: x.to(device) for name, x in some.items()} for some in (base, added))
        after = Grown(start, more) if grown else {name: start[name] + more[name] for name in start}
        cuts = {name: Cut(mask.to(device)) for name, mask in masks.items()}
        found[device] = learned(after, Parcel({name: Leaf(x) for name, x in start.items()}, {}), cuts)
    assert all(torch.equal(found["cuda"][name].cpu(), x) for name, x in found["cpu"].items())
    assert abreast(list(found["cuda"].values())).data_ptr() == found["cuda"]["conv"].data_ptr()


def test_models_that_grew_from_another_start_are_formed_on_the_way():
    base, start, added, masks = tree(1, 0), tree(6, 1), tree(6, 2), {name: x > 0 for name, x in tree(1, 3).items()}
    found = {}
    for device in ("cpu", "cuda"):
        got = Parcel({name: Leaf(x.to(device)) for name, x in base.items()}, {})
        after = Grown(*({name: x.to(device) for name, x in some.items()} for some in (start, added)))
        found[device] = learned(after, got, {name: Cut(mask.to(device)) for name, mask in masks.items()}), after
    assert found["cuda"][1].formed.keys() == SHAPES.keys()
    for name in SHAPES:
        assert torch.equal(found["cuda"][0][name].cpu(), found["cpu"][0][name])
        assert torch.equal(found["cuda"][1][name].cpu(), found["cpu"][1][name])


@pytest.mark.parametrize("rows", [1, 6])
def test_what_came_is_written_over_as_on_the_cpu(rows):
    own, new, masks = tree(6, 0), tree(rows, 1), {name: x > 0 for name, x in tree(rows, 2).items()}
    masks["wide"] = masks["wide"][:, :1, :1].expand(-1, *SHAPES["wide"])
    parts = {name: (own[name], new[name], masks[name]) for name in SHAPES}
    there = overlaid({name: (a.cuda(), b.cuda(), mask.cuda()) for name, (a, b, mask) in parts.items()})
    assert all(torch.equal(there[name].cpu(), x) for name, x in overlaid(parts).items())
