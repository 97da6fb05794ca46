"""A post whose carrier is another process, the relay, on a unix socket: Flower's ServerApp is one (`net.flower`).

Frames, little-endian: kind u8, token u64, ttl f64 in seconds, length of key u16, length of body u64, key, body.

    1 LETTER   to the relay: take the body to the node of this key; an answer is worth waiting for so long
    2 REPLY    from it: what the node of this key answered to the letter of this token
    3 NODES    from it: the keys of the nodes that are connected, one a line
    4 FAILED   from it: the letter of this token came to nothing, and why
    5 DONE     to the relay: the run is over

One letter and one answer are in memory at a time: the next letter is made when the relay has taken the last, and an
answer longer than it can be is thrown away as it comes.
"""

import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from sparing.net.letter import read_sentence
from sparing.net.local_sockets import listen

_HEAD = struct.Struct("<BQdHQ")
_BLOCK = 1 << 20
_MOST_KEY, _MOST_NODES = 256, 64 << 20
_WAIT = 0.2  # seconds between looks at the clock


class Frame(IntEnum):
    LETTER, REPLY, NODES, FAILED, DONE = 1, 2, 3, 4, 5


class _Sent(NamedTuple):
    client: int
    key: str
    most: int


class RelayPost:
    """`keys` has the key of every client; `tell` is told who is connected and what failed."""

    def __init__(self, path: Path, keys: list[str], tell: Callable[[str], None] = lambda line: None):
        self.keys, self.tell, self.path = keys, tell, path
        self.door = listen(path)
        self.door.setblocking(False)
        self.relay: _Relay | None = None
        self.sent: dict[int, _Sent] = {}
        self.present: set[str] = set()

    def exchange(
        self, letters: Iterator[tuple[int, bytes]], seconds: float, most: Callable[[int], int]
    ) -> Generator[tuple[int, bytes], None, None]:
        """Also ends where the relay goes away: its letters may be lost, and are asked again."""
        end = time.monotonic() + seconds
        relay = self.connected(end)
        if relay is None:
            return
        self.sent = dict(list(self.sent.items())[-2 * len(self.keys) :])  # late answers may still come
        open_tokens, more = set[int](), True
        while (open_tokens or more) and time.monotonic() < end:
            if more and not relay.writing:
                following = next(letters, None)
                more = following is not None
                if following is not None:
                    open_tokens.add(self.send(relay, *following, end - time.monotonic(), most))
            if not relay.pump(min(_WAIT, max(0.0, end - time.monotonic())), self.longest):
                self.tell("the relay is gone; waiting for it to come back")
                relay.close()
                self.relay = None
                return
            if self.replaced():
                return
            for kind, token, key, body in relay.received():
                open_tokens.discard(token)
                if (answer := self.taken(kind, token, key, body)) is not None:
                    yield answer

    def send(self, relay: "_Relay", who: int, letter: bytes, ttl: float, most: Callable[[int], int]) -> int:
        token = secrets.randbits(64)
        self.sent[token] = _Sent(who, self.keys[who], most(who))
        relay.write(Frame.LETTER, token, ttl, self.keys[who], letter)
        return token

    def longest(self, kind: int, token: int) -> int:
        """Bytes of a body that are read."""
        if kind == Frame.REPLY:
            return self.sent[token].most if token in self.sent else 0
        return _MOST_NODES

    def taken(self, kind: int, token: int, key: str, body: bytes | None) -> tuple[int, bytes] | None:
        """An answer, if this frame is one: by the node of whom it was asked."""
        if kind == Frame.NODES and body is not None:
            self.present = set(body.decode("ascii", "replace").split())
            missing = [who for who, name in enumerate(self.keys) if name not in self.present]
            self.tell(f"{len(set(self.keys) & self.present)} nodes are connected, {len(missing)} clients are not")
            return None
        sent = self.sent.get(token)
        if sent is None:
            return None
        if kind == Frame.FAILED:
            self.tell(f"client {sent.client}: {read_sentence(body or b'')}")
            return None
        if kind != Frame.REPLY or key != sent.key:
            return None
        return sent.client, b"" if body is None else body

    def connected(self, end: float) -> "_Relay | None":
        """The relay, waited for until then; of two, the one that came last."""
        while not self.replaced() and self.relay is None and time.monotonic() < end:
            time.sleep(min(_WAIT, max(0.01, end - time.monotonic())))
        return self.relay

    def replaced(self) -> bool:
        """Whether a relay has come that was not there before: what the one before it carried may be lost."""
        try:
            peer, _ = self.door.accept()
        except BlockingIOError:
            return False
        if self.relay is not None:
            self.relay.close()
        self.relay, self.sent = _Relay(peer), {}
        self.tell("a relay is connected")
        return True

    def leave(self) -> None:
        """Without a word: the relay waits for whoever comes next."""
        if self.relay is not None:
            self.relay.close()
        self.door.close()
        self.path.unlink(missing_ok=True)

    def close(self, seconds: float = 30.0) -> None:
        """Tell the relay that the run is over."""
        try:
            relay = self.connected(time.monotonic() + seconds)
            if relay is not None:
                relay.write(Frame.DONE, 0, 0.0, "", b"")
                end = time.monotonic() + seconds
                while relay.writing and time.monotonic() < end and relay.pump(_WAIT, self.longest):
                    pass
                relay.close()
        finally:
            self.door.close()
            self.path.unlink(missing_ok=True)


class _Relay:
    """One connection, read and written without waiting for either."""

    def __init__(self, peer: socket.socket):
        self.peer = peer
        peer.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(peer, selectors.EVENT_READ)
        self.out: list[memoryview] = []
        self.head, self.body = bytearray(), bytearray()
        self.frame: tuple[int, int, str, int, bool] | None = None  # kind, token, key, bytes of body left; if kept
        self.done: list[tuple[int, int, str, bytes | None]] = []

    def close(self) -> None:
        self.selector.close()
        self.peer.close()

    @property
    def writing(self) -> bool:
        return bool(self.out)

    def write(self, kind: Frame, token: int, ttl: float, key: str, body: bytes) -> None:
        name = key.encode()
        self.out += [memoryview(_HEAD.pack(kind, token, ttl, len(name), len(body)) + name), memoryview(body)]

    def pump(self, seconds: float, longest: Callable[[int, int], int]) -> bool:
        """Write and read what goes now; false where the connection is gone."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.out else 0)
        self.selector.modify(self.peer, events)
        for _, ready in self.selector.select(seconds):
            try:
                if ready & selectors.EVENT_WRITE:
                    self._send()
                if ready & selectors.EVENT_READ and not self._receive(longest):
                    return False
            except BlockingIOError:
                continue
            except OSError:
                return False
        return True

    def received(self) -> list[tuple[int, int, str, bytes | None]]:
        """Whole frames: kind, token, key, body; no body where it was too long."""
        done, self.done = self.done, []
        return done

    def _send(self) -> None:
        while self.out:
            taken = self.peer.send(self.out[0][:_BLOCK])
            self.out[0] = self.out[0][taken:]
            if not len(self.out[0]):
                self.out.pop(0)

    def _receive(self, longest: Callable[[int, int], int]) -> bool:
        data = self.peer.recv(_BLOCK)
        rest = memoryview(data)
        while len(rest):
            rest = self._into_body(rest) if self.frame else self._into_head(rest, longest)
            if rest is None:
                return False
        return bool(data)

    def _into_head(self, rest: memoryview, longest: Callable[[int, int], int]) -> memoryview | None:
        wanted = _HEAD.size
        if len(self.head) >= wanted:
            wanted += _HEAD.unpack(self.head[: _HEAD.size])[3]
        part = rest[: wanted - len(self.head)]
        self.head += part
        rest = rest[len(part) :]
        if len(self.head) < _HEAD.size:
            return rest
        kind, token, _, name, length = _HEAD.unpack(self.head[: _HEAD.size])
        if name > _MOST_KEY:
            return None
        if len(self.head) < _HEAD.size + name:
            return rest
        key = self.head[_HEAD.size :].decode("ascii", "replace")
        self.head = bytearray()
        self.frame = (kind, token, key, length, length <= longest(kind, token))
        self._close_frame()
        return rest

    def _into_body(self, rest: memoryview) -> memoryview:
        assert self.frame is not None
        kind, token, key, left, kept = self.frame
        part = rest[:left]
        if kept:
            self.body += part
        self.frame = (kind, token, key, left - len(part), kept)
        self._close_frame()
        return rest[len(part) :]

    def _close_frame(self) -> None:
        assert self.frame is not None
        kind, token, key, left, kept = self.frame
        if left:
            return
        self.done.append((kind, token, key, bytes(self.body) if kept else None))
        self.frame, self.body = None, bytearray()
