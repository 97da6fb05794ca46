"""FedAdam, FedYogi, FedAdagrad and FedProx in whole runs."""

import pytest

import sparing
from sparing.core.errors import ConfigError

STUDY = {"rounds": 3, "sample": 4, "seed": 5, "local": {"steps": 3}, "evaluate": {"every": 3}}


def play(method, **options):
    task = {"data": "digits", "clients": 8, "model": "mlp"}
    return sparing.run(task, method, **STUDY | {"plan": {"path": "loop", "chunk": 3, "threads": 1}} | options)


@pytest.mark.parametrize(
    "method",
    [
        "fedadam",
        "fedyogi",
        "fedadagrad",
        "fedprox",
        "psfed+topk+memory+fedyogi",
        "personal+fedprox+int8+fedadam",
        [{"fedscr": {"dense": True}}, "fedadagrad"],
    ],
    ids=str,
)
def test_both_engines_agree(method):
    fast, plain = play(method), play(method, engine="debug", plan={"path": "loop"})
    assert fast.model_sha256 == plain.model_sha256
    assert (fast.up_bytes, fast.down_bytes) == (plain.up_bytes, plain.down_bytes)
    assert fast.personal_accuracy == plain.personal_accuracy


@pytest.mark.parametrize("method", ["fedadam", "fedyogi", "fedadagrad"])
def test_the_optimiser_costs_no_bytes_and_learns(method):
    ours, plain = (play(m, rounds=12, local={"steps": 10}, evaluate={"every": 12}) for m in (method, "fedavg"))
    assert (ours.up_bytes, ours.down_bytes) == (plain.up_bytes, plain.down_bytes)
    assert ours.accuracy > 0.5


def test_resuming_goes_on_with_the_moments(tmp_path):
    straight = play("fedyogi", rounds=4)

    class Stop(Exception):
        pass

    def stop(record):
        if record.round == 2:
            raise Stop

    with pytest.raises(Stop):
        play("fedyogi", rounds=4, out=tmp_path / "a", loggers=[stop])
    assert sparing.resume(tmp_path / "a").model_sha256 == straight.model_sha256


def test_fedprox_is_local_prox_by_its_name_and_fedavg_without_it():
    named, plain = play([{"fedprox": {"mu": 0.5}}]), play("fedavg", local={"steps": 3, "prox": 0.5})
    assert named.model_sha256 == plain.model_sha256
    assert named.model_sha256 != play("fedavg").model_sha256
    assert play([{"fedprox": {"mu": 0}}]).model_sha256 == play("fedavg").model_sha256


def test_what_cannot_be_meant():
    with pytest.raises(ConfigError, match=r"local.prox is 0.5 and fedprox.mu is 0.1, which are one"):
        play([{"fedprox": {"mu": 0.1}}], local={"steps": 3, "prox": 0.5})
    with pytest.raises(ConfigError, match=r"fedprox.mu is -1"):
        play([{"fedprox": {"mu": -1}}])
    with pytest.raises(ConfigError, match=r"fedadam.lr is 0.0; it must be above 0"):
        play([{"fedadam": {"lr": 0}}])
