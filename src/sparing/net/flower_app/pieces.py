"""What relay and shim share: a letter as a Flower message's content, and reading from a socket."""

import socket

from flwr.app import ConfigRecord, RecordDict

PIECE = 4 << 20


def letter_content(letter: bytes) -> RecordDict:
    """In pieces, as Flower holds every record in memory several times while it passes a process."""
    starts = range(0, max(1, len(letter)), PIECE)
    return RecordDict({f"{at // PIECE:06d}": ConfigRecord({"bytes": letter[at : at + PIECE]}) for at in starts})


def content_letter(content: RecordDict, most: int) -> bytes:
    """The letter again; a content that is none, or too long, is refused."""
    pieces = [content[name]["bytes"] for name in sorted(content)]
    if not pieces or not all(isinstance(piece, bytes) for piece in pieces):
        raise ValueError("the message holds no letter: is the other end another version of the app?")
    length = sum(map(len, pieces))
    if length > most:
        raise ValueError(f"the letter has {length} bytes, more than most_bytes = {most}")
    return b"".join(pieces)


def read_exactly(connection: socket.socket, count: int) -> bytes:
    found = read_or_end(connection, count)
    if len(found) < count:
        raise ConnectionError("the other end closed the connection within a frame")
    return found


def read_or_end(connection: socket.socket, count: int) -> bytes:
    """As many bytes, or none at all where the connection ended before the first."""
    pieces, missing = [], count
    while missing:
        piece = connection.recv(min(missing, 1 << 20))
        if not piece and missing < count:
            raise ConnectionError("the other end closed the connection within a frame")
        if not piece:
            break
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)
