"""The server's update through a codec: the model moves by what is told, and the rest waits."""

import torch

from sparing.core.compose import compose
from sparing.core.method import Blended
from sparing.core.registry import find_recipe
from sparing.core.tree import Layout, layout_of, tree_of
from sparing.core.versions import broadcast_update, commonly_held, first_past
from support import make_ctx

LAYOUT = Layout(
    {"w": (4,), "home": (2,), "n": ()}, {"w": torch.float32, "home": torch.float32, "n": torch.int64}, frozenset({"n"})
)
MODEL = {"w": torch.zeros(1, 4), "home": torch.zeros(1, 2), "n": torch.zeros(1, dtype=torch.int64)}


def method_of():
    make = find_recipe("broadcast").make(by=[find_recipe("topk").make(ratio=0.25)])
    return compose(LAYOUT, make, find_recipe("personal").make(layers=["home"]))


def blended(w, covered=None):
    update = {"w": torch.tensor([w], dtype=torch.float64), "n": torch.tensor([0.75], dtype=torch.float64)}
    one = torch.ones(1)
    return Blended(update, {"w": covered, "n": None}, one.long(), one.double(), {})


def test_the_model_moves_by_what_is_told_and_the_rest_follows_later():
    method, ctx = method_of(), make_ctx([2, 3])
    past = first_past(method, MODEL, 9)
    assert set(past) == {"memory/residual/w", "held", "from"}, "nothing of what stays at home"
    now, past, report = broadcast_update(method, MODEL, past, blended([1.0, -3.0, 2.0, 0.0]), ctx)
    assert now.update["w"].tolist() == [[0.0, -3.0, 0.0, 0.0]]
    assert now.update["w"].dtype == torch.float64
    assert now.update["n"].tolist() == [0.75], "buffers move as they are"
    assert 0 < report["broadcast_bytes"] < 60
    now, past, _ = broadcast_update(method, MODEL, past, blended([1.5, 0.0, 0.0, 0.0]), ctx._replace(round=2))
    assert now.update["w"].tolist() == [[2.5, 0, 0, 0]]
    assert past["memory/residual/w"].tolist() == [[0, 0, 2.0, 0]]


def test_where_nobody_voted_nothing_moves_and_the_residual_waits():
    method, ctx = method_of(), make_ctx([2, 3])
    past = first_past(method, MODEL, 9) | {"memory/residual/w": torch.tensor([[0.0, 9.0, 1.0, 0.0]])}
    covered = torch.tensor([[True, False, True, False]])
    now, past, _ = broadcast_update(method, MODEL, past, blended([1.0, 0.0, 1.0, 0.0], covered), ctx)
    assert now.update["w"].tolist() == [[0.0, 0.0, 2.0, 0.0]]
    assert past["memory/residual/w"].tolist() == [[1.0, 9.0, 0.0, 0.0]]
    assert not [name for name in past if name.startswith(("frame", "base"))], "nobody could read it"
    assert int(past["from"]) == ctx.round + 1


def test_without_memory_nothing_waits():
    method = compose(LAYOUT, find_recipe("broadcast").make(by=[find_recipe("topk").make(ratio=0.25)], memory=False))
    _, past, _ = broadcast_update(
        method, MODEL, first_past(method, MODEL, 9), blended([1.0, -3.0, 2.0, 0.0]), make_ctx([2])
    )
    assert not [name for name in past if name.startswith("memory")]


def test_who_is_sent_updates():
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8, 4))
    layout = layout_of(net)
    for names, all_of_it in [
        (("broadcast",), True),
        (("stc",), True),
        (("personal", "stc"), False),
        (("psfed", "stc"), None),
        (("heterofl", "broadcast"), None),
        (("pfedsim", "broadcast"), False),
        (("fedavg",), None),
        (("local", "broadcast"), None),
    ]:
        found = commonly_held(compose(layout, *(find_recipe(name).make() for name in names)))
        assert (found == list(layout.shapes)) == bool(all_of_it), names
        assert bool(found) == (all_of_it is not None), names
    assert not first_past(compose(layout), tree_of(net, layout), 3)
