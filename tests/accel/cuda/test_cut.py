import pytest
import torch

from sparing.accel.grown import Grown
from sparing.accel.rows import in_one_row
from sparing.core.ops import increments, overlay
from sparing.core.tree import tree_to

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = {"conv": (4, 3, 3, 3), "wide": (70, 300), "bias": (5,)}


def tree(rows: int, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, *shape, generator=g) for name, shape in SHAPES.items()}


def masks_of(rows: int, seed: int) -> dict[str, torch.Tensor]:
    masks = {name: x > 0 for name, x in tree(rows, seed).items()}
    return masks | {"wide": masks["wide"][:, :1, :1].expand(-1, *SHAPES["wide"])}


@pytest.mark.parametrize("rows", [(1, 1), (6, 1), (1, 6), (6, 6)])
@pytest.mark.parametrize("grown", [False, True])
def test_what_is_learned_is_cut_as_on_the_cpu(rows, grown):
    base, added, masks = tree(rows[0], 0), tree(6, 1), masks_of(rows[1], 2)
    found = {}
    for device in ("cpu", "cuda"):
        start, more = tree_to(base, device), tree_to(added, device)
        after = Grown(start, more) if grown else {name: start[name] + more[name] for name in start}
        found[device] = increments(after, start, tree_to(masks, device))
    assert all(torch.equal(found["cuda"][name].cpu(), x) for name, x in found["cpu"].items())
    assert in_one_row(list(found["cuda"].values())).data_ptr() == found["cuda"]["conv"].data_ptr()


def test_models_that_grew_from_another_start_are_formed_on_the_way():
    base, start, added, masks = tree(1, 0), tree(6, 1), tree(6, 2), {name: x > 0 for name, x in tree(1, 3).items()}
    found = {}
    for device in ("cpu", "cuda"):
        after = Grown(tree_to(start, device), tree_to(added, device))
        found[device] = increments(after, tree_to(base, device), tree_to(masks, device)), after
    assert found["cuda"][1].formed.keys() == SHAPES.keys()
    for name in SHAPES:
        assert torch.equal(found["cuda"][0][name].cpu(), found["cpu"][0][name])
        assert torch.equal(found["cuda"][1][name].cpu(), found["cpu"][1][name])


@pytest.mark.parametrize("rows", [1, 6])
def test_what_came_is_written_over_as_on_the_cpu(rows):
    own, new, masks = tree(6, 0), tree(rows, 1), masks_of(rows, 2)
    there = overlay(tree_to(own, "cuda"), tree_to(new, "cuda"), tree_to(masks, "cuda"))
    assert all(torch.equal(there[name].cpu(), x) for name, x in overlay(own, new, masks).items())
