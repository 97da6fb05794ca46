"""Answers that no node of ours would give: the client is absent, the others count, and the server lives."""

import dataclasses
import struct
from collections.abc import Callable

import numpy as np
import pytest

from net.federation import Federated, Simulated, study_with
from sparing.net.letter import HEAD_BYTES, Kind, Letter, read_letter, write_letter

LIAR = 1
TASK = {"data": "digits", "clients": 4, "split": "iid", "model": {"mlp": {"hidden": [8]}}}
NETWORK = {"deadline": 100.0, "quorum": 3, "retries": 0}
STUDY = {"task": TASK, "rounds": 3, "sample": 4, "evaluate": {"every": 3}, "local": {"steps": 2, "lr": 0.1}}


@dataclasses.dataclass
class Lying:
    """A carrier in which one client's node gives other answers."""

    federated: Federated
    lie: Callable[[bytes, bytes], list[bytes]]

    def exchange(self, letters, seconds, most):
        for who, data in letters:
            answer = self.federated.nodes[who].handle(data)
            lies = read_letter(data, 1 << 30).kind == Kind.TRAIN and who == LIAR
            for one in self.lie(answer, data) if lies else [answer]:
                yield who, one


def honest(answer: bytes, asked: bytes) -> list[bytes]:
    return [answer]


def changed(**fields) -> Callable[[bytes, bytes], list[bytes]]:
    return lambda answer, asked: [write_letter(read_letter(answer, 1 << 30)._replace(**fields))]


def body(change: Callable[[bytes], bytes]) -> Callable[[bytes, bytes], list[bytes]]:
    def lie(answer: bytes, asked: bytes) -> list[bytes]:
        letter = read_letter(answer, 1 << 30)
        return [write_letter(letter._replace(body=change(letter.body)))]

    return lie


def raw(change: Callable[[bytes], bytes]) -> Callable[[bytes, bytes], list[bytes]]:
    return lambda answer, asked: [change(answer)]


def with_values(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[bytes], bytes]:
    """The upload of FedAvg with other numbers in it, and a checksum that fits."""

    def lie(upload: bytes) -> bytes:
        import zlib

        at = upload.index(b"SPAR")
        values = np.frombuffer(upload, "<f4", count=(len(upload) - 40) // 4, offset=at + 20).copy()
        content = upload[: at + 20] + change(values).astype("<f4").tobytes()
        content += upload[len(content) : -4]
        return content + zlib.crc32(content).to_bytes(4, "little")

    return lie


NESTED = b"[" * 200_000 + b"]" * 200_000
LIES: dict[str, Callable[[bytes, bytes], list[bytes]]] = {
    "nothing": lambda answer, asked: [],
    "empty": lambda answer, asked: [b""],
    "one byte": lambda answer, asked: [b"\x00"],
    "head cut": raw(lambda data: data[: HEAD_BYTES - 1]),
    "head alone": raw(lambda data: data[:HEAD_BYTES]),
    "magic": raw(lambda data: b"XXXX" + data[4:]),
    "version": raw(lambda data: data[:4] + b"\x09" + data[5:]),
    "kind 0": raw(lambda data: data[:5] + b"\x00" + data[6:]),
    "kind 255": raw(lambda data: data[:5] + b"\xff" + data[6:]),
    "kind hello": changed(kind=Kind.HELLO),
    "kind train": changed(kind=Kind.TRAIN),
    "kind joined": changed(kind=Kind.JOINED),
    "kind scores": changed(kind=Kind.SCORES),
    "need for ever": changed(kind=Kind.NEED, body=b""),
    "refused": changed(kind=Kind.REFUSED, body=b"\x1b[2Jno\x00\xff" * 400),
    "another run": changed(run=bytes(16)),
    "another study": changed(terms=bytes(16)),
    "another client": changed(client=2),
    "client beyond all": changed(client=400),
    "last round": changed(round=0),
    "next round": changed(round=99),
    "n of nothing": changed(n=0),
    "n five times": changed(n=5000),
    "n of a billion": changed(n=10**9),
    "n beyond reason": raw(lambda data: data[: HEAD_BYTES - 64] + struct.pack("<Q", 2**63) + data[HEAD_BYTES - 56 :]),
    "capacity of zero": changed(capacity=(0.0,) * 6),
    "capacity infinite": changed(capacity=(float("inf"),) * 6),
    "first of seven": raw(lambda data: data[:6] + b"\x07" + data[7:]),
    "length too long": raw(lambda data: data[: HEAD_BYTES - 8] + struct.pack("<Q", 2**62) + data[HEAD_BYTES:]),
    "length too short": raw(lambda data: data[: HEAD_BYTES - 8] + struct.pack("<Q", 3) + data[HEAD_BYTES:]),
    "bytes behind": raw(lambda data: data + b"more"),
    "body empty": body(lambda upload: b""),
    "body of zeros": body(lambda upload: bytes(len(upload))),
    "body cut": body(lambda upload: upload[:-5]),
    "body half": body(lambda upload: upload[: len(upload) // 2]),
    "body twice": body(lambda upload: upload + upload),
    "body nested": body(lambda upload: NESTED),
    "body oversize": body(lambda upload: bytes(80_000_000)),
    "body of the server": lambda answer, asked: [
        write_letter(read_letter(answer, 1 << 30)._replace(body=read_letter(asked, 1 << 30).body))
    ],
    "checksum": body(lambda upload: upload[:-1] + bytes([upload[-1] ^ 1])),
    "bit": body(lambda upload: upload[:100] + bytes([upload[100] ^ 16]) + upload[101:]),
    "nan": body(with_values(lambda x: np.full_like(x, np.nan))),
    "infinite": body(with_values(lambda x: np.full_like(x, np.inf))),
    "huge": body(with_values(lambda x: np.full_like(x, 1e30))),
    "pickle": raw(lambda data: b"\x80\x04\x95" + bytes(200)),
    "the letter itself": lambda answer, asked: [asked],
    "garbage": raw(lambda data: np.random.default_rng(0).bytes(5000)),
}


@pytest.fixture(scope="module")
def left_out(tmp_path_factory):
    """The simulation in which the liar never counts."""
    folder = tmp_path_factory.mktemp("record")
    Federated(study_with("fedavg", **STUDY, network=NETWORK), folder)
    whole = Simulated(study_with("fedavg", **STUDY), folder / "whole")
    lines = [line.split(",") for line in whole.ledger.splitlines()]
    gone = [",".join(x[:3] + ["0"] * 5 if x[1:3] == [str(LIAR), "up"] else x) for x in lines]
    (folder / "gone").mkdir()
    (folder / "gone" / "ledger.csv").write_text("\n".join(gone) + "\n")
    again = Simulated(study_with("fedavg", **STUDY, fleet={"arrived": str(folder / "gone")}), folder / "again")
    return again


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_makes_one_client_absent(lie, tmp_path, left_out):
    federated = Federated(study_with("fedavg", **STUDY, network=NETWORK), tmp_path)
    result = federated.run(Lying(federated, LIES[lie]))
    assert result.model_sha256 == left_out.result.model_sha256
    assert federated.ledger == left_out.ledger
    audit = federated.folder / "run" / "audit.jsonl"
    assert lie == "nothing" or audit.read_text().count('"client": 1') >= 3


def test_the_truth_counts(tmp_path):
    study = study_with("fedavg", **STUDY, network=NETWORK)
    federated = Federated(study, tmp_path / "federated")
    result = federated.run(Lying(federated, honest))
    alone = Simulated(study, tmp_path / "simulated")
    assert result.model_sha256 == alone.result.model_sha256
    assert federated.ledger == alone.ledger


def test_enough_kinds_of_lies_are_told():
    assert len(LIES) >= 40


def test_a_letter_goes_there_and_back():
    letter = Letter(
        Kind.TRAIN,
        b"r" * 16,
        b"t" * 16,
        3,
        7,
        6,
        True,
        4,
        10,
        9,
        1,
        500,
        60,
        (0.5, 1.0, 2.0, 3.0, 4.0, 5.0),
        b"m" * 16,
        b"x",
    )
    assert read_letter(write_letter(letter), 1) == letter
