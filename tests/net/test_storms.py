"""Whatever dies, is lost or is repeated on the way: the same model, the same ledger, the same clients."""

import os

import pytest

from net.federation import Federated, Simulated, same_states, study_with
from net.storms import Storm, play

METHODS = ["psfed+topk+int8+memory", "scaffold+ecsq+memory+broadcast", "personal+fedavgm", "fedrep+randk"]
TASK = {"data": "digits", "clients": 5, "split": {"dirichlet": 0.5}, "model": {"mlp": {"hidden": [8]}}}
STUDY = {"task": TASK, "rounds": 8, "sample": 3, "evaluate": {"every": 8}, "local": {"steps": 2, "lr": 0.1}}
SEEDS = int(os.environ.get("SPARING_STORMS", "12"))


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    found = {}

    def of(method):
        if method not in found:
            found[method] = Simulated(study_with(method, **STUDY), tmp_path_factory.mktemp("sim") / "run")
        return found[method]

    return of


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_same_run_comes_out_of_every_storm(seed, tmp_path, simulated):
    method = METHODS[seed % len(METHODS)]
    alone = simulated(method)
    storm = Storm(Federated(study_with(method, **STUDY), tmp_path), seed)
    result = play(storm)
    assert result.model_sha256 == alone.result.model_sha256, storm.happened
    assert storm.federated.ledger == alone.ledger
    assert same_states(storm.federated, alone)


SECURE_METHODS = ["psfed", "scaffold", [{"int8": {"common": True}}, "memory", "broadcast"]]
SECURE_STUDY = STUDY | {"sample": 4, "rounds": 6, "network": {"deadline": 600.0, "quorum": 1, "retries": 8}}


@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_secure_sums_in_a_storm_are_exact_or_count_for_nobody(seed, tmp_path):
    method = SECURE_METHODS[seed % len(SECURE_METHODS)]
    storm = Storm(Federated(study_with(method, **SECURE_STUDY, secure=True), tmp_path), seed)
    result = play(storm)
    record = {"fleet": {"arrived": str(tmp_path / "run")}}
    alone = Simulated(study_with(method, **SECURE_STUDY, **record), tmp_path / "again")
    assert result.model_sha256 == alone.result.model_sha256, storm.happened
    assert same_states(storm.federated, alone)
