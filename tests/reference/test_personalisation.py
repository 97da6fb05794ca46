"""Recipes that personalise, and FedProx, round for round against NumPy, in float64."""

import numpy as np
import pytest
import torch
from torch import nn

import sparing
from reference import personalisation as reference
from reference.personalisation import ALL, BODY, HEAD
from sparing.core.round import starting_models, train_locally
from sparing.core.tree import under
from sparing.engines.engine import cohort_context
from sparing.engines.evaluation import _job_in_steps, tuned_job
from sparing.runs.start import new_run, settle_study
from sparing.runs.study import study_from

LR, STEPS = 0.1, 4
COUNTS = [5, 9, 3, 7]
COHORTS = [[0, 1, 3], [1, 2], [0, 2, 3], [0, 1, 2, 3], [1, 3]]
LONG = [(STEPS, LR, ALL)]


def setting():
    rng = np.random.default_rng(2)
    data = [(rng.normal(size=(n, 3)), rng.normal(size=(n, 2))) for n in COUNTS]
    shapes = {"0.weight": (4, 3), "0.bias": (4,), "2.weight": (2, 4), "2.bias": (2,)}
    return data, {name: 0.5 * rng.normal(size=shape) for name, shape in shapes.items()}


def models_of(job, bank, server, t, ids, who, steps):
    """What these clients would have before round t + 1, tuned, or trained on as new ones are."""
    with torch.no_grad():
        ctx = cohort_context(job, server, ids, t + 1)
        state = bank.read(ctx.ids)
        models = starting_models(job.method, server, state, ctx)
        if who == "before":
            return models
        how = tuned_job(job) if who == "after" else _job_in_steps(tuned_job(job), steps)
        return dict(train_locally(how.method.local, how.train, models, under("local", state), ctx).after)


def play(method, engine="vector"):
    """The run after every round."""
    data, p = setting()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model.load_state_dict({name: torch.tensor(x) for name, x in p.items()})
    pairs = [(torch.tensor(x), torch.tensor(y)) for x, y in data]
    task = sparing.Task(model, pairs, test=[(x[:2], y[:2]) for x, y in pairs])
    values = {"method": method, "engine": engine, "plan": {"path": "loop", "chunk": 2}, "rounds": len(COHORTS)}
    job, study = settle_study(study_from({**values, "local": {"steps": STEPS, "batch": 16, "lr": LR}}), task)
    run = new_run(study, job, None)
    for t, cohort in enumerate(COHORTS, 1):
        run.server, _ = run.engine.round(run.server, torch.tensor(cohort), t)
        yield run


def near(got, want):
    np.testing.assert_allclose(got, want, atol=1e-8)


CASES = {
    "fedprox": ([{"fedprox": {"mu": 0.7}}], {"prox": 0.7}),
    "fedper": (["fedper"], {"home": HEAD}),
    "lg-fedavg": (["lg-fedavg"], {"home": BODY}),
    "fedrep": (["fedrep"], {"home": HEAD, "stretches": [(STEPS, LR, HEAD), (1, LR, BODY)]}),
    "fedrep 2 3": ([{"fedrep": {"head": 2, "body": 3}}], {"home": HEAD, "stretches": [(2, LR, HEAD), (3, LR, BODY)]}),
    "fedbabu": (["fedbabu"], {"home": HEAD, "stretches": [(STEPS, LR, BODY)]}),
    "finetune": (["finetune"], {}),
    "ditto": (["ditto"], {}),
}


@pytest.mark.parametrize("engine", ["vector", "debug"])
@pytest.mark.parametrize("case", CASES)
def test_every_round_is_the_formula(case, engine):
    method, options = CASES[case]
    data, p = setting()
    for run, (server, own) in zip(
        play(method, engine), reference.rounds(p, data, COHORTS, **({"stretches": LONG} | options)), strict=True
    ):
        for name in ALL:
            near(run.server.model[name][0], server[name])
        for k, mine in own.items():
            kept = run.bank.read(torch.tensor([k]))
            for name, x in mine.items():
                near(kept[f"own/{name}"][0], x)


@pytest.mark.parametrize(("options", "second"), [({}, LONG), ({"epochs": 2, "lr": 0.03}, [(2, 0.03, ALL)])], ids=str)
def test_dittos_second_model_is_the_formula(options, second):
    data, p = setting()
    wanted = reference.ditto(p, data, COHORTS, LONG, second, 0.4)
    for run, (server, mine) in zip(play([{"ditto": {"lam": 0.4, **options}}]), wanted, strict=True):
        for name in ALL:
            near(run.server.model[name][0], server[name])
            for k, model in mine.items():
                near(run.bank.read(torch.tensor([k]))[f"own/{name}.second"][0], model[name])


@pytest.mark.parametrize(
    ("method", "home", "trains", "tune"),
    [
        ([{"finetune": {"epochs": 3, "lr": 0.02}}], (), ALL, [(3, 0.02, ALL)]),
        (["fedprox", "finetune"], (), ALL, LONG),
        (["fedbabu"], HEAD, BODY, LONG),
        ([{"fedbabu": {"tune": "head", "epochs": 2}}], HEAD, BODY, [(2, LR, HEAD)]),
        ([{"fedbabu": {"tune": "body", "lr": 0.02}}], HEAD, BODY, [(STEPS, 0.02, BODY)]),
        (["fedper"], HEAD, ALL, LONG),
        (["fedper", {"finetune": {"epochs": 1}}], HEAD, ALL, [(1, LR, ALL)]),
    ],
    ids=str,
)
def test_tuning_is_plain_training_from_where_the_next_round_would_start(method, home, trains, tune):
    data, p = setting()
    prox = 0.01 if "fedprox" in method else 0.0
    *_, (server, own) = reference.rounds(p, data, COHORTS, [(STEPS, LR, trains)], home, prox)
    *_, run = play(method)
    everyone = torch.arange(4)
    after = models_of(run.job, run.bank, run.server, 5, everyone, "after", 10)
    new = models_of(run.job, run.bank, run.server, 5, everyone, "new", 6)
    for k in range(4):
        start = server | own.get(k, {})
        for name in ALL:
            near(after[name][k], reference.trained(start, data[k], tune)[name])
            near(new[name][k], reference.trained(start, data[k], [(6, *tune[0][1:])])[name])


def test_a_new_client_of_fedrep_learns_its_head():
    data, p = setting()
    *_, (server, own) = reference.rounds(p, data, COHORTS, [(STEPS, LR, HEAD), (1, LR, BODY)], HEAD)
    *_, run = play(["fedrep"])
    new = models_of(run.job, run.bank, run.server, 5, torch.arange(4), "new", 6)
    for k in range(4):
        for name in ALL:
            near(new[name][k], reference.trained(server | own[k], data[k], [(6, LR, HEAD)])[name])


def test_a_new_client_of_ditto_trains_its_second_model():
    data, p = setting()
    *_, (server, mine) = reference.ditto(p, data, COHORTS, LONG, LONG, 0.4)
    *_, run = play([{"ditto": {"lam": 0.4}}])
    for who, steps in (("new", 6), ("after", STEPS)):
        models = run.job.used(models_of(run.job, run.bank, run.server, 5, torch.arange(4), who, 6))
        for k in range(4):
            want = reference.trained(mine[k], data[k], [(steps, LR, ALL)], 0.4, anchor=server)
            for name in ALL:
                near(models[name][k], want[name])
