"""What the messages of a round's sum take, by client and kind of bytes. A message that goes again counts once."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from sparing.engines.engine import Sizes
from sparing.net.terms import digest_of
from sparing.secure.sum_messages import BOX_BYTES, MESSAGE_HEAD_BYTES, SIGNED_KEY_BYTES

_Rows = dict[int, Counter[str]]


class SumBill:
    def __init__(self) -> None:
        self.down: _Rows = {}
        self.up: _Rows = {}
        self._sent: set[tuple[int, bytes]] = set()

    def announce(self, who: int, terms: bytes) -> bytes:
        """Count what tells a client of an attempt, and give it; likewise below."""
        return self._send(who, terms, keys=len(terms))

    def introduce(self, who: int, message: bytes, others: int) -> bytes:
        return self._send(who, message, keys=len(message) - others * BOX_BYTES, shares=others * BOX_BYTES)

    def request(self, who: int, message: bytes) -> bytes:
        return self._send(who, message, unmask=len(message))

    def prepared(self, who: int, message: bytes) -> None:
        keys = MESSAGE_HEAD_BYTES + SIGNED_KEY_BYTES
        _add(self.up, who, keys=keys, shares=len(message) - keys)

    def uploaded(self, who: int, message: bytes) -> None:
        _add(self.up, who, header=MESSAGE_HEAD_BYTES, value=len(message) - MESSAGE_HEAD_BYTES)

    def helped(self, who: int, message: bytes) -> None:
        _add(self.up, who, unmask=len(message))

    def _send(self, who: int, message: bytes, **sizes: int) -> bytes:
        this = who, digest_of(message)
        if this not in self._sent:
            self._sent.add(this)
            _add(self.down, who, **sizes)
        return message

    def to_json(self) -> dict[str, Any]:
        return {"down": self.down, "up": self.up}

    @classmethod
    def from_json(cls, held: dict[str, Any]) -> "SumBill":
        bill = cls()
        bill.down, bill.up = (
            {int(who): Counter({kind: int(n) for kind, n in row.items()}) for who, row in held[way].items()}
            for way in ("down", "up")
        )
        return bill


def _add(rows: _Rows, who: int, **sizes: int) -> None:
    rows.setdefault(who, Counter()).update(sizes)


def sizes_of_client(rows: _Rows, who: int, kinds: Iterable[str]) -> Sizes:
    row = rows.get(who, Counter())
    return {kind: torch.tensor([row[kind]]) for kind in kinds}
