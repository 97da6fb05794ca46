import pytest
import torch

from sparing.core.ops import against_model, move_model
from sparing.core.round import voted_count
from sparing.core.tree import Layout, cleared, tree_to

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

K = 3
SHAPES = {"a": (5, 7), "b": (11,), "c": (4, 3), "d": (6,)}
LAYOUT = Layout(SHAPES, dict.fromkeys(SHAPES, torch.float32))


def drawn():
    g = torch.Generator().manual_seed(0)
    model = {name: torch.randn(1, *shape, generator=g) for name, shape in SHAPES.items()}
    masks = {name: torch.rand(1, *shape, generator=g) < 0.5 for name, shape in SHAPES.items()}
    new_K = torch.tensor([True, False, False])
    return g, model, masks, new_K


@pytest.mark.parametrize("other", [False, True])
def test_differences_from_the_model_are_those_of_the_cpu(other):
    g, model, masks, new_K = drawn()
    arrived = {name: cleared(torch.randn(K, *shape, generator=g), masks[name]) for name, shape in SHAPES.items()}
    sent = {}
    for name, mask in masks.items():
        scope = mask | new_K.view(-1, *[1] * len(SHAPES[name]))
        sent[name] = cleared(model[name] + (0.25 if other else 0.0), scope)
    here = against_model(model, sent, arrived, masks)
    there = against_model(*(tree_to(tree, "cuda") for tree in (model, sent, arrived, masks)))
    assert list(there) == list(here)
    assert all(torch.equal(there[name].cpu(), x) for name, x in here.items())


def test_a_model_of_which_parts_move_is_that_of_the_cpu():
    g, model, masks, _ = drawn()
    covered = masks | {"c": None, "d": None}
    update = {name: torch.randn(1, *shape, generator=g).double() for name, shape in SHAPES.items()}
    there = {name: None if mask is None else mask.cuda() for name, mask in covered.items()}
    moved = move_model(tree_to(model, "cuda"), tree_to(update, "cuda"), there)
    assert all(torch.equal(moved[name].cpu(), x) for name, x in move_model(model, update, covered).items())
    again, onward = (
        move_model(moved, tree_to(update, "cuda"), there),
        move_model(tree_to(moved, "cpu"), update, covered),
    )
    assert all(torch.equal(again[name].cpu(), x) for name, x in onward.items()), "now that it stands in line"
    assert int(voted_count(tree_to(update, "cuda"), there, LAYOUT)) == int(voted_count(update, covered, LAYOUT))
