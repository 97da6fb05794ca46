"""The Flower app: what is written, and relay and shim with a Flower that is not there."""

import importlib.util
import os
import re
import socket
import stat
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from sparing.core.errors import ConfigError
from sparing.net import flower
from sparing.net.flower import check_socket, write_app, write_node_commands
from sparing.net.letter import Kind, Letter, write_letter

APP = Path(flower.__file__).parent / "flower_app"


class Message:
    """As much of Flower's as is used."""

    def __init__(self, content, node=0, kind="", reply_to=None, ttl=60.0, group_id="", error=""):
        self.content, self.why = content, error
        self.metadata = SimpleNamespace(src_node_id=node, ttl=ttl, group_id=group_id)
        self.error = SimpleNamespace(reason=error, code=2)

    def has_error(self):
        return bool(self.why)


class App:
    def main(self):
        return lambda function: function

    query = main


class Grid:
    """Answers every letter backwards, but those of node 7 with an error, and of node 8 in the name of another."""

    def __init__(self):
        self.sent = {}

    def get_node_ids(self):
        return [5, 7]

    def push_messages(self, messages):
        self.sent[str(len(self.sent))] = messages[0]
        return [str(len(self.sent) - 1)]

    def pull_messages(self, ids):
        asked = self.sent[ids[0]]
        node = asked.metadata.src_node_id  # where it was sent to, in this Message
        body = b"".join(piece["bytes"] for _, piece in sorted(asked.content.items()))
        answer = {"000000": {"bytes": body[::-1]}}
        return [Message(answer, 5 if node == 8 else node, error="it broke" if node == 7 else "")]


@pytest.fixture
def load(monkeypatch):
    """A file of the app, imported with a stand-in for flwr."""
    app = ModuleType("flwr.app")
    app.ConfigRecord, app.RecordDict, app.Message, app.Context = dict, dict, Message, object
    client, server = ModuleType("flwr.clientapp"), ModuleType("flwr.serverapp")
    client.ClientApp, server.ServerApp, server.Grid = App, App, Grid
    for module in (ModuleType("flwr"), app, client, server):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(str(APP))

    def loaded(name):
        spec = importlib.util.spec_from_file_location(name, APP / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    loaded("pieces")
    return loaded


def test_the_app_folder(tmp_path):
    folder = write_app(tmp_path / "app", "/tmp/s.sock", most_bytes=1000)
    project = (folder / "pyproject.toml").read_text()
    assert project.endswith('[tool.flwr.app.config]\nsocket = "/tmp/s.sock"\nmost_bytes = 1000\npullers = 4\n')
    assert "federations" not in project  # it breaks `flwr run`
    assert sorted(p.name for p in folder.iterdir()) == ["pieces.py", "pyproject.toml", "relay.py", "shim.py"]
    write_app(folder, "/tmp/other.sock")
    assert "other.sock" in (folder / "pyproject.toml").read_text()


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(ConfigError, match="another project"):
        write_app(tmp_path, "/tmp/s.sock")


def test_a_socket_that_no_system_binds_is_refused():
    with pytest.raises(ConfigError, match="choose a shorter folder"):
        check_socket("/tmp/" + "x" * 100)


def test_a_node_finds_its_own_command_for_every_task(tmp_path):
    folder = write_node_commands(tmp_path / "bin", "/opt/flower/bin")
    for name in ("flwr-clientapp", "flwr-agentapp"):
        assert (folder / name).read_text().startswith("#!/opt/flower/bin/python\n")
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o755
    assert (folder / "shim.py").exists()


@pytest.mark.parametrize("length", [0, 1, 4 << 20, (4 << 20) + 1, 9_000_000])
def test_letters_in_pieces(load, length):
    pieces = load("pieces")
    letter = os.urandom(length)
    content = pieces.letter_content(letter)
    assert pieces.content_letter(content, length) == letter
    assert max(len(record["bytes"]) for record in content.values()) <= 4 << 20
    if length:
        with pytest.raises(ValueError, match="more than most_bytes"):
            pieces.content_letter(content, length - 1)


def test_what_is_no_letter_is_refused(load):
    pieces = load("pieces")
    for content in ({}, {"000000": {"bytes": 3}}):
        with pytest.raises(ValueError, match="holds no letter"):
            pieces.content_letter(content, 100)


@pytest.fixture
def node_socket(tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("s"))  # a relative path is a short one
    server = socket.socket(socket.AF_UNIX)
    server.bind("n.sock")
    server.listen()
    server.settimeout(20)
    yield server
    server.close()


def test_the_shim_sends_again_where_the_node_breaks_off(load, node_socket):
    shim, pieces = load("shim"), load("pieces")

    def node():
        for answered in (False, True):
            connection, _ = node_socket.accept()
            with connection:
                (length,) = shim.LENGTH.unpack(pieces.read_exactly(connection, 8))
                letter = pieces.read_exactly(connection, length)
                if answered:
                    connection.sendall(shim.LENGTH.pack(length) + letter[::-1])

    thread = threading.Thread(target=node)
    thread.start()
    context = SimpleNamespace(node_config={"socket": "n.sock"})
    reply = shim.answer_letter(Message(pieces.letter_content(b"letter")), context)
    thread.join()
    assert pieces.content_letter(reply.content, 100) == b"rettel"


def test_the_shim_says_that_nobody_listens(load):
    shim = load("shim")
    context = SimpleNamespace(node_config={"socket": "/nowhere.sock", "patience": 0.1})
    with pytest.raises(ConnectionError, match="is `sparing join` running"):
        shim.answer_letter(Message({"000000": {"bytes": b"x"}}), context)


def read_frame(relay, pieces, connection):
    kind, token, _, key, length = relay.HEAD.unpack(pieces.read_exactly(connection, relay.HEAD.size))
    return kind, token, pieces.read_exactly(connection, key).decode(), pieces.read_exactly(connection, length)


def test_the_relay_answers_every_letter_once(load, monkeypatch):
    relay, pieces = load("relay"), load("pieces")
    monkeypatch.setattr(relay, "SOONEST_S", 0.0)
    monkeypatch.setattr(relay, "PAUSE_S", 0.01)
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    ended = []
    thread = threading.Thread(target=lambda: ended.append(relay.Relay(Grid(), theirs, 100).serve(2)))
    thread.start()
    assert read_frame(relay, pieces, ours) == (relay.NODES, 0, "", b"5\n7")
    for token, node, ttl in ((1, b"5", 9.0), (2, b"7", 9.0), (3, b"8", 9.0), (4, b"5", 0.0), (5, b"x", 9.0)):
        ours.sendall(relay.HEAD.pack(relay.LETTER, token, ttl, len(node), 3) + node + b"abc")
    said = {
        token: (kind, node, body) for kind, token, node, body in (read_frame(relay, pieces, ours) for _ in range(5))
    }
    ours.sendall(relay.HEAD.pack(relay.DONE, 0, 0.0, 0, 0))
    thread.join()
    assert ended == [True]
    assert said[1] == (relay.REPLY, "5", b"cba")
    assert {said[token][0] for token in (2, 3, 4, 5)} == {relay.FAILED}
    assert b"it broke" in said[2][2]
    assert b"claims to be of node 5" in said[3][2]
    ours.close()
    theirs.close()


def test_the_relay_survives_a_server_that_goes(load):
    relay = load("relay")
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        assert relay.Relay(Grid(), theirs, 100).serve(1) is False


def test_an_app_for_flowers_simulation_says_where_nodes_listen(tmp_path):
    write_app(tmp_path / "app", tmp_path / "s.sock", node_sockets=str(tmp_path / "node{}.sock"))
    assert f'node-sockets = "{tmp_path}/node{{}}.sock"' in (tmp_path / "app" / "pyproject.toml").read_text()
    with pytest.raises(ConfigError, match=r"without \{\} for the number of the client"):
        write_app(tmp_path / "other", tmp_path / "s.sock", node_sockets="node.sock")


def test_the_shim_knows_where_a_letter_names_its_client():
    letter = write_letter(Letter(Kind.HELLO, bytes(16), bytes(16), client=70_000, clients=70_001))
    at = int(re.search(r"CLIENT_AT = (\d+)", (APP / "shim.py").read_text())[1])
    assert int.from_bytes(letter[at : at + 4], "little") == 70_000
