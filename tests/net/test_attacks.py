"""A hostile node, a lying server, late letters, altered files: nothing is counted wrongly, and nothing falls over."""

import json
import os
import shutil
import struct
import zlib
from contextlib import contextmanager

import pytest

from net.federation import Federated, Simulated, same_states, study_with
from sparing.core.errors import CheckpointError, ConfigError, DataError
from sparing.fleet.fleet import read_arrivals
from sparing.net.letter import Kind, Letter, read_letter, read_sentence, write_letter
from sparing.net.server import read_federation
from sparing.net.store import Store
from sparing.net.terms import digest_of
from sparing.runs.files import checkpoint

TASK = {"data": "digits", "clients": 3, "split": "iid", "model": {"mlp": {"hidden": [8]}}}
STUDY = {"task": TASK, "rounds": 4, "sample": 3, "evaluate": {"every": 4}, "local": {"steps": 2, "lr": 0.1}}
METHOD = "personal+topk+int8+memory"
NETWORK = {"deadline": 60.0, "retries": 0, "quorum": 2}
MOST = 1 << 30


class Between:
    """A loopback whose owner may see, change, withhold or add answers: `way(who, data, ask)` yields them."""

    def __init__(self, federated, way):
        self.federated, self.way = federated, way

    def ask(self, who, data):
        return self.federated.nodes[who].handle(data)

    def exchange(self, letters, seconds, most):
        for who, data in letters:
            for answer in self.way(who, data, self.ask):
                yield who, answer


# ------------------------------------------------------------------------------------------------------- late letters


def without_its_first_round(federated):
    """Client 0's upload of round 1 is lost; from then on round 1's letter comes again after every other."""
    first = []

    def way(who, data, ask):
        letter = read_letter(data, MOST)
        answer = ask(who, data)
        if who != 0 or letter.kind != Kind.TRAIN:
            yield answer
        elif letter.round > 1:
            yield answer
            late.append(read_letter(ask(who, first[0]), MOST).kind)
        else:
            first.append(data)

    late: list[Kind] = []
    return Between(federated, way), late


def test_a_letter_of_an_earlier_round_undoes_nothing(tmp_path):
    federated = Federated(study_with(METHOD, **STUDY, network=NETWORK), tmp_path / "federated")
    post, late = without_its_first_round(federated)
    result = federated.run(post)
    assert set(late) == {Kind.REFUSED}
    record = {"arrived": str(federated.folder / "run")}
    again = Simulated(study_with(METHOD, **STUDY, fleet=record), tmp_path / "again")
    assert result.model_sha256 == again.result.model_sha256
    assert federated.ledger == again.ledger
    assert same_states(federated, again)
    assert not (federated.folder / "run" / "audit.jsonl").exists()


def test_an_earlier_round_is_not_released_again(tmp_path):
    """Each release costs privacy, also of rounds that did not count."""
    federated = Federated(study_with([{"dp": {"mode": "local"}}], **STUDY, network=NETWORK), tmp_path)
    post, late = without_its_first_round(federated)
    federated.run(post)
    assert set(late) == {Kind.REFUSED}


@pytest.mark.parametrize("method", [METHOD, "psfed+topk+memory"])
def test_an_upload_from_before_a_lost_disk_does_not_count(method, tmp_path):
    """Client 0 uploads, loses its disk, is met anew, and only then its first upload arrives: its second one counts."""
    study = study_with(method, **STUDY)
    federated, late = Federated(study, tmp_path), []

    def way(who, data, ask):
        letter = read_letter(data, MOST)
        at_hand = letter.kind == Kind.TRAIN and letter.round == 3 and who == 0
        if at_hand and not late:
            late.append(ask(who, data))
            federated.nodes[0].store.path(0).unlink()
            federated.start_node(0)
            yield ask(who, data)  # NEED
        elif at_hand and letter.first:
            sent_anew.append(who)
            yield from (late[0], ask(who, data))
        else:
            yield ask(who, data)

    sent_anew: list[int] = []
    federated.run(Between(federated, way))
    assert sent_anew == [0]
    assert "its first differs" in (federated.folder / "run" / "audit.jsonl").read_text()


@pytest.mark.parametrize("method", ["psfed+topk+memory", "scaffold", "ecsq+memory+broadcast"])
def test_a_node_met_anew_is_met_anew_again_after_the_server_died(method, tmp_path):
    """The server dies in the round in which a client without a disk was sent everything: it has to be sent it again."""
    study = study_with(method, **STUDY)

    class Died(Exception):
        pass

    def played(folder, dies):
        federated, lost, left = Federated(study, folder), [], [dies]

        def way(who, data, ask):
            letter = read_letter(data, MOST)
            if letter.kind == Kind.TRAIN and letter.round == 3 and who == 0 and not lost:
                lost.append(who)
                federated.nodes[0].store.path(0).unlink()
                federated.start_node(0)
            answer = ask(who, data)
            if letter.kind == Kind.TRAIN and letter.round == 3 and who == 0 and letter.first and left[0]:
                left[0] = False
                raise Died
            yield answer

        post = Between(federated, way)
        if dies:
            with pytest.raises(Died):
                federated.run(post)
            return federated.resume(post)
        return federated.run(post)

    assert played(tmp_path / "a", True).model_sha256 == played(tmp_path / "b", False).model_sha256


def test_who_comes_to_another_run_before_the_first_round_takes_its_study(tmp_path):
    """A server that died before round 1 and begins anew with another study: nodes train by the new one."""
    before, after = study_with(METHOD, **STUDY), study_with(METHOD, **STUDY | {"local": {"steps": 1, "lr": 0.5}})
    federated = Federated(before, tmp_path / "federated")

    class Died(Exception):
        pass

    def dies(who, data, ask):
        if read_letter(data, MOST).kind == Kind.TRAIN:
            raise Died
        yield ask(who, data)

    with pytest.raises(Died):
        federated.run(Between(federated, dies))
    shutil.rmtree(federated.folder / "run")
    federated.study = after
    alone = Simulated(after, tmp_path / "simulated")
    assert federated.run().model_sha256 == alone.result.model_sha256


# ------------------------------------------------------------------------------------------------------ a hostile node


SCORES = {
    "samples beyond 63 bits": struct.pack("<Qdd", 2**63, 1.0, 1.0),
    "samples beyond reason": struct.pack("<Qdd", 2**62, 1.0, 1.0),
    "hits of nobody": struct.pack("<Qdd", 10, float("nan"), 1.0),
    "more hits than samples": struct.pack("<Qdd", 10, 11.0, 1.0),
    "a negative count of hits": struct.pack("<Qdd", 10, -1.0, 1.0),
    "an infinite loss": struct.pack("<Qdd", 10, 1.0, float("inf")),
    "too short": bytes(3),
}


@pytest.mark.parametrize("scores", SCORES)
def test_scores_that_cannot_be_are_left_out(scores, tmp_path):
    federated = Federated(study_with(METHOD, **STUDY, network=NETWORK | {"evaluate": "clients"}), tmp_path)

    def way(who, data, ask):
        answer, letter = ask(who, data), read_letter(data, MOST)
        lies = letter.kind == Kind.EVALUATE and who == 1
        yield write_letter(letter.answer(Kind.SCORES, SCORES[scores])) if lies else answer

    result = federated.run(Between(federated, way))
    assert result.rounds == 4
    assert 0 <= result.personal_accuracy <= 1
    assert '"client": 1' in (federated.folder / "run" / "audit.jsonl").read_text()


@pytest.mark.parametrize("n", [2**40, 2**50, 2**63])
def test_a_number_of_samples_beyond_reason_stops_nobody(n, tmp_path):
    """It is refused at the door, once; else all letters would name a sum that no node reads."""
    federated, said = Federated(study_with("fedavg", **STUDY, network=NETWORK), tmp_path), []

    def way(who, data, ask):
        answer = ask(who, data)
        if who == 1 and read_letter(data, MOST).kind == Kind.HELLO and not said:
            said.append(n)
            at = len(answer) - 56
            answer = answer[:at] + struct.pack("<Q", n) + answer[at + 8 :]
        yield answer

    assert federated.run(Between(federated, way)).rounds == 4
    assert said


def with_nan_at_the_end(who, data, ask):
    """Client 1's upload of FedAvg, in which the last number is none; its checksum fits."""
    answer = ask(who, data)
    if read_letter(data, MOST).kind == Kind.TRAIN and who == 1:
        said = read_letter(answer, MOST)
        whole = said.body[:-17] + struct.pack("<f", float("nan")) + said.body[-13:-4]  # notes follow, and the checksum
        answer = write_letter(said._replace(body=whole + zlib.crc32(whole).to_bytes(4, "little")))
    yield answer


def test_a_number_that_is_none_at_the_end_of_an_upload_leaves_no_trace(tmp_path):
    """The first tensors are sound: of an upload nothing counts, or all of it."""
    federated = Federated(study_with("fedavg", **STUDY, network=NETWORK), tmp_path / "federated")

    result = federated.run(Between(federated, with_nan_at_the_end))
    record = {"arrived": str(federated.folder / "run")}
    again = Simulated(study_with("fedavg", **STUDY, fleet=record), tmp_path / "again")
    assert [one.clients for one in result.table] == [2] * 4
    assert result.model_sha256 == again.result.model_sha256


def test_an_upload_that_a_lenient_blend_leaves_out_is_written_down(tmp_path):
    method = [{"norm-bound": {"bound": 1.0}}]
    federated = Federated(study_with(method, **STUDY, network=NETWORK), tmp_path)
    federated.run(Between(federated, with_nan_at_the_end))
    assert '"client": 1' in (federated.folder / "run" / "audit.jsonl").read_text()


# ----------------------------------------------------------------------------------------------------- a lying server


@pytest.fixture
def joined(tmp_path):
    """A federation whose nodes have been in two of four rounds, and the letters of client 0."""

    def of(method, **network):
        federated, letters = Federated(study_with(method, **STUDY, network=NETWORK | network), tmp_path), []

        class Enough(Exception):
            pass

        def way(who, data, ask):
            letter = read_letter(data, MOST)
            if letter.round == 3:
                raise Enough
            if letter.kind == Kind.TRAIN and who == 0:
                letters.append(letter)
            yield ask(who, data)

        with pytest.raises(Enough):
            federated.run(Between(federated, way))
        return federated, letters

    return of


def asked(federated, letter):
    return read_letter(federated.nodes[0].handle(write_letter(letter)), MOST)


def test_noise_covers_one_release_of_every_round(joined):
    federated, letters = joined([{"dp": {"mode": "local"}}])
    again = asked(federated, letters[1])
    assert again.kind == Kind.UPLOAD, "the same letter gets the same upload"
    for letter in (letters[0], letters[0]._replace(cohort=2), letters[1]._replace(cohort=2)):
        assert asked(federated, letter).kind == Kind.REFUSED


def test_a_node_plays_no_more_rounds_than_the_study_has(joined):
    federated, letters = joined([{"dp": {"mode": "local"}}])
    for t in (0, 5, 2**32 - 1):
        said = asked(federated, letters[1]._replace(round=t, settled=1))
        assert said.kind == Kind.REFUSED
    assert "rounds" in read_sentence(said.body)


def test_scores_are_not_given_where_noise_is_promised(joined):
    federated, letters = joined([{"dp": {"mode": "local"}}])
    said = asked(federated, letters[1]._replace(kind=Kind.EVALUATE, round=3, settled=2, body=b"\0"))
    assert "noise" in read_sentence(said.body)


def test_a_server_does_not_ask_for_scores_where_noise_is_promised(tmp_path):
    network = NETWORK | {"evaluate": "clients"}
    federated = Federated(study_with([{"dp": {"mode": "local"}}], **STUDY, network=network), tmp_path)
    with pytest.raises(ConfigError, match=r"with dp.mode local they tell nobody; set it to server"):
        federated.run()


def test_a_node_that_is_behind_gives_no_scores(joined):
    """Its personal layers are gone: what it would tell is of another model than the server means."""
    federated, letters = joined("personal")
    letter = letters[1]._replace(kind=Kind.EVALUATE, round=3, settled=2, body=b"\1")
    federated.nodes[0].store.path(0).unlink()
    federated.start_node(0)
    kept = federated.nodes[1].store.load(1)
    hello = Letter(Kind.HELLO, kept.run, digest_of(kept.terms), 0, clients=3, body=bytes(32) + kept.terms)
    assert asked(federated, hello).kind == Kind.JOINED
    assert asked(federated, letter).kind == Kind.NEED


@pytest.mark.parametrize(
    "change",
    [
        {"clients": 2**32 - 1, "client": 2**31},
        {"kind": Kind.EVALUATE, "body": b"\1" * 50},
        {"kind": Kind.EVALUATE, "body": b""},
        {"kind": Kind.UPLOAD},
        {"settled": 2**32 - 1},
        {"n": 2**40},
        {"body": b""},
        {"cohort": 0, "samples": 0},
        {"capacity": (1e-300,) * 6},
        {"run": bytes(16)},
    ],
    ids=str,
)
def test_whatever_a_server_writes_is_answered(change, joined):
    federated, letters = joined(METHOD)
    before = federated.nodes[0].store.path(0).read_bytes()
    said = asked(federated, letters[1]._replace(round=3, settled=2, first=False)._replace(**change))
    assert said.kind in (Kind.REFUSED, Kind.NEED)
    assert federated.nodes[0].store.path(0).read_bytes() == before


def test_an_error_that_nobody_foresaw_is_told_here_and_not_there(joined, monkeypatch):
    federated, letters = joined(METHOD)
    told = []
    node = federated.nodes[0]
    node.tell = told.append

    def fails(*_):
        raise RuntimeError("the label of sample 3 is 7")

    monkeypatch.setattr(node, "read", fails)
    said = asked(federated, letters[1]._replace(round=3, settled=2))
    assert said.kind == Kind.REFUSED
    assert "RuntimeError" in read_sentence(said.body)
    assert "sample 3" not in read_sentence(said.body)
    assert any("sample 3" in line for line in told)


@pytest.mark.parametrize(
    "change",
    [{"clients": 10**12}, {"clients": -1}, {"shape": [10**30]}, {"shape": []}, {"shape": [-1]}, {"classes": 10**30}],
    ids=str,
)
def test_terms_that_no_study_has_are_refused(change, tmp_path):
    federated = Federated(study_with(METHOD, **STUDY), tmp_path / "a")
    federated.run()
    kept = federated.nodes[0].store.load(0)
    terms = json.dumps(json.loads(kept.terms) | change).encode()
    fresh = Federated(study_with(METHOD, **STUDY), tmp_path / "b")
    letter = Letter(Kind.HELLO, b"n" * 16, digest_of(terms), 0, clients=3, body=bytes(32) + terms)
    assert asked(fresh, letter).kind == Kind.REFUSED


def test_what_a_server_writes_does_not_steer_a_terminal(joined):
    federated, _ = joined(METHOD)
    told = []
    kept = federated.nodes[0].store.load(0)
    terms = json.dumps(json.loads(kept.terms) | {"sparing": "9\x1b[2J" + "x" * 5000}).encode()
    fresh = Federated(federated.study, federated.folder / "fresh")
    fresh.nodes[0].tell = told.append
    asked(fresh, Letter(Kind.HELLO, b"n" * 16, digest_of(terms), 0, clients=3, body=bytes(32) + terms))
    assert told
    assert all(line.isprintable() and len(line) < 1100 for line in told)


# -------------------------------------------------------------------------------------------------------------- files


def test_the_state_of_another_client_is_not_taken_for_ones_own(tmp_path):
    federated = Federated(study_with(METHOD, **STUDY), tmp_path)
    federated.run()
    federated.nodes[1].store.close()
    shutil.copy(federated.nodes[0].store.path(0), federated.nodes[1].store.path(1))
    with pytest.raises(CheckpointError, match="client 0"):
        Store(tmp_path / "node-1").load(1)


def test_a_nodes_state_is_its_owners_alone_from_the_first_byte(tmp_path, monkeypatch):
    (tmp_path / "node-0").mkdir(mode=0o755)
    federated, seen = Federated(study_with(METHOD, **STUDY), tmp_path), []
    plain = checkpoint.replace_file

    @contextmanager
    def looked_at(path):
        with plain(path) as file:
            if "node-" in str(path):
                seen.append(os.fstat(file.fileno()).st_mode & 0o077)
            yield file

    monkeypatch.setattr(checkpoint, "replace_file", looked_at)
    federated.run()
    assert set(seen) == {0}


LEDGER = "round,client,direction,value\n"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("1,0,down,5\n1,0,down,5\n1,0,up,5\n", "client 0 twice in round 1"),
        ("1,0,down,5\n1,0,up,5\n1,0,up,5\n", "client 0 twice in round 1"),
        ("1,-1,down,5\n1,-1,up,5\n", "names client -1"),
        ("1,7,down,5\n", "names client 7"),
        ("1,0,up,5\n", "never asked"),
        ("1,0,down,5,5\n", "is no ledger of a run"),
        ("1,0,sideways,5\n", "is no ledger of a run"),
        ("", "is no ledger of a run"),
    ],
)
def test_a_ledger_that_no_run_wrote_is_refused(rows, said, tmp_path):
    (tmp_path / "ledger.csv").write_text(LEDGER + rows)
    with pytest.raises(DataError, match=said):
        read_arrivals(tmp_path / "ledger.csv", 3)


def test_who_counted_in_a_secure_sum_stands_in_a_column_of_its_own(tmp_path):
    """Bytes do not tell: one whose upload was lost can help to unmask, and one that counts need not."""
    rows = "1,0,down,5,9,0\n1,1,down,5,9,1\n1,2,down,0,0,0\n1,0,up,0,9,0\n1,1,up,5,0,1\n1,2,up,0,0,0\n"
    (tmp_path / "ledger.csv").write_text("round,client,direction,value,unmask,counted\n" + rows)
    found = read_arrivals(tmp_path / "ledger.csv", 3)
    assert [x.tolist() for x in (found.asked(1), found.reached(1), found.counted(1))] == [[0, 1, 2], [0, 1], [1]]


def test_a_ledger_is_read_in_any_order(tmp_path):
    (tmp_path / "ledger.csv").write_text(LEDGER + "1,2,down,5\n1,0,down,5\n1,2,up,5\n1,0,up,5\n")
    found = read_arrivals(tmp_path / "ledger.csv", 3)
    assert found.asked(1).tolist() == [0, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"run": "00"},
        {"run": 5},
        {"roster": []},
        {"roster": [{"client": 1, "key": "a", "samples": 5}]},
        {"roster": [{"client": 0, "key": "a", "samples": "5"}]},
        {"roster": [{"client": 0, "key": "a", "samples": None}]},
        {"roster": [{"client": 0, "key": "a", "samples": -5}]},
        {"roster": [{"client": 0, "key": "", "samples": 5}]},
        {"roster": {"client": 0}},
        {"roster": "x"},
        {"shape": [0]},
        {"shape": 3},
        {"classes": "many"},
    ],
    ids=str,
)
def test_a_federation_file_that_was_altered_is_refused(change, tmp_path):
    sound = {"run": "00" * 16, "roster": [{"client": 0, "key": "a", "samples": 5}], "shape": [1, 8, 8], "classes": 10}
    path = tmp_path / "federation.json"
    path.write_text(json.dumps(sound))
    assert read_federation(tmp_path).roster.count.tolist() == [5]
    path.write_text(json.dumps(sound | change))
    with pytest.raises(CheckpointError, match="altered"):
        read_federation(tmp_path)


def test_epsilon_of_a_run_played_again_counts_those_asked(tmp_path):
    method, few = [{"dp": {"noise": 8.0}}], STUDY | {"sample": 1, "rounds": 2}
    federated = Federated(study_with(method, **few, network={"over": 1.0}), tmp_path / "federated")
    result = federated.run()
    record = {"arrived": str(federated.folder / "run")}
    again = Simulated(study_with(method, **few, fleet=record), tmp_path / "again").result
    assert again.model_sha256 == result.model_sha256
    assert again.epsilon == result.epsilon
