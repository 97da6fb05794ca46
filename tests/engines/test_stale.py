"""The variance between clients at the start of a round, gathered chunk by chunk."""

import numpy as np
import pytest
import torch

from sparing.core.compose import compose
from sparing.core.method import Trained
from sparing.core.round import train_locally
from sparing.core.tree import take_rows
from sparing.engines.divergence import Divergence
from sparing.recipes.local import local
from sparing.recipes.personal import personal
from sparing.recipes.psfed import psfed
from support import make_ctx, random_tree, small_layout

LAYOUT = small_layout()
MODEL = random_tree(LAYOUT, 1)


def untouched(lesson, ctx):
    return Trained(lesson.start, lesson.memory, {"loss": torch.zeros(len(ctx.ids))})


def divergence(method, starts, chunks):
    stale = Divergence(method, MODEL)
    local = stale.watching(method).local
    for part in chunks:
        some = take_rows(starts, torch.tensor(part))
        assert train_locally(local, untouched, some, {}, make_ctx(part)).after is some
    return {name: float(x) for name, x in stale.report().items()}


@pytest.mark.parametrize("chunks", [[[0, 1, 2, 3, 4]], [[2, 0], [4, 1, 3]], [[0], [1], [2], [3], [4]]], ids=str)
def test_it_is_the_mean_variance_over_the_parameters_however_clients_are_grouped(chunks):
    starts = random_tree(LAYOUT, 5, seed=8)
    flat = np.concatenate([starts[name].double().numpy().reshape(5, -1) for name in LAYOUT.params], axis=1)
    got = divergence(compose(LAYOUT, psfed()), starts, chunks)
    assert got == {"stale_divergence": pytest.approx(flat.var(axis=0).mean(), rel=1e-12)}


def test_clients_that_start_equal_do_not_diverge():
    one = random_tree(LAYOUT, 1, seed=8)
    assert divergence(compose(LAYOUT, psfed()), MODEL, [[0, 1], [2]]) == {"stale_divergence": 0.0}
    far = divergence(compose(LAYOUT, psfed()), one, [[0, 1], [2]])["stale_divergence"]
    assert far == pytest.approx(0, abs=1e-15), "equal but not to the server"


def test_only_what_is_shared_in_part_counts():
    starts = random_tree(LAYOUT, 3, seed=8)
    with_head = divergence(compose(LAYOUT, psfed()), starts, [[0, 1, 2]])
    body = divergence(compose(LAYOUT, personal(), psfed()), starts, [[0, 1, 2]])
    wanted = [starts[name].double().var(0, correction=0).flatten() for name in LAYOUT.params if name[0] != "3"]
    assert body["stale_divergence"] == pytest.approx(float(torch.cat(wanted).mean()))
    assert body != with_head
    method = compose(LAYOUT, psfed())
    only_up = method._replace(share=method.share._replace(values=frozenset({"3.weight", "3.bias"})))
    assert divergence(only_up, starts, [[0, 1, 2]]) == body, "what goes up for comparison only is never in step"
    for method in (compose(LAYOUT), compose(LAYOUT, local()), compose(LAYOUT, psfed(fraction=1.0))):
        assert divergence(method, starts, [[0, 1, 2]]) == {}


def test_one_client_has_no_variance():
    assert divergence(compose(LAYOUT, psfed()), random_tree(LAYOUT, 1), [[0]]) == {}
