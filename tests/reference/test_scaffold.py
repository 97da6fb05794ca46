"""SCAFFOLD round for round against NumPy on heterogeneous least squares, and where theory says it beats FedAvg."""

import numpy as np
import pytest
import torch
from torch import nn

import sparing
from reference import scaffold as reference
from sparing.runs.start import new_run, settle_study
from sparing.runs.study import study_from

LR, BATCH, EPOCHS = 0.05, 4, 3


def task_of(data, w, **more):
    model = nn.Linear(len(w), 1, bias=False).double()
    model.weight.data = torch.tensor(w).T.clone()
    pairs = [(torch.tensor(x), torch.tensor(y)) for x, y in data]
    return sparing.Task(model, pairs, test=pairs[0], **more)


def started(task, method, **study):
    values = {"method": method, "plan": {"path": "loop", "chunk": 2}, "rounds": 9, **study}
    job, settled_study = settle_study(study_from(values), task)
    return new_run(settled_study, job, None)


def same_samples(rng, counts, d=3):
    """Clients whose samples are all the same one: every batch has the full gradient, and steps follow from counts."""
    rows = [(rng.normal(size=(1, d)), rng.normal(size=(1, 1))) for _ in counts]
    return [(np.repeat(x, n, axis=0), np.repeat(y, n, axis=0)) for (x, y), n in zip(rows, counts, strict=True)]


@pytest.mark.parametrize("engine", ["vector", "debug"])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_every_round_is_the_formula(weights, engine):
    rng = np.random.default_rng(1)
    counts = [3, 9, 4, 17, 6]
    data, w = same_samples(rng, counts), rng.normal(size=(3, 1))
    strangers = same_samples(rng, [5, 8])  # held out: they never train, and are no part of any mean
    run = started(
        task_of(data + strangers, w, held_out=[5, 6]),
        [{"scaffold": {"weights": weights}}],
        engine=engine,
        local={"epochs": EPOCHS, "batch": BATCH, "lr": LR},
        fleet={"dropout": 0.3},
    )
    cohorts, got = [], []
    for t in range(1, 10):
        ids = torch.tensor(sorted(rng.choice(5, size=3, replace=False).tolist()))
        run.server, outcome = run.engine.round(run.server, ids, t)
        cohorts.append(outcome.ids[outcome.arrived].tolist())
        got.append((run.server, run.bank.read(torch.arange(5))))
    assert min(map(len, cohorts)) < 3, "some uploads were lost"
    steps = [EPOCHS * -(-n // BATCH) for n in counts]
    wanted = reference.rounds(w, data, [c for c in cohorts if c], LR, steps, weights == "samples")
    for (server, state), (want, c, own) in zip(
        [g for g, c in zip(got, cohorts, strict=True) if c], wanted, strict=True
    ):
        np.testing.assert_allclose(server.model["weight"][0].T, want, atol=1e-8)
        np.testing.assert_allclose(server.model["weight.control"][0].T, c, atol=1e-8)
        for k in range(5):
            np.testing.assert_allclose(state["local/control/weight"][k].T, own[k], atol=1e-8)


def test_several_local_steps_bias_fedavg_and_not_scaffold():
    rng = np.random.default_rng(4)
    data = []
    for scale in (0.5, 1.0, 1.5, 0.8):
        x = scale * rng.normal(size=(8, 3))
        data.append((x, x @ rng.normal(size=(3, 1)) + 0.1 * rng.normal(size=(8, 1))))
    w, best = np.zeros((3, 1)), reference.optimum(data)
    found = {}
    for method in ("fedavg", "scaffold"):
        result = sparing.run(
            task_of(data, w), method, rounds=30, sample=1.0, local={"steps": 5, "batch": 8, "lr": 0.1},
            plan={"path": "loop", "chunk": 4}, evaluate={"every": 30},
        )  # fmt: skip
        found[method] = result.model["weight"].numpy().T
    biased = reference.fedavg(w, data, 0.1, 5, 30)
    np.testing.assert_allclose(found["fedavg"], biased, atol=1e-8)
    assert np.linalg.norm(found["fedavg"] - best) > 0.2, "FedAvg stays away from the optimum"
    assert np.linalg.norm(found["scaffold"] - best) < 1e-6, "SCAFFOLD comes to it"
