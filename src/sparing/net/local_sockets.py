"""Bytes between processes of one machine: a unix socket that only its owner may open.

To a node one letter goes at a time: its length in 8 bytes, little-endian, then the letter; the answer comes likewise.
"""

import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from sparing.core.errors import ConfigError, WireError
from sparing.storage.atomic import owner_only

_LENGTH = 8
_BLOCK = 1 << 20
_MOST_CONNECTIONS = 16  # at once; more wait
_PATIENCE = 600.0  # seconds for a peer that has stopped in the middle of a frame
LONGEST_PATH = 103  # bytes of a socket's path, on every system


def listen(path: Path) -> socket.socket:
    """A socket at this path, for its owner alone; what a dead process left there is taken away."""
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise ConfigError(f"--socket {path} is longer than {LONGEST_PATH} bytes, which no socket can be; shorten it")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"--socket {path} is there and is no socket; choose another path")
    if path.exists() and _is_answered(path):
        raise ConfigError(f"--socket {path} is in use by another process; stop it, or choose another path")
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX)
    try:
        with owner_only():
            made.bind(str(path))
    except OSError as error:
        raise ConfigError(f"cannot listen on --socket {path} ({error.strerror}); choose another path") from None
    made.listen(_MOST_CONNECTIONS)
    return made


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def serve_letters(door: socket.socket, handle: Callable[[bytes], bytes], most: int, stopped: threading.Event) -> None:
    """Answer what comes to a door that `listen` made until `stopped` is set; then nothing is left of it.

    A peer that misbehaves loses its connection, nobody else's.
    """
    path = Path(door.getsockname())
    free = threading.Semaphore(_MOST_CONNECTIONS)
    with door:
        door.settimeout(0.5)
        while not stopped.is_set():
            if not free.acquire(timeout=0.5):
                continue
            try:
                peer, _ = door.accept()
            except TimeoutError:
                free.release()
                continue
            threading.Thread(target=_answer, args=(peer, handle, most, free), daemon=True).start()
    path.unlink(missing_ok=True)


def _answer(peer: socket.socket, handle: Callable[[bytes], bytes], most: int, free: threading.Semaphore) -> None:
    with peer:
        peer.settimeout(_PATIENCE)
        try:
            letter = read_frame(peer, most)
            write_frame(peer, handle(letter))
        except (OSError, WireError):
            pass  # it asks again, and is answered from the store
        finally:
            free.release()


def read_frame(peer: socket.socket, most: int) -> bytes:
    length = int.from_bytes(_read(peer, _LENGTH), "little")
    if length > most:
        raise WireError(f"a letter of {length} bytes, and {most} are read at most")
    return bytes(_read(peer, length))


def _read(peer: socket.socket, length: int) -> bytearray:
    """Memory grows with what has come, not with what was promised."""
    data = bytearray()
    while len(data) < length:
        block = peer.recv(min(_BLOCK, length - len(data)))
        if not block:
            raise WireError(f"the connection ended after {len(data)} of {length} bytes")
        data += block
    return data


def write_frame(peer: socket.socket, data: bytes) -> None:
    peer.sendall(len(data).to_bytes(_LENGTH, "little"))
    peer.sendall(data)
