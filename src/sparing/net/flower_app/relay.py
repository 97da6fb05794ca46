"""The ServerApp: takes letters from `sparing serve` over a unix socket to nodes, and their replies back.

It imports neither torch nor sparing. A frame, little-endian: kind u8, token u64, ttl f64, length of the key u16, length
of the body u64, then the key (a Flower node id as decimal text) and the body.

One thread reads letters and pushes each as it comes, so that at most one is in memory; a few pull replies, each for one
letter at a time, as a node that dies while it uploads keeps its puller waiting for up to three minutes.
"""

import contextlib
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp
from pieces import content_letter, letter_content, read_exactly, read_or_end

LETTER, REPLY, NODES, FAILED, DONE = 1, 2, 3, 4, 5
HEAD = struct.Struct("<BQdHQ")
PAUSE_S = 0.5
SOONEST_S = 2.0  # no node answers earlier: it looks for letters every three seconds, and starts a process for each
app = ServerApp()


@dataclass
class Letter:
    """A letter that is under way: who shall answer, until when, and when to ask for the answer next."""

    token: int
    node: str
    message_id: str
    sent: float
    until: float
    due: float


@app.main()
def relay_letters(grid: Grid, context: Context) -> None:
    """Serve one `sparing serve` after the other until one says that the run is over."""
    settings = context.run_config
    path, most, pullers = str(settings["socket"]), int(settings["most_bytes"]), int(settings["pullers"])
    done = False
    while not done:
        with connect_server(path, grid) as connection:
            done = Relay(grid, connection, most, bool(settings.get("node-sockets"))).serve(pullers)


def connect_server(path: str, grid: Grid) -> socket.socket:
    """A connection to `sparing serve`, however long it takes; a run that was stopped ends the wait."""
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
            return connection
        except OSError:
            connection.close()
        grid.get_node_ids()  # raises once the run is over
        time.sleep(1.0)


class Relay:
    """One connection to `sparing serve`, and the letters that came over it. Those of an earlier one are forgotten."""

    def __init__(self, grid: Grid, connection: socket.socket, most: int, simulated: bool = False) -> None:
        self.grid, self.connection, self.most, self.simulated = grid, connection, most, simulated
        self.waiting: list[Letter] = []
        self.guard, self.writing, self.closed = threading.Lock(), threading.Lock(), threading.Event()
        self.trouble: Exception | None = None

    def serve(self, pullers: int) -> bool:
        """Until the connection ends; whether it ended because the run is over."""
        for work in [self.watch_nodes] + [self.pull_replies] * pullers:
            threading.Thread(target=self.guarded, args=(work,), daemon=True).start()
        try:
            done = self.read_letters()
        except OSError:
            done = False
        finally:
            self.closed.set()
        if self.trouble is not None:
            raise self.trouble
        return done

    def guarded(self, work: Callable[[], None]) -> None:
        """A thread's work; where Flower gives up, the reading thread is woken and says so."""
        try:
            work()
        except OSError:
            self.hang_up()
        except Exception as error:
            self.trouble = self.trouble or error
            self.hang_up()

    def hang_up(self) -> None:
        self.closed.set()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def read_letters(self) -> bool:
        """Push what comes, frame by frame; whether the last one says that the run is over."""
        while head := self.read_head():
            kind, token, ttl, key_length, length = HEAD.unpack(head)
            if kind == DONE:
                return True
            if kind != LETTER or length > self.most:
                raise ValueError(
                    f"sparing serve sent a frame of kind {kind} and {length} bytes: is it another version?"
                )
            node = read_exactly(self.connection, key_length).decode("ascii")
            self.push_letter(token, ttl, node, read_exactly(self.connection, length))
        return False

    def read_head(self) -> bytes:
        """The next frame's, or none at the end. Python runs signal handlers here, where Flower ends an app by one."""
        while not select.select([self.connection], [], [], PAUSE_S)[0]:
            pass
        return read_or_end(self.connection, HEAD.size)

    def push_letter(self, token: int, ttl: float, node: str, body: bytes) -> None:
        now = time.monotonic()
        try:
            message_id = self.pushed(ttl, self.node_id(node), body)
        except Exception as error:
            self.say_failed(token, node, f"it could not be sent: {type(error).__name__}: {error}")
        else:
            with self.guard:
                self.waiting.append(Letter(token, node, message_id, now, now + ttl, now + SOONEST_S))

    def node_id(self, key: str) -> int:
        """In Flower's simulation nodes have no keys, and any of them reaches any client: keys are 0, 1, 2, ..."""
        if not self.simulated:
            return int(key)
        nodes = sorted(self.grid.get_node_ids())
        if not nodes:
            raise ValueError("the simulation has no nodes yet")
        return nodes[int(key) % len(nodes)]

    def pushed(self, ttl: float, node: int, body: bytes) -> str:
        """The message's id at the SuperLink. The random group makes it one that only the addressed node can know."""
        if not ttl > 0:
            raise ValueError(f"a time to live of {ttl} s is none")
        message = Message(letter_content(body), node, "query", ttl=ttl, group_id=secrets.token_hex(16))
        taken = list(self.grid.push_messages([message]))
        if not taken or not taken[0]:
            raise ValueError(f"the SuperLink knows no node {node} that was ever connected")
        return taken[0]

    def pull_replies(self) -> None:
        while not self.closed.is_set():
            letter = self.take_due()
            if letter is None:
                self.closed.wait(PAUSE_S)
            elif not self.pull_reply(letter):
                with self.guard:
                    self.waiting.append(letter)

    def take_due(self) -> Letter | None:
        """The letter whose answer should be asked for now; the older, the more seldom."""
        now = time.monotonic()
        with self.guard:
            due = min(self.waiting, key=lambda letter: letter.due, default=None)
            if due is None or due.due > now:
                return None
            self.waiting.remove(due)
        due.due = now + min(3.0, max(PAUSE_S, (now - due.sent) / 8))
        return due

    def pull_reply(self, letter: Letter) -> bool:
        """Whether this letter needs no more waiting."""
        try:
            body = self.pulled(letter)
        except Exception as error:  # of one reply; whether the run itself goes on is what watch_nodes finds out
            self.say_failed(letter.token, letter.node, f"{type(error).__name__}: {error}")
            return True
        if body is not None:
            self.write_frame(REPLY, letter.token, letter.node, body)
        return body is not None

    def pulled(self, letter: Letter) -> bytes | None:
        """The reply, if it is there. Letters are asked for one by one, so whose reply it is follows from the letter."""
        for message in self.grid.pull_messages([letter.message_id]):
            if message.has_error():
                raise ConnectionError(message.error.reason or f"Flower's error {message.error.code}")
            if not self.simulated and str(message.metadata.src_node_id) != letter.node:
                raise ValueError(f"the reply claims to be of node {message.metadata.src_node_id}")
            return content_letter(message.content, self.most)
        if time.monotonic() > letter.until:
            raise TimeoutError(f"no answer in {letter.until - letter.sent:.0f} s")
        return None

    def say_failed(self, token: int, node: str, why: str) -> None:
        line = " ".join(why.split())[:1000]
        self.write_frame(FAILED, token, node, line.encode())

    def watch_nodes(self) -> None:
        """Who is connected: at once, and whenever it changes."""
        known = None
        while not self.closed.is_set():
            nodes = sorted(self.grid.get_node_ids())
            if nodes != known:
                self.write_frame(NODES, 0, "", "\n".join(map(str, nodes)).encode())
                known = nodes
            self.closed.wait(2.0)

    def write_frame(self, kind: int, token: int, node: str, body: bytes) -> None:
        key = node.encode("ascii")
        with self.writing:
            self.connection.sendall(HEAD.pack(kind, token, 0.0, len(key), len(body)) + key)
            self.connection.sendall(body)
