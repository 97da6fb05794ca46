"""`sparing serve`, `join`, `flower`, `data --nodes`: what they say before anything is sent, mistakes, and one run."""

import json
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sparing.cli.app import app
from sparing.net.local_sockets import read_frame, write_frame
from sparing.net.relay_post import Frame
from sparing.secure.long_term import read_key_roster

STUDY = """
task: {data: digits, clients: 3, split: {dirichlet: 0.5}, model: {mlp: {hidden: [8]}}}
method: [psfed, topk, int8, memory, {norm-bound: {bound: 10}}]
local: {steps: 2, lr: 0.1}
rounds: 2
sample: 3
plan: {path: loop}
network: {resend: 5}
"""
LOADER = """
import numpy as np

def load():
    return np.zeros((4, 1, 8, 8), np.float32), np.arange(4)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with what a server and its nodes need; sockets have short names in it."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x, y = rng.random((5, 1, 8, 8), dtype=np.float32), np.array([0, 1, 2, 3, 9])
    np.savez("a.npz", x=x, y=y)
    np.savez("b.npz", x=x[:3], y=y[:3], x_test=x[3:], y_test=y[3:])
    Path("set/train").mkdir(parents=True)
    Path("set/test").mkdir()
    for part, n in (("train", 4), ("test", 1)):
        np.savez(f"set/{part}/0.npz", data=np.array({"x": x[:n], "y": y[:n]}, dtype=object))
    Path("study.yaml").write_text(STUDY)
    Path("roster.csv").write_text("client,key\n0,11\n1,12\n2,12\n")
    Path("mine.py").write_text(LOADER)
    return tmp_path


def said(*words: str) -> str:
    """What a command prints where all is well."""
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def refused(*words: str) -> str:
    """The one sentence that a mistake gets."""
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


# --------------------------------------------------------------------------------------------------- before it is sent


def test_a_server_says_what_would_be_sent(here):
    text = said("serve", "study.yaml", "--roster", "roster.csv", "--test", "a.npz", "--dry-run")
    assert "3 clients on 2 nodes; 3 asked per round" in text
    assert "from a client and round: a head of 156 bytes and at most" in text
    assert text.endswith("nothing was sent")
    assert not list(here.glob("*.sock"))
    assert not (here / "runs").exists()


def test_a_server_says_what_is_sent_under_masks(here):
    text = said(*SERVE, "--test", "a.npz", "secure=true", "method=fedavg", "--dry-run")
    assert "bytes and about" in text
    assert "under masks" in text


def test_a_server_without_samples_is_told_their_shape(here):
    typed = ("--shape", "1x8x8", "--classes", "10", "--dry-run")
    assert "nothing was sent" in said("serve", "study.yaml", "--roster", "roster.csv", *typed)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (["a.npz"], ["this client: 5 training samples, 0 test samples"]),
        (["b.npz"], ["this client: 3 training samples, 2 test samples"]),
        (["0=a.npz", "2=b.npz"], ["client 0: 5 training samples", "client 2: 3 training samples, 2 test"]),
        (["mine.py:load"], ["this client: 4 training samples, 0 test samples"]),
        (["set/train/0.npz"], ["this client: 4 training samples, 1 test samples"]),
    ],
    ids=str,
)
def test_a_node_says_what_would_leave_it(here, data, says):
    text = said("join", *(word for place in data for word in ("--data", place)), "--dry-run")
    assert all(line in text for line in says)
    assert "none of them leaves this machine" in text
    assert text.endswith("nothing was sent")
    assert not (here / "state").exists()


def test_a_node_takes_one_natural_client_of_a_dataset(here):
    """A folder of pictures, say, in which every domain is a client."""
    rng = np.random.default_rng(0)
    for group in ("north", "south"):
        for label in ("cat", "dog"):
            folder = here / "pets" / group / label
            folder.mkdir(parents=True)
            for i in range(2 if group == "north" else 3):
                _write_picture(folder / f"{i}.png", rng)
    place = "folder:pets#south"
    assert "this client: 6 training samples" in said("join", "--data", place, "--dry-run")
    assert "north" in refused("join", "--data", "folder:pets#norht", "--dry-run")


def _write_picture(path: Path, rng: np.random.Generator) -> None:
    image = pytest.importorskip("PIL.Image")
    image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)


# -------------------------------------------------------------------------------------------------------- what is made


def test_the_flower_app_and_its_study(here):
    text = said("flower", "app", "carrier", "--socket", "s.sock")
    assert "flwr run carrier" in text
    assert f'socket = "{here / "s.sock"}"' in (here / "carrier" / "pyproject.toml").read_text()
    assert "nothing was sent" in said(
        "serve", "carrier/study.yaml", "sample=3", "--roster", "roster.csv", "--test", "a.npz", "--dry-run"
    )
    (here / "carrier" / "study.yaml").write_text("mine")
    said("flower", "app", "carrier", "--socket", "s.sock")
    assert (here / "carrier" / "study.yaml").read_text() == "mine"


def test_the_commands_of_a_supernode(here):
    assert "first in the SuperNode's PATH" in said("flower", "node", "shim", "--flower", "flower/bin")
    first = (here / "shim" / "flwr-clientapp").read_text().splitlines()[0]
    assert first == f"#!{here / 'flower/bin/python'}"


def test_samples_of_every_node(here):
    said("data", "digits", "clients=4", "--nodes", "nodes")
    assert sorted(path.name for path in (here / "nodes").iterdir()) == [
        *(f"client-{i}.npz" for i in range(4)),
        "server.npz",
    ]
    whole = sum(len(np.load(here / "nodes" / f"client-{i}.npz")["y"]) for i in range(4))
    assert 1000 < whole < 1797
    assert "training samples" in said("join", "--data", "nodes/client-3.npz", "--dry-run")


# ------------------------------------------------------------------------------------------------------------ mistakes


def test_a_clients_public_keys_are_made_once(here):
    first, again = (CliRunner().invoke(app, ["keys", "2", "--state", "state2"]) for _ in range(2))
    assert first.stdout == again.stdout
    assert "fingerprint of client 2: " in first.stderr
    assert list(read_key_roster(first.stdout)) == [2]
    held = here / "state2" / "client-2.keys.json"
    assert held.stat().st_mode & 0o077 == 0  # nobody else may read the private ones
    private = json.loads(held.read_text())
    assert not any(key in first.stdout for key in private.values())


SERVE = ("serve", "study.yaml", "--roster", "roster.csv")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("serve", "study.yaml", "--test", "a.npz"), "needs a roster; give --roster"),
        (("serve", "study.yaml", "--roster", "none.csv", "--test", "a.npz"), "the roster none.csv cannot be read"),
        (SERVE, "the server holds no samples; give --test"),
        ((*SERVE, "--test", "none.npz"), "there is no file none.npz"),
        ((*SERVE, "--test", "study.yaml"), "study.yaml"),
        ((*SERVE, "--shape", "8by8", "--classes", "10"), "--shape is '8by8'; write it as 3x32x32"),
        (("serve", "study.yaml", "--resume", "runs/x"), "drop the study"),
        (("serve", "--resume", "runs/x", "--roster", "roster.csv"), "drop the study, --roster"),
        (("serve", "--resume", "runs/x", "--dry-run"), "drop it, or --resume"),
        (("serve", "--resume", "runs/x"), "runs/x"),
        ((*SERVE, "--test", "a.npz", "--socket", "s" * 120), "which no socket can be; shorten it"),
        ((*SERVE, "--test", "a.npz", "--socket", "a.npz"), "is no socket; choose another path"),
        ((*SERVE, "--test", "a.npz", "secure=true", "method=topk", "--dry-run"), "use {randk: {shared: true}}"),
        ((*SERVE, "--test", "a.npz", "--keys", "a.npz", "--dry-run"), "--keys is for studies with `secure: true`"),
        ((*SERVE, "fleet.dropout=0.1", "--test", "a.npz", "--dry-run"), "fleet.dropout is for simulations"),
        (("join",), "a node needs samples; give --data"),
        (("join", "--dry-run"), "a node needs samples; give --data"),
        (("join", "--data", "none.npz", "--dry-run"), "there is no file none.npz"),
        (("join", "--data", "study.yaml", "--dry-run"), "study.yaml"),
        (("join", "--data", "a.npz", "--data", "b.npz", "--dry-run"), "does not say which client it is"),
        (("join", "--data", "1=a.npz", "--data", "1=b.npz", "--dry-run"), "names client 1 twice"),
        (("join", "--data", "mine.py:nothing", "--dry-run"), "nothing"),
        (("join", "--data", "digits#7", "--dry-run"), "digits has no client called '7'"),
        (("join", "--data", "a.npz", "--model", "none.py:Net"), "none.py"),
        (("join", "--data", "a.npz", "--socket", "s" * 120), "which no socket can be; shorten it"),
        (("join", "--data", "a.npz", "--state", "study.yaml"), "study.yaml"),
        ((*SERVE, "--test", "a.npz", "--keys", "roster.csv"), "--keys is for studies with `secure: true`"),
        ((*SERVE, "secure=true", "method=fedavg", "--test", "a.npz", "--keys", "none.txt"), "none.txt cannot be read"),
        (
            (*SERVE, "secure=true", "method=fedavg", "--test", "a.npz", "--keys", "roster.csv"),
            "line 1 of the key roster",
        ),
        (("serve", "--resume", "runs/x", "--keys", "roster.csv"), "--keys and --out"),
        (("join", "--data", "a.npz", "--keys", "none.txt"), "none.txt cannot be read"),
        (("flower", "app", "carrier", "--socket", "s" * 120), "choose a shorter folder"),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence(here, words, why):
    assert why in refused(*words)


@pytest.mark.parametrize(
    ("arrays", "why"),
    [
        ({"x": np.zeros((3, 2))}, "has no array 'y'"),
        ({"x": np.zeros((3, 2), np.float32), "y": np.zeros(4, np.int64)}, "4"),
        ({"x": np.zeros((0, 2), np.float32), "y": np.zeros(0, np.int64)}, "no training samples"),
        ({"x": np.zeros((2, 2), np.float32), "y": np.zeros(2, np.int64), "x_test": np.zeros((2, 2))}, "y_test"),
        ({"x": np.array([{}, {}], dtype=object), "y": np.zeros(2, np.int64)}, "bad.npz"),
    ],
    ids=["no y", "lengths", "empty", "half a test set", "objects"],
)
def test_samples_that_cannot_be_trained_on_are_refused_before_joining(here, arrays, why):
    np.savez("bad.npz", **arrays)
    assert why in refused("join", "--data", "bad.npz", "--dry-run")


# ------------------------------------------------------------------------------------------------------- one whole run


class Relay(threading.Thread):
    """In Flower's place: takes letters from the server's socket to nodes' sockets, and answers back."""

    HEAD = struct.Struct("<BQdHQ")

    def __init__(self, server: Path, nodes: dict[str, Path]):
        super().__init__(daemon=True)
        self.server, self.nodes, self.done = server, nodes, False

    def run(self) -> None:
        with _connected(self.server) as peer:
            while not self.done:
                kind, token, _, name, length = self.HEAD.unpack(_read(peer, self.HEAD.size))
                key, body = _read(peer, name).decode(), _read(peer, length)
                self.done = kind == Frame.DONE
                if kind == Frame.LETTER:
                    with _connected(self.nodes[key]) as node:
                        write_frame(node, body)
                        answer = read_frame(node, 1 << 30)
                    head = self.HEAD.pack(Frame.REPLY, token, 0.0, len(key), len(answer))
                    peer.sendall(head + key.encode() + answer)


def _connected(path: Path) -> socket.socket:
    """As soon as somebody listens there."""
    for _ in range(3000):
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(60)
        try:
            peer.connect(str(path))
            return peer
        except OSError:
            peer.close()
            time.sleep(0.01)
    raise AssertionError(f"nobody listens at {path}")


def _read(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        block = peer.recv(count - len(data))
        assert block, "the server went away"
        data += block
    return data


@contextmanager
def joining(who: int):
    """A node in a process of its own."""
    words = ("--data", f"nodes/client-{who}.npz", "--state", f"state{who}", "--socket", f"{who}.sock")
    node = subprocess.Popen([sys.executable, "-m", "sparing", "join", *words], stderr=subprocess.PIPE, text=True)
    try:
        yield node
    finally:
        node.terminate()
        node.communicate(timeout=60)


def test_a_served_study_ends_at_the_model_of_its_simulation(here):
    typed = ("clients=3", "split={dirichlet: 0.5}")
    said("data", "digits", *typed, "--nodes", "nodes")
    (here / "roster.csv").write_text("client,key\n0,10\n1,11\n2,12\n")
    with ExitStack() as nodes:
        started = [nodes.enter_context(joining(who)) for who in range(3)]
        relay = Relay(Path("s.sock"), {f"{10 + who}": Path(f"{who}.sock") for who in range(3)})
        relay.start()
        said(*SERVE, "--test", "nodes/server.npz", "--socket", "s.sock", "--out", "served")
        relay.join(60)
    assert relay.done
    assert [node.returncode for node in started] == [0, 0, 0]
    said("run", "study.yaml", "--out", "simulated")
    assert (here / "served/ledger.csv").read_text() == (here / "simulated/ledger.csv").read_text()
    served, simulated = (json.loads((here / run / "summary.json").read_text()) for run in ("served", "simulated"))
    assert served["model_sha256"] == simulated["model_sha256"]
