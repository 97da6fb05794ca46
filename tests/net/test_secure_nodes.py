"""A server that sees everything and lies: it reads noise, and a node gives it its share of one sum and nothing else."""

import zlib
from collections.abc import Callable, Generator, Iterator

import numpy as np
import pytest

from net.federation import Federated, study_with
from sparing.core.errors import ConfigError, FederationError, SecureError
from sparing.net.client_scores import Whose
from sparing.net.key_book import PublicKeyBook
from sparing.net.letter import Kind, Letter, read_letter, read_sentence, write_letter
from sparing.net.node_sums import SumRules, open_node_keys, read_keys_file
from sparing.secure.long_term import KeyRoster, new_node_keys, read_key_roster
from sparing.secure.node_rules import NodePolicy
from sparing.secure.sum_messages import MESSAGE_HEAD_BYTES
from sparing.secure.sum_terms import read_sum_terms, write_sum_terms
from sparing.secure_round.sum_notice import read_notice, write_notice

TASK = {"data": "digits", "clients": 5, "split": {"dirichlet": 0.5}, "model": {"mlp": {"hidden": [12, 10]}}}
SECURE_ANSWERS = (Kind.JOINED, Kind.PREPARED, Kind.UPLOAD, Kind.SHARES)
STUDY = {"task": TASK, "rounds": 2, "sample": 5, "evaluate": {"every": 2}, "local": {"steps": 2, "lr": 0.05}}


class Spy:
    """A carrier that keeps every letter and answer; `change` may alter a letter on its way."""

    def __init__(self, federated: Federated, change: Callable[[Letter], Letter] = lambda letter: letter):
        self.federated, self.change = federated, change
        self.letters: list[Letter] = []
        self.answers: list[Letter] = []

    def exchange(
        self, letters: Iterator[tuple[int, bytes]], seconds: float, most: Callable[[int], int]
    ) -> Generator[tuple[int, bytes], None, None]:
        for who, data in letters:
            self.letters.append(self.change(read_letter(data, 1 << 30)))
            answer = self.federated.nodes[who].handle(write_letter(self.letters[-1]))
            self.answers.append(read_letter(answer, 1 << 30))
            yield who, answer

    def kind(self, kind: Kind) -> list[Letter]:
        return [letter for letter in self.letters if letter.kind == kind]

    def uploads(self) -> list[Letter]:
        return [answer for answer in self.answers if answer.kind == Kind.UPLOAD]


@pytest.fixture
def played(tmp_path):
    federated = Federated(study_with("fedavg", **STUDY, secure=True), tmp_path)
    spy = Spy(federated)
    federated.run(spy)
    return federated, spy


def ask(federated: Federated, letter: Letter) -> Letter:
    return read_letter(federated.nodes[letter.client].handle(write_letter(letter)), 1 << 30)


def refused(federated: Federated, letter: Letter) -> str:
    answer = ask(federated, letter)
    assert answer.kind == Kind.REFUSED, answer.kind
    return read_sentence(answer.body)


def test_uploads_look_like_noise_and_no_two_are_related(played):
    _, spy = played
    bodies = [np.frombuffer(one.body[MESSAGE_HEAD_BYTES:], np.uint8) for one in spy.uploads()]
    assert len(bodies) == 10
    for body in bodies:
        counts = np.bincount(body, minlength=256)
        expected = counts.sum() / 256
        assert ((counts - expected) ** 2 / expected).sum() < 400  # 255 degrees of freedom: about 1 in 10^8
    for i, one in enumerate(bodies):
        for other in bodies[:i]:
            same = float((one == other).mean())
            assert abs(same - 1 / 256) < 0.01


def new_attempt(spy: Spy, client: int) -> Letter:
    """The last round of this client, asked for once more."""
    train = next(one for one in reversed(spy.kind(Kind.TRAIN)) if one.client == client)
    terms = read_notice(train.body)[0].terms
    return train._replace(kind=Kind.PREPARE, body=write_sum_terms(terms._replace(attempt=terms.attempt ^ 1)))


def test_the_same_update_again_goes_under_another_mask(tmp_path):
    network = {"deadline": 10.0, "retries": 1, "quorum": 3}
    federated = Federated(study_with("fedavg", **STUDY, secure=True, network=network), tmp_path)
    spy = Spy(federated)

    def forgetful(letters, seconds, most):
        for who, data in list(letters):
            answer = federated.nodes[who].handle(data)
            spy.letters.append(read_letter(data, 1 << 30))
            spy.answers.append(read_letter(answer, 1 << 30))
            if spy.letters[-1].kind != Kind.INTRODUCE or who >= 3 or spy.kind(Kind.PREPARE):
                yield who, answer

    spy.exchange = forgetful  # type: ignore[method-assign]
    federated.run(spy)
    first, again = (one.body for one in spy.uploads() if one.client == 4 and one.round == 1)
    bytes_of = [np.frombuffer(one[MESSAGE_HEAD_BYTES:], np.uint8) for one in (first, again)]
    assert abs(float((bytes_of[0] == bytes_of[1]).mean()) - 1 / 256) < 0.01


def test_a_round_is_unmasked_once_even_after_a_restart(played):
    federated, spy = played
    last = spy.kind(Kind.UNMASK)[-1]
    federated.start_node(last.client)
    first, again = ask(federated, last), ask(federated, last)
    assert first.kind == Kind.SHARES
    assert first.body == again.body, "the same list gets the same answer"
    lists = bytearray(last.body)
    lists[MESSAGE_HEAD_BYTES] ^= 1 << ((last.client + 1) % 5)
    lists[MESSAGE_HEAD_BYTES + 1] ^= 1 << ((last.client + 1) % 5)
    assert "unmasked with another list of survivors" in refused(federated, last._replace(body=bytes(lists)))
    again = new_attempt(spy, last.client)
    assert (ask(federated, again).kind, ask(federated, again).body) == (Kind.BOUND, b"")
    train = next(one for one in reversed(spy.kind(Kind.TRAIN)) if one.client == last.client)
    notice, download = read_notice(train.body)
    other = write_notice(notice._replace(terms=read_sum_terms(again.body)))
    assert ask(federated, train._replace(body=other + download)).kind == Kind.BOUND
    assert ask(federated, train).kind == Kind.PREPARED, "the same attempt gets the same answer"


def test_terms_other_than_the_studys_are_refused(tmp_path):
    def weaker(letter: Letter) -> Letter:
        if letter.kind != Kind.TRAIN:
            return letter
        notice, download = read_notice(letter.body)
        changed = notice._replace(terms=notice.terms._replace(least=notice.terms.least - 1))
        return letter._replace(body=write_notice(changed) + download)

    network = {"deadline": 10.0, "retries": 0, "quorum": 3}
    federated = Federated(study_with("fedavg", **STUDY, secure=True, network=network), tmp_path)
    spy = Spy(federated, weaker)
    with pytest.raises(Exception, match="the terms of the sum of round 1 are not those of the study"):
        federated.run(spy)
    assert not spy.uploads()


def other_grid(letter: Letter) -> Letter:
    """By which nothing of an update is left in the sum."""
    notice, download = read_notice(letter.body)
    return letter._replace(body=write_notice(notice._replace(total=2.0**52)) + download)


def other_model(letter: Letter) -> Letter:
    """With one weight changed, and the checksum made to fit."""
    notice = len(letter.body) - len(read_notice(letter.body)[1])
    parcel = bytearray(letter.body[notice:-4])
    parcel[len(parcel) // 2] ^= 1
    return letter._replace(body=letter.body[:notice] + parcel + zlib.crc32(parcel).to_bytes(4, "little"))


def other_numbers(letter: Letter) -> Letter:
    return letter._replace(samples=letter.samples + 1)


@pytest.mark.parametrize("lie", [other_grid, other_model, other_numbers])
def test_what_is_told_to_one_client_alone_is_refused(lie, tmp_path):
    """Else all but one could be told something by which nothing of them is left in the sum."""
    network = {"deadline": 10.0, "retries": 0, "quorum": 3}
    federated = Federated(study_with("fedavg", **STUDY, secure=True, network=network), tmp_path)
    spy = Spy(federated, lambda letter: lie(letter) if letter.kind == Kind.TRAIN and letter.client else letter)
    with pytest.raises(FederationError, match="about another model, grid or study than this client was told of"):
        federated.run(spy)
    assert not spy.uploads()


@pytest.mark.parametrize("change", ["cohort", "bits", "about"])
def test_an_update_is_for_the_sum_that_it_was_trained_for(change, tmp_path):
    """With dp its noise is that of a cohort's size; and a value that does not fit into fewer bits would be told."""
    federated = Federated(study_with([{"dp": {"noise": 1.0}}], **STUDY, secure=True), tmp_path)
    spy = Spy(federated, stop_before(Kind.INTRODUCE))
    with pytest.raises(Stopped):
        federated.run(spy)
    again = new_attempt(spy, 0)
    terms = read_sum_terms(again.body)
    fewer = federated.nodes[0].jobs[0].secure.terms(*terms[:3], (0, 1, 2), terms.size, terms.bits, terms.about)  # type: ignore[union-attr]
    lies = {"cohort": fewer, "bits": terms._replace(bits=33), "about": terms._replace(about=bytes(32))}
    lie = lies[change]
    asked = again._replace(body=write_sum_terms(lie), cohort=len(lie.cohort))
    assert "has trained round 1 for a sum by other terms" in refused(federated, asked)
    assert ask(federated, again).kind == Kind.PREPARED


def test_noise_is_that_of_the_cohort_in_the_terms(tmp_path):
    """More honest clients have smaller parts of it."""
    federated = Federated(study_with([{"dp": {"noise": 1.0}}], **STUDY, secure=True), tmp_path)
    spy = Spy(federated, stop_before(Kind.TRAIN))
    with pytest.raises(Stopped) as stopped:
        federated.run(spy)
    train = stopped.value.letter._replace(cohort=50)
    assert "terms of another sum than that of round 1" in refused(federated, train)
    prepare = train._replace(kind=Kind.PREPARE, cohort=5, body=write_sum_terms(read_notice(train.body)[0].terms))
    assert ask(federated, prepare).kind == Kind.NEED


def stop_before(kind: Kind) -> Callable[[Letter], Letter]:
    def stop(letter: Letter) -> Letter:
        if letter.kind == kind:
            raise Stopped(letter)
        return letter

    return stop


class Stopped(KeyboardInterrupt):
    def __init__(self, letter: Letter):
        self.letter = letter


def test_a_refusal_tells_nothing_of_an_update(tmp_path):
    local = {"steps": 2, "lr": 1e9}
    network = {"deadline": 10.0, "retries": 0, "quorum": 3}
    federated = Federated(study_with("fedavg", **(STUDY | {"local": local}), secure=True, network=network), tmp_path)
    lines: list[str] = []
    for node in federated.nodes.values():
        node.tell = lines.append
    spy = Spy(federated)
    with pytest.raises(FederationError, match="no update of round 1 that can be summed; its node's own log says why"):
        federated.run(spy)
    assert any("update of size" in line for line in lines)
    said = [read_sentence(one.body) for one in spy.answers if one.kind == Kind.REFUSED]
    assert said
    assert not any("size" in one for one in said)


def test_keys_are_pinned_at_joining(played):
    federated, spy = played
    keys = spy.kind(Kind.KEYS)[0]
    text = keys.body.decode()
    other = KeyRoster({who: new_node_keys().public() for who in range(5)}).text()
    mixed = "".join(
        mine if i == keys.client else theirs
        for i, (mine, theirs) in enumerate(zip(text.splitlines(True), other.splitlines(True), strict=True))
    )
    assert "has changed since this node joined" in refused(federated, keys._replace(body=mixed.encode()))
    assert ask(federated, keys).kind == Kind.JOINED


def test_a_node_goes_by_the_keys_that_were_handed_out(tmp_path):
    federated = Federated(study_with("fedavg", **STUDY, secure=True), tmp_path)
    handed_out = KeyRoster(
        {who: open_node_keys(tmp_path / f"node-{who}", who).public() for who in range(4)}
        | {4: new_node_keys().public()}
    )
    federated.nodes[0].rules = SumRules(True, NodePolicy(), handed_out)
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        if "accept everybody's keys" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federated.run(tell=tell)
    assert "is not the one that was handed out" in lines[-1]


def test_keys_that_are_handed_out_later_count_too(played):
    """A node joined without `--keys`, and is started with them."""
    federated, spy = played
    known = read_key_roster(spy.kind(Kind.KEYS)[0].body.decode())
    handed_out = KeyRoster({who: known[who] for who in range(4)} | {4: new_node_keys().public()})
    federated.start_node(0)
    federated.nodes[0].rules = SumRules(True, NodePolicy(), handed_out)
    assert "is not the one that was handed out" in refused(federated, new_attempt(spy, 0))


def test_keys_that_would_spoil_the_roster_of_all_are_refused():
    book, mine, others = PublicKeyBook(), new_node_keys().public(), new_node_keys().public()
    book.add(0, b"".join(mine))
    for wrong in (mine, (others.signing, mine.sharing), (others.signing, bytes(32)), (mine.signing, others.sharing)):
        with pytest.raises(SecureError):
            book.add(1, b"".join(wrong))
    book.add(1, b"".join(others))
    book.add(1, b"".join(others))
    assert list(book.roster) == [0, 1]


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        (SumRules(True), "has no secure aggregation, which this node insists on"),
        (SumRules(False), ""),
    ],
)
def test_a_node_may_insist_on_secure_sums(rules, match, tmp_path):
    federated = Federated(study_with("fedavg", **STUDY), tmp_path)
    federated.nodes[2].rules = rules

    def tell(line: str) -> None:
        if "client 2: " in line:
            raise ConfigError(line)

    if match:
        with pytest.raises(ConfigError, match=match):
            federated.run(tell=tell)
    else:
        federated.run()


def test_a_node_wants_more_clients_than_the_study(tmp_path):
    network = {"deadline": 10.0, "retries": 0, "quorum": 3}
    federated = Federated(study_with("fedavg", **STUDY, secure=True, network=network), tmp_path)
    for node in federated.nodes.values():
        node.rules = SumRules(True, NodePolicy(clients=6))
    with pytest.raises(Exception, match="this node wants 6 at least"):
        federated.run()


def test_a_file_of_keys_that_is_none_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "keys.txt").write_text("0 abc\n")
    with pytest.raises(ConfigError, match=r"keys.txt: line 1 of the key roster is '0 abc'"):
        read_keys_file(tmp_path / "keys.txt")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys_file(tmp_path / "none.txt")


def test_a_node_that_lost_its_keys_is_left_out(tmp_path):
    network = {"deadline": 10.0, "retries": 0, "quorum": 3}
    federated = Federated(study_with("fedavg", **STUDY, secure=True, network=network), tmp_path)

    def stop(letter: Letter) -> Letter:
        if letter.kind == Kind.TRAIN and letter.round == 2 and letter.client == 1:
            for path in (tmp_path / "node-1").glob("client-1*"):
                path.unlink()
            federated.start_node(1)
        return letter

    result = federated.run(Spy(federated, stop))
    assert [row.clients for row in result.table] == [5, 4]
    audit = (tmp_path / "run" / "audit.jsonl").read_text()
    assert "client 1 has other keys than those that everybody holds" in audit


def test_a_node_evaluates_only_in_studies_that_say_so(played):
    """Else a server that lies could ask at any time how well some model fits a client's samples."""
    federated, spy = played
    asked = spy.kind(Kind.TRAIN)[-1]._replace(kind=Kind.EVALUATE, body=bytes([Whose.GLOBAL]))
    assert "has no evaluation on clients (network.evaluate)" in refused(federated, asked)


def test_a_node_evaluates_where_the_study_says_so(tmp_path):
    federated = Federated(study_with("fedavg", **STUDY, secure=True, network={"evaluate": "clients"}), tmp_path)
    spy = Spy(federated)
    federated.run(spy)
    assert spy.kind(Kind.EVALUATE)
    assert {one.kind for one in spy.answers if one.body and one.kind not in SECURE_ANSWERS} == {Kind.SCORES}


def test_terms_in_letters_are_read_as_written(played):
    _, spy = played
    terms = read_notice(spy.kind(Kind.TRAIN)[0].body)[0].terms
    assert read_sum_terms(write_sum_terms(terms)) == terms
    assert terms.cohort == (0, 1, 2, 3, 4)
