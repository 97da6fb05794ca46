"""Resident processes that stand in for `sparing join` and `sparing serve`, to try the carrier alone.

python flower_stubs.py node SOCKET                      answers every letter with the same bytes, backwards
python flower_stubs.py serve SOCKET NODES SIZE...       sends letters of these sizes to every node, checks the answers
"""

import os
import secrets
import socket
import struct
import sys
import time
from pathlib import Path

LETTER, REPLY, NODES, FAILED, DONE = 1, 2, 3, 4, 5
HEAD = struct.Struct("<BQdHQ")
LENGTH = struct.Struct("<Q")


def listening(path: str) -> socket.socket:
    Path(path).unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old = os.umask(0o177)
    server.bind(path)
    os.umask(old)
    server.listen(8)
    return server


def read_exactly(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        piece = connection.recv(min(count - len(found), 1 << 20))
        if not piece:
            raise ConnectionError("closed")
        found += piece
    return bytes(found)


def echo_node(path: str) -> None:
    server = listening(path)
    while True:
        connection, _ = server.accept()
        with connection:
            try:
                (length,) = LENGTH.unpack(read_exactly(connection, LENGTH.size))
                letter = read_exactly(connection, length)
                connection.sendall(LENGTH.pack(length))
                connection.sendall(letter[::-1])
            except ConnectionError:
                continue


def read_frame(connection: socket.socket) -> tuple[int, int, str, bytes]:
    kind, token, _, key_length, length = HEAD.unpack(read_exactly(connection, HEAD.size))
    key = read_exactly(connection, key_length).decode()
    return kind, token, key, read_exactly(connection, length)


def write_letter(connection: socket.socket, token: int, ttl: float, key: str, body: bytes) -> None:
    connection.sendall(HEAD.pack(LETTER, token, ttl, len(key), len(body)) + key.encode())
    connection.sendall(body)


def wait_for_nodes(connection: socket.socket, count: int) -> list[str]:
    while True:
        kind, _, _, body = read_frame(connection)
        nodes = body.decode().split() if kind == NODES else []
        print(f"nodes: {' '.join(nodes)}", flush=True)
        if len(nodes) >= count:
            return nodes[:count]


def one_round(connection: socket.socket, nodes: list[str], size: int, ttl: float) -> None:
    """A letter of its own to each node, and the answer of each."""
    began, sent = time.monotonic(), {}
    for node in nodes:
        token, body = secrets.randbits(64), secrets.token_bytes(size)
        sent[token] = (node, body)
        write_letter(connection, token, ttl, node, body)
    while sent:
        kind, token, key, body = read_frame(connection)
        if kind == FAILED:
            raise SystemExit(f"failed after {time.monotonic() - began:.1f} s: node {key}: {body.decode()}")
        if kind == REPLY:
            node, letter = sent.pop(token)
            if key != node or body != letter[::-1]:
                raise SystemExit(f"node {key} answered what node {node} was not asked")
            print(f"{size} bytes from {key} after {time.monotonic() - began:.2f} s", flush=True)


def serve(path: str, count: int, sizes: list[int]) -> None:
    connection, _ = listening(path).accept()
    nodes = wait_for_nodes(connection, count)
    for size in sizes:
        one_round(connection, nodes, size, ttl=120.0)
    connection.sendall(HEAD.pack(DONE, 0, 0.0, 0, 0))
    print("all letters were answered", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "node":
        echo_node(sys.argv[2])
    else:
        serve(sys.argv[2], int(sys.argv[3]), [int(size) for size in sys.argv[4:]])
