"""Letters between processes of one machine: to nodes, and through a relay."""

import os
import socket
import stat
import struct
import threading
import time
import tracemalloc
from contextlib import ExitStack, contextmanager

import pytest

from net.federation import Federated, Simulated, same_states, study_with
from sparing.core.errors import ConfigError
from sparing.net.local_sockets import listen, read_frame, serve_letters, write_frame
from sparing.net.relay_post import Frame, RelayPost

HEAD = struct.Struct("<BQdHQ")
TASK = {"data": "digits", "clients": 3, "split": "iid", "model": {"mlp": {"hidden": [8]}}}
STUDY = {"task": TASK, "rounds": 3, "sample": 3, "evaluate": {"every": 3}, "local": {"steps": 2, "lr": 0.1}}


@pytest.fixture
def short(tmp_path_factory):
    """A folder whose sockets have short names."""
    return tmp_path_factory.mktemp("s")


@contextmanager
def listening(path, handle, most=1 << 20):
    stopped = threading.Event()
    thread = threading.Thread(target=serve_letters, args=(listen(path), handle, most, stopped), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def ask(path, letter, most):
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(20)
        peer.connect(str(path))
        write_frame(peer, letter)
        return read_frame(peer, most)


def test_a_letter_is_answered(short):
    with listening(short / "n.sock", lambda data: data[::-1]):
        assert stat.S_IMODE(os.stat(short / "n.sock").st_mode) == 0o600
        assert ask(short / "n.sock", b"abc", 10) == b"cba"
        assert ask(short / "n.sock", bytes(1000), 1000) == bytes(1000)
    assert not (short / "n.sock").exists()


def test_whoever_misbehaves_loses_the_connection_and_nobody_else(short):
    with listening(short / "n.sock", lambda data: data, most=100):
        for bad in (b"", b"\x01", (1 << 62).to_bytes(8, "little"), (50).to_bytes(8, "little") + b"short"):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(str(short / "n.sock"))
                peer.sendall(bad)
                peer.shutdown(socket.SHUT_WR)
                assert peer.recv(10) == b""
        assert ask(short / "n.sock", b"fine", 100) == b"fine"


def test_so_many_connections_are_read_at_a_time(short):
    """Whoever only holds the line keeps others waiting, and costs no more than a few threads."""
    before = threading.active_count()
    with listening(short / "n.sock", lambda data: data), ExitStack() as held:
        for _ in range(30):
            peer = held.enter_context(socket.socket(socket.AF_UNIX))
            peer.connect(str(short / "n.sock"))
            peer.sendall(b"\x05")
        peer.settimeout(0.3)
        with pytest.raises(TimeoutError):
            peer.recv(1)
        assert threading.active_count() - before <= 17
        held.close()
        assert ask(short / "n.sock", b"fine", 100) == b"fine"


def test_a_socket_belongs_to_one_process(short):
    with listening(short / "n.sock", lambda data: data), pytest.raises(ConfigError, match="in use by another process"):
        listen(short / "n.sock")
    (short / "plain").write_text("mine")
    with pytest.raises(ConfigError, match="is there and is no socket"):
        listen(short / "plain")
    with pytest.raises(ConfigError, match="which no socket can be"):
        listen(short / ("x" * 120))
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(short / "dead.sock"))
    left.close()
    listen(short / "dead.sock").close()


class Relay(threading.Thread):
    """As Flower's ServerApp would be: takes letters to nodes and answers back."""

    def __init__(self, path, answer):
        super().__init__(daemon=True)
        self.peer = socket.socket(socket.AF_UNIX)
        self.peer.connect(str(path))
        self.answer, self.done = answer, False
        self.start()

    def run(self):
        try:
            self.say(Frame.NODES, 0, "", b"a\nb\n")
            while head := self.read(HEAD.size):
                kind, token, _, name, length = HEAD.unpack(head)
                key, body = self.read(name).decode(), self.read(length)
                if kind == Frame.DONE:
                    self.done = True
                    return
                self.answer(self, token, key, body)
        except OSError:
            return
        finally:
            self.peer.close()

    def read(self, count):
        data = b""
        while len(data) < count:
            block = self.peer.recv(count - len(data))
            if not block:
                return b""
            data += block
        return data

    def say(self, kind, token, key, body):
        self.peer.sendall(HEAD.pack(kind, token, 0.0, len(key), len(body)) + key.encode() + body)


def honest(federated):
    def answer(relay, token, key, body):
        relay.say(Frame.REPLY, token, key, federated.nodes[int(key.removeprefix("node-"))].handle(body))

    return answer


def test_a_federation_through_a_relay_that_comes_and_goes(short, tmp_path):
    study = study_with("psfed+topk+int8+memory", **STUDY, network={"resend": 1.0})
    alone, federated = Simulated(study, tmp_path / "simulated"), Federated(study, tmp_path / "federated")
    said = []
    post = RelayPost(short / "r.sock", [f"node-{k}" for k in range(3)], said.append)
    plain, count = honest(federated), [0]

    def odd(relay, token, key, body):
        """Foreign answers before the true one; and now and then the relay dies with a letter in its hands."""
        count[0] += 1
        if count[0] in (2, 5, 9):
            relays.append(Relay(short / "r.sock", odd))
            if count[0] == 5:
                relay.peer.close()
            return
        relay.say(Frame.REPLY, token ^ 1, key, b"of another letter")
        relay.say(Frame.REPLY, token, "node-9", b"of another node")
        plain(relay, token, key, body)

    relays = [Relay(short / "r.sock", odd)]
    from sparing.net.asking import Clock

    result = federated.run(post, clock=Clock())
    post.close()
    relays[-1].join(10)
    assert relays[-1].done
    assert result.model_sha256 == alone.result.model_sha256
    assert federated.ledger == alone.ledger
    assert same_states(federated, alone)
    assert any("a relay is connected" in line for line in said)


def test_an_answer_that_is_too_long_is_thrown_away_as_it_comes(short):
    """200 MB where 1 kB are read: the memory that it takes is that of a block."""
    post = RelayPost(short / "r.sock", ["a", "b"])
    block = bytes(1 << 20)

    def flood(relay, token, key, body):
        if key == "a":
            relay.peer.sendall(HEAD.pack(Frame.REPLY, token, 0.0, 1, 200 << 20) + b"a")
            for _ in range(200):
                relay.peer.sendall(block)
        else:
            relay.say(Frame.REPLY, token, key, b"fine")

    Relay(short / "r.sock", flood)
    tracemalloc.start()
    answers = dict(post.exchange(iter([(0, b"x"), (1, b"y")]), 30.0, lambda who: 1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert answers == {0: b"", 1: b"fine"}
    assert peak < 8 << 20
    post.leave()


def test_a_letter_that_failed_is_not_waited_for(short):
    said = []
    post = RelayPost(short / "r.sock", ["a"], said.append)
    Relay(short / "r.sock", lambda relay, token, key, body: relay.say(Frame.FAILED, token, key, b"gone\x1b[2J"))
    began = time.monotonic()
    assert list(post.exchange(iter([(0, b"x")]), 30.0, lambda who: 1000)) == []
    assert time.monotonic() - began < 25
    assert any("client 0: gone" in line and "\x1b" not in line for line in said)
    post.leave()


def test_without_a_relay_an_exchange_ends_in_time(short):
    post = RelayPost(short / "r.sock", ["a"])
    assert list(post.exchange(iter([(0, b"x")]), 0.3, lambda who: 1000)) == []
    post.leave()
