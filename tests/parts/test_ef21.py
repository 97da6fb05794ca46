import math

import numpy as np
import pytest
import torch

from sparing.core.compose import compose
from sparing.core.context import context
from sparing.core.errors import ConfigError, MethodError
from sparing.core.method import Trained, Weigh
from sparing.core.registry import find_recipe
from sparing.core.round import begin, client, first_client, first_server, incoming, outgoing, settle
from sparing.core.tree import Layout, cat_trees
from support import small_layout

A = np.array([[-3.0, 2, 2], [2, -3, 2], [2, 2, -3]])
LAYOUT = Layout({"x": (3,)}, {"x": torch.float32})
HESSIANS = np.stack([np.outer(a, a) * 2 + np.eye(3) for a in A])
START = np.ones(3)


def value(x):
    """The mean over clients of <a_k, x>^2 + |x|^2 / 2, which is least at 0."""
    return float(((A @ x) ** 2).mean() + x @ x / 2)


def descend(method, lr, rounds):
    """Gradient descent on it, a step a round; the models, one row each."""
    model = {"x": torch.tensor(START, dtype=torch.float32)[None]}
    server, hessians = first_server(method, model, 3), torch.tensor(HESSIANS, dtype=torch.float32)
    state, path = cat_trees([first_client(method, model)] * 3), [START]

    def train(lesson, ctx):
        x = lesson.start["x"].expand(3, 3)
        return Trained({"x": x - lr * (hessians @ x[:, :, None])[:, :, 0]}, lesson.memory, {"loss": torch.zeros(3)})

    for t in range(1, rounds + 1):
        ctx = context(0, t, rounds, torch.arange(3), torch.full((3,), 5), 3, 15, 3, first=~server.seen)
        down, fold = outgoing(method, server, ctx), begin(method, server, ctx)
        up, state = client(method, state, down, train, ctx)
        incoming(method, server, fold, down, up, ctx)
        server, _ = settle(method, server, fold, ctx)
        path.append(server.model["x"][0].double().numpy())
    return np.stack(path)


@pytest.mark.slow
def test_it_converges_on_a_quadratic_as_fast_as_the_paper_states_where_plain_topk_runs_away():
    """One of three coordinates a client, on the example of Beznosikov et al. 2020: every plain choice is wrong."""
    share = 1 / 3
    theta, beta = 1 - math.sqrt(1 - share), (1 - share) / (1 - math.sqrt(1 - share))
    curved = np.linalg.eigvalsh(HESSIANS.mean(0))
    steepest = math.sqrt(float(np.mean([np.linalg.eigvalsh(h)[-1] ** 2 for h in HESSIANS])))
    lr, rounds = 1 / (curved[-1] + steepest * math.sqrt(2 * beta / theta)), 800
    path = descend(compose(LAYOUT, find_recipe("ef21").make(ratio=share)), lr, rounds)
    gradients = HESSIANS @ START
    missed = float(np.mean([np.sort(np.abs(g))[:2] @ np.sort(np.abs(g))[:2] for g in gradients]))
    first = value(START) + lr / theta * missed
    for t in range(1, rounds + 1):
        assert value(path[t]) <= (1 - lr * curved[0]) ** (t - 1) * first + 1e-9, t
    assert value(path[-1]) < 1e-3 * value(START)
    plain = descend(compose(LAYOUT, find_recipe("topk").make(ratio=share)), lr, rounds)
    assert value(plain[-1]) > value(START)


def test_at_ratio_one_it_is_gradient_descent():
    exact = descend(compose(LAYOUT), 0.02, 20)
    assert np.allclose(descend(compose(LAYOUT, find_recipe("ef21").make(ratio=1.0)), 0.02, 20), exact, atol=1e-5)


def test_it_stands_around_whatever_comes_before_it():
    names = [
        codec.name for codec in compose(small_layout(), *(find_recipe(x).make() for x in ("topk", "int8", "ef21"))).up
    ]
    assert names == ["ef21(topk+int8)"]
    assert compose(small_layout(), find_recipe("ef21").make()).up[0].name == "ef21(topk)"
    with pytest.raises(ConfigError, match=r"ef21.ratio is 0.5, but ef21 uses 'topk' before it"):
        compose(small_layout(), find_recipe("topk").make(), find_recipe("ef21").make(ratio=0.5))


def test_what_the_sums_of_the_server_cannot_stand_is_refused():
    ef21, layout = find_recipe("ef21").make(), small_layout()
    for name, words in {"memory": "keeps its own memory", "int8": "put it first", "sign": "put it first"}.items():
        with pytest.raises(MethodError, match=words):
            compose(layout, ef21, find_recipe(name).make())
    with pytest.raises(MethodError, match="'ternary' may be larger"):
        compose(layout, find_recipe("ternary").make(), ef21)
    with pytest.raises(MethodError, match="'randk' may be larger"):
        compose(layout, find_recipe("randk").make(unbiased=True), ef21)
    odd = Weigh(lambda state, arrival: (arrival.notes["n"].double(), {}), most=lambda ctx: 1.0, name="fedsim")
    with pytest.raises(MethodError, match="weights by samples; drop 'fedsim'"):
        compose(layout, ef21, lambda method: method._replace(blend=method.blend._replace(weigh=odd)))
    with pytest.raises(MethodError, match="needs a weighted mean"):
        compose(layout, ef21, lambda method: method._replace(blend=method.blend._replace(collect=lambda v, m, w: v[0])))
