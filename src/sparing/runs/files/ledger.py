"""The byte ledger: round x client x direction, split into value, index, scale, header and notes.

Runs with secure aggregation have four columns more: keys, shares and unmask, and whether the client counted, which no
bytes tell then: 1 if its update is in the sum of the round, else 0.
"""

from sparing.engines.engine import Outcome
from sparing.secure_round.planned_sum import SECURE_KINDS
from sparing.wire.frame import BYTE_KINDS

ALL_BYTE_KINDS = (*BYTE_KINDS, *SECURE_KINDS)
_KEYS = ("round", "client", "direction")
_COUNTED = "counted"


def ledger_header(secure: bool = False) -> str:
    return ",".join((*_KEYS, *((*ALL_BYTE_KINDS, _COUNTED) if secure else BYTE_KINDS))) + "\n"


def ledger_rows(t: int, outcome: Outcome, header: str = ledger_header()) -> str:
    """The rows of one round, ready to append to a ledger.csv that begins with this header."""
    lines, wanted = [], header.strip().split(",")[len(_KEYS) :]
    for direction, kinds in (("down", outcome.down), ("up", outcome.up)):
        known = kinds | {_COUNTED: outcome.arrived.long()}
        columns = [known[name].tolist() if kinds else [] for name in wanted]
        for i, *cells in zip(outcome.ids.tolist(), *columns, strict=True):
            lines.append(f"{t},{i},{direction}," + ",".join(map(str, cells)) + "\n")
    return "".join(lines)
