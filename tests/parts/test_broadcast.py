import torch

from sparing.core.protocols import Blended
from sparing.core.tree import Layout
from sparing.parts import broadcast, sparse
from support import make_ctx

LAYOUT = Layout(
    {"w": (4,), "home": (2,), "n": ()}, {"w": torch.float32, "home": torch.float32, "n": torch.int64}, frozenset({"n"})
)


def blended(w, covered=None):
    update = {"w": torch.tensor([w], dtype=torch.float64), "n": torch.tensor([0.75], dtype=torch.float64)}
    one = torch.ones(1)
    return Blended(update, {"w": covered, "n": None}, one.long(), one.double(), {})


def test_the_model_moves_by_what_would_be_said_and_the_rest_follows_later():
    step, ctx = broadcast.broadcast(LAYOUT, sparse.topk(LAYOUT, 0.25), "x", frozenset({"home"})), make_ctx([2, 3])
    state = step.init({"w": torch.zeros(1, 4), "n": torch.zeros(1, dtype=torch.int64)}, 9)
    assert set(state) == {"residual/w"}
    update, state, report = step.apply(state, blended([1.0, -3.0, 2.0, 0.0]), ctx)
    assert update["w"].tolist() == [[0.0, -3.0, 0.0, 0.0]]
    assert update["w"].dtype == torch.float64
    assert update["n"].tolist() == [0.75], "buffers move as they are"
    assert 0 < report["broadcast_bytes"] < 60
    update, state, _ = step.apply(state, blended([1.5, 0.0, 0.0, 0.0]), ctx)
    assert update["w"].tolist() == [[2.5, 0, 0, 0]]
    assert state["residual/w"].tolist() == [[0, 0, 2.0, 0]]


def test_where_nobody_voted_nothing_moves_and_the_residual_waits():
    step, ctx = broadcast.broadcast(LAYOUT, sparse.topk(LAYOUT, 0.25), "x", frozenset({"home"})), make_ctx([2, 3])
    state = {"residual/w": torch.tensor([[0.0, 9.0, 1.0, 0.0]])}
    covered = torch.tensor([[True, False, True, False]])
    update, state, _ = step.apply(state, blended([1.0, 0.0, 1.0, 0.0], covered), ctx)
    assert update["w"].tolist() == [[0.0, 0.0, 2.0, 0.0]]
    assert state["residual/w"].tolist() == [[1.0, 9.0, 0.0, 0.0]]
