"""Letters between the server and its nodes: a head of fixed length, then a body. Nothing here needs torch.

    server -> node   HELLO      body: the terms (`net.terms`); answered JOINED
                     TRAIN      body: a download (`core.download`); answered UPLOAD
                     EVALUATE   body: a model, as one parcel; answered SCORES
    node -> server   JOINED     its number of samples stands in the head
                     UPLOAD     body: a parcel
                     SCORES     body: sums and counts
                     NEED       it has lost its state: send everything
                     REFUSED    body: one sentence

Where uploads are summed under masks (`sparing.secure`), a client's public keys stand in JOINED, TRAIN begins with a
notice of the sum and is answered PREPARED, and there are four exchanges more, whose bodies are messages of the sum:

    server -> node   KEYS       body: everybody's public keys; answered JOINED
                     PREPARE    body: the terms of a new attempt; answered PREPARED
                     INTRODUCE  answered UPLOAD
                     UNMASK     answered SHARES
    node -> server   BOUND      in place of PREPARED: it has helped to unmask another sum of this round

The head says all that a node must know of a round, and an answer repeats what it answers. Every number is checked
before the body is looked at, and a letter is never longer than the receiver said it would read.
"""

import math
import struct
from enum import IntEnum
from typing import NamedTuple

from sparing.core.errors import WireError

MAGIC = b"SLTR"
_VERSION = 2
_HEAD = struct.Struct("<4sBBBx16s16s16sIIIIIIIQQ6dQ")
HEAD_BYTES = _HEAD.size
MOST_TERMS = 1 << 20
MOST_SENTENCE = 1000
MOST_SAMPLES = 1 << 32
"""Of one client."""
_MOST_SAMPLES_OF_ALL = 1 << 52
CAPACITIES = ("rank", "width", "up", "down", "speed", "adapter")
"""What a device can declare, in the order of the head; NaN where it does not."""


class Kind(IntEnum):
    HELLO, TRAIN, EVALUATE, KEYS, PREPARE, INTRODUCE, UNMASK = 1, 2, 3, 4, 5, 6, 7
    JOINED, UPLOAD, SCORES, NEED, REFUSED, PREPARED, SHARES, BOUND = 17, 18, 19, 20, 21, 22, 23, 24


class Letter(NamedTuple):
    """What both ends know of a round and one client, and what goes with it."""

    kind: Kind
    run: bytes  # 16 random bytes, new in every run
    terms: bytes  # 16 bytes: digest of the terms
    client: int
    round: int = 0
    settled: int = 0  # the last round of this client that counts; 0: none yet
    first: bool = False  # the server has nothing that this client should still have
    cohort: int = 0
    rounds: int = 0
    clients: int = 0
    held: int = 0  # clients that never train
    samples: int = 0  # of all clients that train
    n: int = 0  # of this client
    capacity: tuple[float, ...] = (math.nan,) * len(CAPACITIES)
    model: bytes = bytes(16)  # digest of what the download stands for, where clients hold versions of the model
    body: bytes = b""

    def answer(self, kind: Kind, body: bytes = b"", **other: int) -> "Letter":
        """What goes back: the same head, another kind and body."""
        return self._replace(kind=kind, body=body, **other)


def write_letter(letter: Letter) -> bytes:
    """
    >>> len(write_letter(Letter(Kind.HELLO, bytes(16), bytes(16), client=3))) == HEAD_BYTES < 300
    True
    """
    head = _HEAD.pack(
        MAGIC, _VERSION, letter.kind, letter.first, letter.run, letter.terms, letter.model, letter.client, letter.round,
        letter.settled, letter.cohort, letter.rounds, letter.clients, letter.held, letter.samples, letter.n,
        *letter.capacity, len(letter.body),
    )  # fmt: skip
    return head + letter.body


def read_letter(data: bytes | memoryview, most: int) -> Letter:
    """The letter in bytes that may come from anyone, its body of at most `most` bytes; WireError for all else."""
    view = memoryview(data).cast("B")
    if len(view) < HEAD_BYTES:
        raise WireError(f"a letter of {len(view)} bytes, where the head alone has {HEAD_BYTES}; send it again")
    magic, version, kind, first, run, terms, model, *numbers = _HEAD.unpack(view[:HEAD_BYTES])
    *counts, samples, n = numbers[:9]
    capacity, length = tuple(numbers[9:-1]), numbers[-1]
    if magic != MAGIC:
        raise WireError(f"not a letter: it begins with {magic.hex()}; this port is for sparing's own letters")
    if version != _VERSION:
        raise WireError(f"a letter of version {version}, this side reads {_VERSION}; install the same sparing on both")
    if length > most or length != len(view) - HEAD_BYTES:
        raise WireError(f"a body of {length} bytes said, {len(view) - HEAD_BYTES} came, {most} allowed; send it again")
    if kind not in Kind._value2member_map_ or first > 1:
        raise WireError(f"a letter of kind {kind}, which nobody knows; install the same sparing on both sides")
    if samples > _MOST_SAMPLES_OF_ALL or n > MOST_SAMPLES:
        raise WireError(f"a letter of {max(samples, n)} samples, which nobody has; send it again")
    if any(x <= 0 or math.isinf(x) for x in capacity):
        raise WireError(f"a letter with capacities {capacity}; they are above 0, or NaN where nothing is declared")
    client, t, settled, cohort, rounds, clients, held = counts
    if client >= clients:
        raise WireError(f"a letter to client {client} of {clients}; clients count from 0")
    return Letter(
        Kind(kind), run, terms, client, t, settled, bool(first), cohort, rounds, clients, held, samples, n, capacity,
        model, bytes(view[HEAD_BYTES:]),
    )  # fmt: skip


def sentence_body(text: str) -> bytes:
    """One line for a person, cut to a length."""
    return " ".join(text.split())[:MOST_SENTENCE].encode("utf-8", "replace")


def read_sentence(body: bytes) -> str:
    """What a stranger may have written, fit to be printed."""
    return printable(body[: 4 * MOST_SENTENCE].decode("utf-8", "replace"))


def printable(text: str) -> str:
    """One line without what would steer a terminal, cut to a length.

    >>> printable("no\\x1b[2J\\nroom")
    'no [2J room'
    """
    return "".join(c if c.isprintable() else " " for c in text[:MOST_SENTENCE])
