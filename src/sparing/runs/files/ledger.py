"""The byte ledger: round x client x direction, split into value, index, scale, header and notes."""

from sparing.engines.engine import Outcome

BYTE_KINDS = ("value", "index", "scale", "header", "notes")
LEDGER_HEADER = "round,client,direction," + ",".join(BYTE_KINDS) + "\n"


def ledger_rows(t: int, outcome: Outcome) -> str:
    """The rows of one round, ready to append to ledger.csv."""
    lines = []
    for direction, kinds in (("down", outcome.down), ("up", outcome.up)):
        columns = [kinds[kind].tolist() if kinds else [] for kind in BYTE_KINDS]
        for i, *cells in zip(outcome.ids.tolist(), *columns, strict=True):
            lines.append(f"{t},{i},{direction}," + ",".join(map(str, cells)) + "\n")
    return "".join(lines)
