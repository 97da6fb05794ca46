"""A frozen base is held once, however many clients are in flight: counted by the memory that its tensors lie in."""

import gc

import pytest
import torch
from torch import nn

import sparing
from sparing.core.tree import layout_of, rest_of, tree_of
from sparing.train.working_copy import load_row, working_copy

SIDE = 61  # of the frozen weight, and of nothing else here


class Base(nn.Module):
    """A frozen dense layer under a head that trains; when it is called, it counts the copies of the frozen weight."""

    seen: set[int]
    wanted: bytes

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(SIDE, SIDE).requires_grad_(False)
        self.head = nn.Linear(SIDE, 3)

    def forward(self, x):
        type(self).seen |= {one.data_ptr() for one in memories() if bytes(one.tolist()) == self.wanted}
        return self.head(self.frozen(x).relu())


def memories():
    """What tensors lie in that are as large as the frozen weight."""
    held = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
    plain = [one for one in held if not torch._C._functorch.is_functorch_wrapped_tensor(one)]
    dense = [one for one in plain if one.layout == torch.strided]  # others, left by other tests, lie nowhere
    found = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in dense}
    return [one for one in found.values() if one.nbytes() == 4 * SIDE**2]


def copies_during(path: str, threads: int, seed: int) -> int:
    g = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(4, SIDE, generator=g), torch.arange(4) % 3) for _ in range(4)]
    task = sparing.Task(Base, pairs, pairs[0])
    Base.seen, Base.wanted = set(), bytes(task.build(seed).frozen.weight.untyped_storage().tolist())
    local = {"epochs": 1, "batch": 2, "lr": 0.1}
    plan = {"path": path, "chunk": 4, "threads": threads}
    sparing.run(task, rounds=1, sample=4, seed=seed, local=local, plan=plan)
    return len(Base.seen)


@pytest.mark.parametrize(("path", "threads"), [("loop", 1), ("loop", 2), ("loop-fast", 2), ("stacked", 1)])
def test_one_copy_for_everybody(path, threads):
    assert copies_during(path, threads, seed=len(path) + threads) == 1


def test_what_clients_start_from_is_the_models_own():
    model = Base()
    rest = rest_of(model, layout_of(model))
    assert rest.fixed["frozen.weight"].data_ptr() == model.frozen.weight.data_ptr()


def test_another_base_is_looked_at_and_never_written_to():
    """A tree with other values for frozen weights leaves the model as it was."""
    model = Base()
    before = model.frozen.weight.clone()
    tree = tree_of(model)
    tree["frozen.weight"] = tree["frozen.weight"] + 1
    work = working_copy(model, torch.device("cpu"), static=False)
    load_row(work, tree, 0)
    assert torch.equal(work.state["frozen.weight"], before + 1)
    assert torch.equal(model.frozen.weight, before)
