"""Entropy coding by compiled loops: the bodies of `wire.rans`."""

import numpy as np

from sparing.accel.compiled import rans_loops
from sparing.wire import rans
from sparing.wire.frequencies import FINE
from sparing.wire.index import Reader, varint
from sparing.wire.rans import RansPlan

NONE = np.zeros(0, np.uint8)


def compiled_plan_rans(symbols: np.ndarray, contexts: np.ndarray | None = None) -> RansPlan:
    """`rans.plan_rans`."""
    n, bits = len(symbols), rans.precision(len(symbols))
    if not n:
        return rans.plan_rans.plain(symbols, contexts)
    heads, tables, rows, price = rans_loops.plan_tables(symbols, _or_none(contexts), bits)
    lanes, body = rans.lanes_for(price, n), price >> FINE + 3
    size = len(heads) + (body + rans.state_bytes(body, lanes) if price else 0)
    return RansPlan(heads.tobytes(), tables, rows, bits, lanes, size)


def compiled_in_one_state(chosen: RansPlan, symbols: np.ndarray, contexts: np.ndarray | None) -> list[bytes]:
    """`rans.in_one_state`."""
    data = rans_loops.write_one_state(symbols, _or_none(contexts), chosen.tables, chosen.rows, chosen.bits)
    return [varint(len(data)), data.tobytes()]


def compiled_read_one_state(reader: Reader, chosen: RansPlan, n: int, contexts: np.ndarray | None) -> np.ndarray:
    """`rans.read_one_state`."""
    start = reader.at
    data = np.frombuffer(reader.take(reader.varint("number of bytes"), "bytes of the state"), np.uint8)
    out, whole = rans_loops.read_one_state(data, n, _or_none(contexts), chosen.tables, chosen.rows, chosen.bits)
    if not whole:
        reader.refuse("a state that is not used up by its symbols", start)
    return out


def compiled_in_lanes(chosen: RansPlan, symbols: np.ndarray, contexts: np.ndarray | None) -> list[bytes]:
    """`rans.in_lanes`."""
    tables, rows, bits = chosen.tables, chosen.rows, chosen.bits
    states, words = rans_loops.write_lanes(symbols, _or_none(contexts), tables, rows, bits, chosen.lanes)
    return [states.astype("<u4").tobytes(), words.astype("<u2").tobytes()]


def compiled_read_lanes(reader: Reader, chosen: RansPlan, n: int, contexts: np.ndarray | None) -> np.ndarray:
    """`rans.read_lanes`."""
    start = reader.at
    states = rans.read_states(reader, chosen.lanes)
    words = np.frombuffer(reader.data[reader.at : reader.at + reader.left // 2 * 2], "<u2").astype(np.uint16)
    out, used, whole = rans_loops.read_lanes(
        states, words, n, _or_none(contexts), chosen.tables, chosen.rows, chosen.bits
    )
    if used < 0:
        reader.refuse("the words end before the symbols do")
    if not whole:
        reader.refuse("states that are not used up by their symbols", start)
    reader.take(2 * used, "words")
    return out


def _or_none(contexts: np.ndarray | None) -> np.ndarray:
    return NONE if contexts is None else contexts
