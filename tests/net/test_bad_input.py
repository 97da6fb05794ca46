"""What cannot go on is said in one sentence, on the side that can fix it, and nothing is lost."""

import errno
import json
import re
import shutil
from contextlib import contextmanager

import pytest

import sparing
from net.federation import Federated, Simulated, study_with
from sparing.core.errors import CheckpointError, ConfigError, WireError
from sparing.net.letter import Kind, Letter, read_letter, read_sentence, write_letter
from sparing.net.node import Holding, Node
from sparing.net.roster import ClientRoster, Entry, read_roster
from sparing.net.server import study_on_network
from sparing.net.store import Store
from sparing.net.terms import digest_of, read_terms
from sparing.runs.files import checkpoint

TASK = {"data": "digits", "clients": 3, "split": "iid", "model": {"mlp": {"hidden": [8]}}}
STUDY = {"task": TASK, "rounds": 2, "sample": 3, "evaluate": {"every": 2}, "local": {"steps": 2, "lr": 0.1}}
METHOD = "psfed+topk+int8+memory"


@pytest.fixture
def ended(tmp_path):
    """A federation after its run."""
    federated = Federated(study_with(METHOD, **STUDY), tmp_path / "federated")
    federated.run()
    return federated


def hello(federated: Federated, who: int = 0, change=lambda terms: terms, run: bytes | None = None) -> str:
    """What a node says to a greeting like the one it joined by, with other terms; "" if it joins."""
    kept = federated.nodes[who].store.load(who)
    terms = change(kept.terms)
    letter = Letter(Kind.HELLO, run or kept.run, digest_of(terms), who, clients=3, body=bytes(32) + terms)
    answer = read_letter(federated.nodes[who].handle(write_letter(letter)), 1 << 20)
    return read_sentence(answer.body) if answer.kind == Kind.REFUSED else ""


def other(**values):
    return lambda terms: json.dumps(json.loads(terms) | values, sort_keys=True, separators=(",", ":")).encode()


NEW_RUN = b"n" * 16


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other(sparing="9.9"), "this node has sparing .*, the server 9.9; install sparing 9.9 here"),
        (other(torch="1.0"), "this node has torch .*, the server 1.0; install torch 1.0 here"),
        (other(model="0" * 64), "initial model has SHA-256 .*, the server's 000000000000"),
        (other(code={"task.model": "f" * 64}), "task.model: this node's file has SHA-256 none, the server's ffffffff"),
        (other(study={"task": {"model": "os.path:join"}}), "names? the model 'os.path:join', .* must not name code"),
        (other(study={"task": {"model": "my.py:Net"}}), "name the model 'my.py:Net', .* must not name code"),
        (other(study={"task": {"model": {"evil.py:Net": {}}}}), "must not name code"),
        (other(study={"task": {"model": "your own"}}), r"name this node's copy: --model my_file.py:Net"),
        (other(study={"task": {"model": "mlp"}, "method": ["psfedd"]}), "unknown method 'psfedd'"),
        (other(study={"task": {"model": "mlp"}, "rounds": -3}), "rounds"),
        (other(study={"task": {"model": "mlp"}, "fleet": {"capacity": "/etc/hosts"}}), "terms hold 'fleet'"),
        (other(study={"task": {"model": "mlp"}, "evaluate": {"metrics": ["a.py:f"]}}), "terms hold 'evaluate'"),
        (other(study={"task": {"model": "mlp", "data": "x.py:f"}}), "terms hold 'task.data'"),
        (other(surprise=1), "the terms cannot be read"),
        (lambda terms: b"[" * 5000 + b"]" * 5000, "nested 5000 deep"),
        (lambda terms: b"\xff" * 100, "the terms cannot be read"),
    ],
)
def test_a_node_agrees_to_no_other_terms(change, said, tmp_path):
    federated = Federated(study_with(METHOD, **STUDY), tmp_path)
    plain = Federated(study_with(METHOD, **STUDY), tmp_path / "other")
    plain.run()
    kept = plain.nodes[0].store.load(0)
    terms = change(kept.terms)
    letter = Letter(Kind.HELLO, NEW_RUN, digest_of(terms), 0, clients=3, body=bytes(32) + terms)
    answer = read_letter(federated.nodes[0].handle(write_letter(letter)), 1 << 20)
    assert answer.kind == Kind.REFUSED
    assert re.search(said, read_sentence(answer.body)), read_sentence(answer.body)
    assert not federated.nodes[0].store.clients(), "nothing is kept of a server that was refused"


def test_terms_that_do_not_match_their_digest_are_refused(ended):
    kept = ended.nodes[0].store.load(0)
    letter = Letter(Kind.HELLO, kept.run, bytes(16), 0, clients=3, body=bytes(32) + kept.terms)
    answer = read_letter(ended.nodes[0].handle(write_letter(letter)), 1 << 20)
    assert "do not match their digest" in read_sentence(answer.body)


def test_another_run_needs_another_state_folder(ended):
    before = ended.nodes[0].store.path(0).read_bytes()
    assert "belongs to run" in hello(ended, run=NEW_RUN)
    assert ended.nodes[0].store.path(0).read_bytes() == before
    assert hello(ended) == "", "its own run it joins again"


def test_a_study_that_changed_under_way_is_refused(ended):
    assert "the server's study has changed since this node joined" in hello(ended, change=lambda terms: terms + b" ")


def test_a_node_whose_samples_changed_says_so(ended):
    x, y = ended.holding(0).train
    ended.nodes[0].store.close()
    node = Node(Store(ended.folder / "node-0"), {0: Holding((x[:-1], y[:-1]))})
    kept = node.store.load(0)
    letter = Letter(Kind.TRAIN, kept.run, digest_of(kept.terms), 0, 3, 2, clients=3, n=kept.n)
    answer = read_letter(node.handle(write_letter(letter)), 1 << 20)
    assert f"joined with {kept.n} samples and has {kept.n - 1} now" in read_sentence(answer.body)


def test_a_state_folder_of_another_client_is_refused(ended):
    ended.nodes[0].store.close()
    node = Node(Store(ended.folder / "node-0"), {None: ended.holding(1)})
    letter = Letter(Kind.HELLO, NEW_RUN, bytes(16), 1, clients=3, body=bytes(32))
    answer = read_letter(node.handle(write_letter(letter._replace(terms=digest_of(b"")))), 1 << 20)
    assert "holds the state of client 0, and the letter is for client 1" in read_sentence(answer.body)


def test_one_process_uses_a_state_folder(ended):
    with pytest.raises(CheckpointError, match="in use by another run"):
        Store(ended.folder / "node-0")


def test_a_client_that_is_not_on_a_node_is_named(ended):
    letter = Letter(Kind.HELLO, NEW_RUN, digest_of(b""), 2, clients=3, body=bytes(32))
    answer = read_letter(ended.nodes[0].handle(write_letter(letter)), 1 << 20)
    assert "client 2 is not on this node, which has 0; correct the roster" in read_sentence(answer.body)


def test_a_server_that_goes_on_from_an_older_checkpoint_is_told(tmp_path):
    study = study_with(METHOD, **STUDY | {"rounds": 4}, network={"deadline": 60.0, "retries": 0})
    federated = Federated(study, tmp_path / "federated")
    out, old = federated.folder / "run", tmp_path / "old"

    class Keeping:
        def exchange(self, letters, seconds, most):
            for who, data in letters:
                if read_letter(data, 1 << 30).round == 2 and not old.exists():
                    shutil.copytree(out, old)
                yield who, federated.nodes[who].handle(data)

    federated.run(Keeping())
    shutil.rmtree(out)
    shutil.copytree(old, out)
    with pytest.raises(sparing.SparingError, match="it goes on from an older checkpoint: restore a newer one"):
        federated.resume()
    kept = federated.nodes[0].store.load(0)
    assert kept.settled == 3, "the node keeps what it knows"


def test_a_full_disk_on_a_node_makes_it_absent_until_there_is_room(tmp_path, monkeypatch):
    study = study_with(METHOD, **STUDY)
    federated, full = Federated(study, tmp_path / "federated"), [3]
    plain = checkpoint.replace_file

    @contextmanager
    def replace_file(path):
        if "node-1" in str(path) and full[0] and federated.folder.joinpath("run", "config.yaml").exists():
            full[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        with plain(path) as file:
            yield file

    monkeypatch.setattr(checkpoint, "replace_file", replace_file)
    result = federated.run()
    assert "No space left on device" in (federated.folder / "run" / "audit.jsonl").read_text()
    assert result.model_sha256 == Simulated(study, tmp_path / "simulated").result.model_sha256


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names nobody"),
        ("client,key\n", "names nobody"),
        ("client\n0\n", "has no column 'key'"),
        ("client,key,colour\n0,a,red\n", "has a column 'colour' that nothing reads"),
        ("client,key\n0,a\n0,b\n", "names client 0 twice"),
        ("client,key\n0,a\n2,b\n", "has no client 1"),
        ("client,key\n0,\n", "client 0 has no key"),
        ("client,key\nx,a\n", "not a number"),
        ("client,key\n-1,a\n", "cannot be"),
        ("client,key,samples\n0,a,0\n", "cannot be"),
        ("client,key,rank\n0,a,inf\n", "cannot be"),
        ("client,key,rank\n0,a,0.5\n1,b,\n", "gives no rank for client 1"),
        ("client,key,rank\n0,a,5\n", "cannot be"),
        (f"client,key,samples\n0,a,{10**30}\n", "cannot be"),
        ("client,key\n0,n\u00f6de\n", "a key that no carrier knows"),
        (f"client,key\n0,{'a' * 300}\n", "a key that no carrier knows"),
    ],
)
def test_a_roster_with_a_mistake_is_refused(text, said, tmp_path):
    path = tmp_path / "roster.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_roster(path)


def test_a_roster_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"the roster .*none.csv cannot be read"):
        read_roster(tmp_path / "none.csv")


def test_who_joins_is_checked_against_the_roster():
    roster = ClientRoster([Entry(0, "a", 50), Entry(1, "b")])
    roster.joined(0, 50, None)
    with pytest.raises(ConfigError, match="says it has 60 samples, and the roster says 50"):
        roster.joined(0, 60, None)
    with pytest.raises(ConfigError, match=r"1000 samples, more than network.most_samples 500"):
        roster.joined(1, 1000, 500)
    with pytest.raises(ConfigError, match="has no samples"):
        roster.joined(1, 0, None)


@pytest.mark.parametrize(
    "study",
    [
        {"fleet": {"dropout": 0.1}},
        {"fleet": {"available": 0.5}},
        {"fleet": {"links": "4g"}},
        {"fleet": {"attack": {"kind": "sign-flip"}}},
        {"fleet": {"latency": 0.1}},
        {"plan": {"parcels": "kept"}, "engine": "debug"},
        {"record": ["updates"]},
        {"task": TASK | {"held_out": 1}},
        {"task": TASK | {"validation": 0.2}, "evaluate": {"set": "validation"}},
        {"method": [{"dp": {"source": "seed"}}]},
        {"method": [{"obfuscate": {"rotate": True, "source": "seed"}}]},
        {"network": {"quorum": 1.5}},
    ],
    ids=str,
)
def test_what_only_a_simulation_can_do_is_refused(study):
    values = STUDY | {"method": "fedavg"} | study
    with pytest.raises(ConfigError, match=r"on a network|for simulations|drop it|lies between"):
        study_on_network(study_with(**values), ClientRoster([Entry(k, str(k)) for k in range(3)]))


def test_a_served_run_is_not_resumed_as_a_simulation(ended):
    with pytest.raises(ConfigError, match="use `sparing serve`"):
        sparing.resume(ended.folder / "run")


def test_a_simulation_is_not_resumed_as_a_federation(tmp_path):
    federated = Federated(study_with("fedavg", **STUDY), tmp_path)
    sparing.run(TASK, "fedavg", rounds=1, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="is a simulation; go on with `sparing resume"):
        federated.resume()


def test_a_method_that_nothing_bounds_is_warned_of(tmp_path):
    from sparing.net.server import start_federation

    federated = Federated(study_with("fedavg", **STUDY), tmp_path)
    with pytest.warns(UserWarning, match="put norm-bound into the method"):
        start_federation(federated.study, federated.roster, federated.sets, federated.carried(), None)


def test_terms_are_read_by_nobody_else():
    with pytest.raises(WireError):
        read_terms(b"{}")
