"""Uploads summed under masks: the simulation's bits, ledger and clients, on or off, whoever drops out."""

import itertools
import json
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from net.federation import Federated, Simulated, same_states, study_with
from sparing.core.errors import CheckpointError, FederationError
from sparing.net import node
from sparing.net.kept_sum import kept_sum_path, read_kept_sum, write_kept_sum
from sparing.net.letter import Kind, read_letter
from sparing.net.server import read_federation
from sparing.secure_round import fixed_point
from sparing.secure_round.sum_layout import LOSS, split_number
from sparing.secure_round.sum_notice import read_notice

MLP = {"data": "digits", "clients": 6, "split": {"dirichlet": 0.5}, "model": {"mlp": {"hidden": [12, 10]}}}
STUDY = {"task": MLP, "rounds": 3, "sample": 4, "evaluate": {"every": 3}, "local": {"steps": 2, "lr": 0.05}}
COMBINATIONS: list[Any] = [
    ["fedavg"],
    ["psfed"],
    [{"psfed": {"selector": "gradient"}}, "personal"],
    ["fedadam"],
    ["scaffold"],
    [{"randk": {"shared": True}}, "memory"],
    [{"int8": {"common": True}}, "memory"],
    ["psfed", {"int8": {"common": True}}, "memory"],
    ["fedrep", {"int8": {"common": True, "stochastic": True}}],
    [{"int8": {"common": True}}, "memory", {"broadcast": {"by": "ecsq"}}],
]
SUMS: list[Any] = [["fedsim"], ["pfedsim"], [{"stein": {"warmup": 1}}], [{"dp": {"noise": 0.1}}]]


@pytest.mark.parametrize("method", COMBINATIONS, ids=str)
def test_loopback_is_the_simulation_on_and_off(method: Any, tmp_path) -> None:
    plain = Simulated(study_with(method, **STUDY), tmp_path / "plain")
    check(method, tmp_path, plain.result.model_sha256)


@pytest.mark.parametrize("method", SUMS, ids=str)
def test_what_clients_sum_is_the_simulation(method: Any, tmp_path) -> None:
    check(method, tmp_path)


def check(method: Any, tmp_path, sha256: str | None = None, **other: Any) -> None:
    study = study_with(method, **(STUDY | {"secure": True} | other))
    alone = Simulated(study, tmp_path / "simulated")
    federated = Federated(study, tmp_path / "federated")
    result = federated.run()
    assert result.model_sha256 == alone.result.model_sha256 == (sha256 or result.model_sha256)
    assert federated.ledger == alone.ledger
    assert same_states(federated, alone)
    assert [row.train_loss for row in result.table] == [row.train_loss for row in alone.result.table]


MOMENTS = {Kind.TRAIN: "prepare", Kind.PREPARE: "prepare", Kind.INTRODUCE: "upload", Kind.UNMASK: "unmask"}


class Silent:
    """Answers of some clients are lost at one moment of a round; `absent(round, client)` says at which."""

    def __init__(self, federated: Federated, absent: Callable[[int, int], str | None]):
        self.federated, self.absent = federated, absent
        self.seen: list[tuple[int, int, Kind]] = []
        self.stopped = False

    def exchange(
        self, letters: Iterator[tuple[int, bytes]], seconds: float, most: Callable[[int], int]
    ) -> Generator[tuple[int, bytes], None, None]:
        for who, data in letters:
            letter = read_letter(data, 1 << 30)
            self.seen.append((letter.round, who, letter.kind))
            answer = self.federated.nodes[who].handle(data)
            if MOMENTS.get(letter.kind) != (self.absent(letter.round, who) or "never"):
                yield who, answer


PATIENT = {"deadline": 60.0, "quorum": 0.5, "retries": 2}
LARGE = STUDY | {"task": MLP | {"clients": 8}, "sample": 8, "secure": True, "network": PATIENT, "rounds": 4}


@pytest.mark.parametrize("moment", ["prepare", "upload", "unmask"])
@pytest.mark.parametrize("method", [["psfed"], [{"int8": {"common": True}}, "memory"], ["scaffold"]], ids=str)
def test_a_drop_out_at_any_moment_leaves_the_bits_of_those_counted(method: Any, moment: str, tmp_path) -> None:
    federated = Federated(study_with(method, **LARGE), tmp_path)
    result = federated.run(Silent(federated, lambda t, who: moment if who == (t * 3) % 8 else None))
    arrived = 8 if moment == "unmask" else 7
    assert [row.clients for row in result.table] == [arrived] * 4
    again = played_again(federated, method, tmp_path)
    assert result.model_sha256 == again.result.model_sha256
    assert same_states(federated, again)


def played_again(federated: Federated, method: Any, tmp_path, **other: Any) -> Simulated:
    """The simulator without masks, given who counted."""
    plain = {key: value for key, value in LARGE.items() if key != "secure"}
    record = {"fleet": {"arrived": str(federated.folder / "run")}}
    return Simulated(study_with(method, **(plain | record | other)), tmp_path / "again")


def test_too_few_uploads_are_asked_for_again_over_the_same_updates(tmp_path) -> None:
    federated = Federated(study_with("psfed", **LARGE), tmp_path)
    tries: dict[int, int] = {}

    def absent(t: int, who: int) -> str | None:
        lost = who < 4 and tries.setdefault(t, 0) == 0
        return "upload" if lost else None

    post = Silent(federated, absent)
    plain = post.exchange

    def counting(letters, seconds, most):
        some = list(letters)
        if some and read_letter(some[0][1], 1 << 30).kind == Kind.PREPARE:
            tries[read_letter(some[0][1], 1 << 30).round] = 1
        yield from plain(iter(some), seconds, most)

    post.exchange = counting  # type: ignore[method-assign]
    result = federated.run(post)
    assert [row.clients for row in result.table] == [8] * 4
    assert sum(kind == Kind.TRAIN for _, _, kind in post.seen) == 8 * 4  # nobody trains twice
    assert sum(kind == Kind.PREPARE for _, _, kind in post.seen) == 8 * 4
    assert result.model_sha256 == Simulated(study_with("psfed", **LARGE), tmp_path / "alone").result.model_sha256


def test_a_round_that_cannot_be_unmasked_counts_for_nobody(tmp_path) -> None:
    method = ["scaffold", {"randk": {"shared": True, "ratio": 0.5}}]
    federated = Federated(study_with(method, **LARGE), tmp_path)
    result = federated.run(Silent(federated, lambda t, who: "unmask" if t == 2 and who < 5 else None))
    assert [row.clients for row in result.table] == [8, 0, 8, 8]
    audit = [json.loads(line) for line in (tmp_path / "run" / "audit.jsonl").read_text().splitlines()]
    assert [(one["round"], one["client"]) for one in audit] == [(2, None)], "nobody is blamed for it"
    assert audit[0]["why"].startswith("the round counts for nobody: shares of ")
    again = played_again(federated, method, tmp_path)
    assert result.model_sha256 == again.result.model_sha256
    assert same_states(federated, again)


def test_too_few_in_every_attempt_stops_in_a_sentence(tmp_path) -> None:
    federated = Federated(study_with("fedavg", **LARGE), tmp_path)
    with pytest.raises(FederationError, match=r"round 2.*in 3 attempts. Nothing is lost"):
        federated.run(Silent(federated, lambda t, who: "upload" if t == 2 and who < 5 else None))
    result = federated.resume()
    assert result.model_sha256 == Simulated(study_with("fedavg", **LARGE), tmp_path / "alone").result.model_sha256


def lies_in_numbers(value: int, liar: int, monkeypatch) -> None:
    """One client says this in place of all numbers but its loss."""
    true = node.client_vector

    def vector(method, sums, got, up, ctx):
        words, layout = true(method, sums, got, up, ctx).copy(), sums.layout
        each = layout.words(fixed_point.NUMBER_BITS)
        at = len(words) - each * sum(count for _, count in layout.numbers)
        for name, count in layout.numbers:
            if name != LOSS and int(ctx.ids[0]) == liar:
                words[at : at + each * count] = [word for word in split_number(value, layout) for _ in range(count)]
            at += each * count
        return words

    monkeypatch.setattr(node, "client_vector", vector)


@pytest.mark.parametrize("value", [1 << 158, -(1 << 158)])
def test_a_lie_about_sizes_does_not_end_the_run_for_others(value: int, monkeypatch, tmp_path) -> None:
    lies_in_numbers(value, 2, monkeypatch)
    federated = Federated(study_with([{"int8": {"common": True}}, "memory"], **LARGE), tmp_path)
    assert [row.clients for row in federated.run().table] == [8] * 4


@pytest.mark.parametrize("value", [1 << 158, -(1 << 158)])
def test_weights_that_cannot_be_are_noticed(value: int, monkeypatch, tmp_path) -> None:
    lies_in_numbers(value, 2, monkeypatch)
    federated = Federated(study_with("fedsim", **LARGE), tmp_path)
    assert [row.clients for row in federated.run().table] == [0] * 4
    assert "one of them lied, and nobody can tell which" in (tmp_path / "run" / "audit.jsonl").read_text()


def stopped_while_unmasking(tmp_path, last: int = 3, carrier: Any = Silent, **other: Any) -> Any:
    """A server that is killed once clients 0 to `last` have answered its request to unmask round 2;
    gives its carrier."""
    federated = Federated(study_with("psfed", **(LARGE | other)), tmp_path)

    def stop(t: int, who: int) -> str | None:
        if t == 2 and who == last and post.seen[-1][2] == Kind.UNMASK and not post.stopped:
            post.stopped = True
            raise KeyboardInterrupt
        return None

    post = carrier(federated, stop)
    with pytest.raises(KeyboardInterrupt):
        federated.run(post)
    return post


def test_a_server_that_stops_while_it_unmasks_asks_the_same_again(tmp_path) -> None:
    result = stopped_while_unmasking(tmp_path).federated.resume()
    assert result.model_sha256 == Simulated(study_with("psfed", **LARGE), tmp_path / "alone").result.model_sha256


@pytest.mark.parametrize("altered", ["masked", "arrived", "name"])
def test_a_kept_sum_that_was_altered_is_refused(altered: str, tmp_path) -> None:
    federated = stopped_while_unmasking(tmp_path).federated
    path = kept_sum_path(tmp_path / "run", 2)
    kept = read_kept_sum(path, read_federation(tmp_path / "run").run, 2)
    assert kept is not None
    others = {
        "masked": kept._replace(masked=kept.masked[:-1]),
        "arrived": kept._replace(arrived={*kept.arrived, 99}),
        "name": kept._replace(terms=kept.terms._replace(round=1)),
    }
    write_kept_sum(path, others[altered])
    with pytest.raises(CheckpointError, match="was altered, and nodes unmask no other sum of its round"):
        federated.resume()


def test_a_kept_sum_of_an_earlier_round_is_deleted_unread(tmp_path) -> None:
    federated = stopped_while_unmasking(tmp_path).federated
    kept_sum_path(tmp_path / "run", 1).write_bytes(b"damaged")
    assert [row.clients for row in federated.resume().table] == [8] * 4
    assert [path.name for path in (tmp_path / "run").glob("secure-sum*")] == ["secure-sum-4.safetensors"]


@pytest.mark.parametrize(
    ("last", "network", "clients"),
    [(3, PATIENT, 0), (7, PATIENT, 0), (1, PATIENT, 6), (1, {"quorum": 6}, 6), (0, {}, 0), (0, {"deadline": 60.0}, 0)],
    ids=str,
)
def test_a_round_whose_kept_sum_is_gone_goes_on_with_those_who_are_not_bound(last, network, clients, tmp_path) -> None:
    """Or, where they are too few, counts for nobody."""
    federated = stopped_while_unmasking(tmp_path, last, network=network).federated
    kept_sum_path(tmp_path / "run", 2).unlink()
    result = federated.resume()
    assert [row.clients for row in result.table] == [8, clients, 8, 8]
    audit = [json.loads(line) for line in (tmp_path / "run" / "audit.jsonl").read_text().splitlines()]
    said = "the round counts for nobody: too few clients are left that have not helped to unmask another sum of it"
    assert [(one["round"], one["why"]) for one in audit if one["client"] is None] == [(2, said)] * (not clients)
    again = played_again(federated, "psfed", tmp_path)
    assert result.model_sha256 == again.result.model_sha256
    assert same_states(federated, again)


def test_a_quorum_that_nobody_can_reach_stops_the_run(tmp_path) -> None:
    """It is no round that counts for nobody."""
    federated = Federated(study_with("psfed", **(LARGE | {"network": PATIENT | {"quorum": 9}})), tmp_path)
    with pytest.raises(FederationError, match="8 uploads, where 9 are needed"):
        federated.run()


class Weighed(Silent):
    """Knows every message that passed, of each client and round."""

    def __init__(self, federated: Federated, absent: Callable[[int, int], str | None]):
        super().__init__(federated, absent)
        self.down: dict[tuple[int, int], set[bytes]] = {}
        self.up: dict[tuple[int, int], set[bytes]] = {}

    def exchange(self, letters, seconds, most):
        for who, answer in super().exchange(self.weighed(letters), seconds, most):
            letter = read_letter(answer, 1 << 30)
            if letter.kind in (Kind.PREPARED, Kind.UPLOAD, Kind.SHARES):
                self.up.setdefault((letter.round, who), set()).add(letter.body)
            yield who, answer

    def weighed(self, letters: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        for who, data in letters:
            letter = read_letter(data, 1 << 30)
            if letter.kind in MOMENTS:
                download = read_notice(letter.body)[1] if letter.kind == Kind.TRAIN else b""
                parts = {letter.body[: len(letter.body) - len(download)], download} - {b""}
                self.down.setdefault((letter.round, who), set()).update(parts)
            yield who, data

    def check(self, asked: int = 8) -> None:
        """The ledger has all that passed, each message once."""
        rows = [row.split(",") for row in self.federated.ledger.splitlines()[1:]]
        found = {(int(t), int(who), way): sum(map(int, sizes[:-1])) for t, who, way, *sizes in rows}
        rounds, clients = {t for t, _, _ in found}, {who for _, who, _ in found}
        assert len(found) == 2 * asked * len(rounds)
        for t, who in itertools.product(rounds, clients):
            for way, passed in (("down", self.down), ("up", self.up)):
                assert found[t, who, way] == sum(map(len, passed.get((t, who), set()))), (t, who, way)


@pytest.mark.parametrize("moment", ["prepare", "upload", "unmask"])
def test_the_ledger_has_what_passed_where_a_client_drops_out(moment: str, tmp_path) -> None:
    """One whose upload was lost helps to unmask, and one whose help was lost was asked for it."""
    federated = Federated(study_with("psfed", **LARGE), tmp_path)
    post = Weighed(federated, lambda t, who: moment if who == (t * 3) % 8 else None)
    federated.run(post)
    post.check()


@pytest.mark.parametrize("last", [3, 7])
def test_the_ledger_has_what_passed_before_a_restart_while_unmasking(last: int, tmp_path) -> None:
    post = stopped_while_unmasking(tmp_path, last, Weighed)
    post.federated.resume(post)
    post.check()


def test_the_ledger_has_what_passed_in_every_attempt(tmp_path) -> None:
    federated = Federated(study_with("psfed", **LARGE), tmp_path)
    asked_again = lambda t: any(one[::2] == (t, Kind.PREPARE) for one in post.seen)  # noqa: E731
    post = Weighed(federated, lambda t, who: "upload" if t == 2 and who < 4 and not asked_again(t) else None)
    assert [row.clients for row in federated.run(post).table] == [8] * 4
    post.check()


def test_the_ledger_has_what_passed_in_a_round_that_counts_for_nobody(tmp_path) -> None:
    federated = Federated(study_with("psfed", **LARGE), tmp_path)
    post = Weighed(federated, lambda t, who: "unmask" if t == 2 and who < 5 else None)
    assert [row.clients for row in federated.run(post).table] == [8, 0, 8, 8]
    post.check()


def test_who_is_never_asked_is_billed_nothing(tmp_path) -> None:
    """Where more are asked than are wanted, the first to prepare go on."""
    study = LARGE | {"sample": 5, "network": {"over": 0.6}, "rounds": 2}
    federated = Federated(study_with("psfed", **study), tmp_path)
    post = Weighed(federated, lambda t, who: None)
    assert [row.clients for row in federated.run(post).table] == [6, 6]
    post.check()


def test_a_ledger_where_nothing_fails_is_the_simulations(tmp_path) -> None:
    """Though fewer than all could unmask."""
    check("psfed", tmp_path, **{**LARGE, "rounds": 2})
