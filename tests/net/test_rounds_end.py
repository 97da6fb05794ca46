"""Rounds end: by everybody's answer, by a quorum at the deadline, by the first to arrive, or in a sentence."""

import random

import pytest

from net.federation import Federated, QuickClock, Simulated, same_states, study_with
from sparing.core.errors import FederationError
from sparing.net.letter import Kind, read_letter

TASK = {"data": "digits", "clients": 6, "split": {"dirichlet": 0.5}, "model": {"mlp": {"hidden": [8]}}}
STUDY = {"task": TASK, "rounds": 5, "sample": 4, "evaluate": {"every": 5}, "local": {"steps": 2, "lr": 0.1}}
METHODS = ["psfed+topk+int8+memory", "ecsq+memory+broadcast", "scaffold", "pfedsim"]


class Deaf:
    """Some clients do not answer in some rounds; those who do come in any order."""

    def __init__(self, federated: Federated, absent, seed: int = 0):
        self.federated, self.absent, self.dice = federated, absent, random.Random(seed)

    def exchange(self, letters, seconds, most):
        some = [(who, data, read_letter(data, 1 << 30)) for who, data in letters]
        self.dice.shuffle(some)
        for who, data, letter in some:
            trains = letter.kind == Kind.TRAIN
            if trains and self.absent(letter.round, who) == "never asked":
                continue
            answer = self.federated.nodes[who].handle(data)
            if not (trains and self.absent(letter.round, who)):
                yield who, answer


def played_again(federated: Federated, tmp_path, method) -> Simulated:
    """The simulator, given who arrived."""
    record = {"arrived": str(federated.folder / "run")}
    return Simulated(study_with(method, **(STUDY | {"fleet": record})), tmp_path / "again")


@pytest.mark.parametrize("how", ["never asked", "trained, and never heard of again"])
@pytest.mark.parametrize("method", METHODS)
def test_a_quorum_is_enough_at_the_deadline(method, how, tmp_path):
    network = {"deadline": 60.0, "quorum": 0.5, "retries": 0}
    federated = Federated(study_with(method, **STUDY, network=network), tmp_path)
    absent = {(t, who): how for t in range(1, 6) for who in range(6) if (t + who) % 3 == 0}
    result = federated.run(Deaf(federated, lambda t, who: absent.get((t, who))))
    again = played_again(federated, tmp_path, method)
    assert result.model_sha256 == again.result.model_sha256
    assert federated.ledger == again.ledger
    assert same_states(federated, again)
    assert 0 < sum(record.clients for record in result.table) < 20


@pytest.mark.parametrize("method", METHODS[:2])
def test_of_more_clients_than_needed_the_first_count(method, tmp_path):
    federated = Federated(study_with(method, **STUDY, network={"over": 0.5}), tmp_path)
    result = federated.run(Deaf(federated, lambda t, who: None, seed=5))
    assert [record.clients for record in result.table] == [4] * 5
    asked = federated.ledger.count("1,") and [row for row in federated.ledger.splitlines() if row.startswith("1,")]
    assert len([row for row in asked if ",down," in row]) == 6
    again = played_again(federated, tmp_path, method)
    assert result.model_sha256 == again.result.model_sha256
    assert federated.ledger == again.ledger
    assert same_states(federated, again)


def test_too_few_stop_the_run_which_goes_on_once_they_are_back(tmp_path):
    network = {"deadline": 60.0, "quorum": 3, "retries": 2}
    study = study_with("psfed+topk+memory", **STUDY, network=network)
    federated = Federated(study, tmp_path / "federated")
    clock = QuickClock()
    gone = Deaf(federated, lambda t, who: "gone" if t == 3 and who > 1 else None)
    with pytest.raises(FederationError, match=r"round 3 has .* uploads and needs 3 .* Nothing is lost"):
        federated.run(gone, clock=clock)
    assert clock.now() >= 3 * 60.0
    assert not (federated.folder / "run" / "failed.txt").exists()
    result = federated.resume()
    alone = Simulated(study, tmp_path / "simulated")
    assert result.model_sha256 == alone.result.model_sha256
    assert federated.ledger == alone.ledger
    assert same_states(federated, alone)


def test_a_retry_is_enough_for_whoever_is_slow(tmp_path):
    study = study_with("psfed+topk+memory", **STUDY, network={"deadline": 60.0, "retries": 5})
    federated, asked = Federated(study, tmp_path / "federated"), {}

    def slow(t, who):
        asked[t, who] = asked.get((t, who), 0) + 1
        return "slow" if who == 2 and asked[t, who] < 6 else None

    result = federated.run(Deaf(federated, slow))
    alone = Simulated(study, tmp_path / "simulated")
    assert result.model_sha256 == alone.result.model_sha256


@pytest.mark.parametrize("method", ["fedavg", "psfed+topk+int8+memory", "ecsq+memory+broadcast"])
def test_a_node_that_lost_its_disk_is_sent_everything(method, tmp_path):
    federated = Federated(study_with(method, **STUDY), tmp_path)
    lost = []

    class Losing(Deaf):
        def exchange(self, letters, seconds, most):
            for who, data in letters:
                letter = read_letter(data, 1 << 30)
                if letter.kind == Kind.TRAIN and letter.round == 4 and not lost:
                    lost.append(who)
                    self.federated.nodes[who].store.path(who).unlink()
                    self.federated.start_node(who)
                yield who, self.federated.nodes[who].handle(data)

    result = federated.run(Losing(federated, None))
    assert result.rounds == 5
    assert all(record.clients == 4 for record in result.table)
    assert "has lost its state" in (federated.folder / "run" / "audit.jsonl").read_text()


def test_epsilon_counts_those_asked(tmp_path):
    method, few = [{"dp": {"noise": 8.0}}], STUDY | {"sample": 1, "rounds": 1, "evaluate": {}}
    plain = Federated(study_with(method, **few), tmp_path / "plain").run()
    over = Federated(study_with(method, **few, network={"over": 4.0}), tmp_path / "over").run()
    assert over.epsilon > plain.epsilon


EXACT = {"lora": {"targets": ["dense1", "head"], "rank": 1, "blend": "exact"}}


@pytest.mark.parametrize("method", ["personal+topk", [EXACT, {"personal": {"layers": ["head"]}}]], ids=str)
def test_clients_are_shown_a_model_only_once_it_is_saved(method, tmp_path):
    """A server that dies while it evaluates goes on with the evaluation, and the same round is not played again."""
    study = study_with(method, **STUDY | {"evaluate": {"every": 2}}, network={"evaluate": "clients"})
    federated = Federated(study, tmp_path / "federated")

    class Dies(Exception):
        pass

    class Dying(Deaf):
        left = 2

        def exchange(self, letters, seconds, most):
            for who, data in letters:
                letter = read_letter(data, 1 << 30)
                if letter.kind == Kind.EVALUATE and self.left:
                    self.left -= 1
                    raise Dies
                yield who, self.federated.nodes[who].handle(data)

    post = Dying(federated, None)
    with pytest.raises(Dies):
        federated.run(post)
    with pytest.raises(Dies):
        federated.resume(post)
    result = federated.resume(post)
    alone = Simulated(study, tmp_path / "simulated")
    assert result.model_sha256 == alone.result.model_sha256
    assert federated.ledger == alone.ledger
    table = [(record.round, record.accuracy, record.personal_accuracy) for record in alone.result.table]
    mine = [(record.round, record.accuracy, record.personal_accuracy) for record in result.table]
    assert str(mine) == str(table)
