"""The adaptive server optimisers against NumPy over whole rounds, with all, some, and personal layers shared."""

import numpy as np
import pytest
import torch
from torch import nn

from reference import fedopt as reference
from sparing.core.compose import compose
from sparing.core.context import context
from sparing.core.method import Trained
from sparing.core.round import begin, client, first_client, first_server, incoming, outgoing, settle
from sparing.core.tree import layout_of, under
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.storage.bank import MemoryBank

LAYOUT = layout_of(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))
COUNTS = [12, 30, 7, 7, 51]
COHORTS = [[0, 1, 2], [1, 3, 4], [0, 4], [2], [0, 1, 2, 3, 4], [3, 4]]
OPTIONS = {
    "fedadam": {"lr": 0.05, "beta1": 0.8, "beta2": 0.95, "tau": 0.01},
    "fedyogi": {"lr": 0.05, "beta1": 0.8, "beta2": 0.95, "tau": 0.01},
    "fedadagrad": {"lr": 0.05, "beta1": 0.3, "tau": 0.01},
}


def drawn():
    rng = np.random.default_rng(0)
    model = {name: rng.normal(size=shape).astype(np.float32) for name, shape in LAYOUT.shapes.items()}
    moves = [
        {k: {n: 0.1 * rng.normal(size=s).astype(np.float32) for n, s in LAYOUT.shapes.items()} for k in cohort}
        for cohort in COHORTS
    ]
    return model, moves


@pytest.mark.parametrize("before", [[], [{"psfed": {"fraction": 0.4}}], ["personal"]], ids=str)
@pytest.mark.parametrize("kind", sorted(OPTIONS))
def test_every_round_is_the_formula(kind, before):
    model, moves = drawn()
    method = compose(LAYOUT, *recipes_from_entries([*before, {kind: OPTIONS[kind]}]))
    initial = {name: torch.tensor(x)[None] for name, x in model.items()}
    server, bank = first_server(method, initial, 5), MemoryBank(first_client(method, initial), 5)
    masks, got = [], []
    for t, cohort in enumerate(moves, 1):
        ids = torch.tensor(sorted(cohort))
        met = torch.zeros(len(ids), dtype=torch.bool)
        ctx = context(3, t, len(moves), ids, torch.tensor(COUNTS)[ids], 5, sum(COUNTS), len(ids), met)

        def train(lesson, ctx, cohort=cohort):
            added = {n: np.stack([cohort[k][n] for k in ctx.ids.tolist()]) for n in lesson.start}
            return Trained(
                {n: lesson.start[n] + torch.tensor(added[n]) for n in lesson.start},
                lesson.memory,
                {"loss": torch.zeros(len(ctx.ids))},
            )

        fold, down = begin(method, server, ctx), outgoing(method, server, ctx)
        masks.append(
            {
                n: np.ones(LAYOUT.shapes[n], bool) if x.scope is None else x.scope[0].numpy()
                for n, x in down.leaves.items()
            }
        )
        up, state = client(method, bank.read(ids), down, train, ctx)
        incoming(method, server, fold, down, up, ctx)
        bank.write(ids, state)
        server, _ = settle(method, server, fold, ctx)
        got.append(server)
    beta2 = OPTIONS[kind].get("beta2", 0.0)
    settings = (OPTIONS[kind]["lr"], OPTIONS[kind]["beta1"], beta2, OPTIONS[kind]["tau"])
    for now, (want, m, v) in zip(got, reference.rounds(kind, model, moves, masks, COUNTS, *settings), strict=True):
        state = under("0", now.blend)
        for name in LAYOUT.shapes:
            np.testing.assert_allclose(now.model[name][0], want[name], atol=2e-6, err_msg=name)
            np.testing.assert_allclose(state[f"mean/{name}"][0], m[name], atol=1e-7, err_msg=name)
            np.testing.assert_allclose(state[f"square/{name}"][0], v[name], atol=1e-7, err_msg=name)
    if before == ["personal"]:
        assert not any("1.weight" in mask for mask in masks)
        assert np.array_equal(got[-1].model["1.weight"][0], model["1.weight"])
