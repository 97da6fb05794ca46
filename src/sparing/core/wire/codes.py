"""int8 codes in the fewest bytes we know: what tight leaves write as values.

    0 packed    one byte, the narrowest width w that holds them all; then w bits each, two's complement
    1 plain     every code entropy-coded
    2 told      the codes being a matrix: levels of how large they are in every row and column, then every code
                entropy-coded in its class (`grid.py`)
    3 known     the codes being the kept positions of a matrix that the reader knows by now: every code entropy-coded
                in the class of its position, by how many are kept in its row and column
    4 sparse    which are not zero (`places.py`), then those by code 1 or 3

Entropy coding takes codes in zigzag order: 0, -1, 1, -2, ... as 0, 1, 2, 3, ...

    >>> [piece.hex() for piece in encode(np.array([0, 0, 3], dtype=np.int8), None)]
    ['0003', 'c000']
"""

import numpy as np

from sparing.core.wire import ans, places
from sparing.core.wire.grid import class_of, class_of_kept, half_octaves, is_matrix, read_levels, write_levels
from sparing.core.wire.index import Reader, pack, packed_size, unpack
from sparing.core.wire.places import Way

PACKED, PLAIN, TOLD, KNOWN, SPARSE = range(5)


def encode(codes: np.ndarray, columns: int | None, kept: np.ndarray | None = None) -> list[bytes]:
    """int8 `[n]` as the code's byte and what follows.

    `columns` is a row's length where the codes are a matrix, or the positions `kept`, bool `[u]`, of one.
    """
    return way(codes, columns, kept)[1]()


def way(codes: np.ndarray, columns: int | None, kept: np.ndarray | None) -> Way:
    symbols, zeros = zigzag(codes), len(codes) - int(np.count_nonzero(codes))
    packed: Way = (2 + packed_size(len(codes), narrowest(codes)), lambda: write_packed(codes))
    tried, small = [coded(PLAIN, symbols, None)], len(codes) <= places.SMALL
    if kept is not None and columns and is_matrix(len(kept), columns):
        tried.append(coded(KNOWN, symbols, class_of_kept(kept, columns)))
    if kept is None and columns and is_matrix(len(codes), columns) and (small or 32 * zeros < 31 * len(codes)):
        tried.append(told(symbols, columns))
    if zeros and (small or 2 * zeros > len(codes)):
        tried.append(sparse(codes, columns if kept is None else None))
    return places.shortest(packed, tried)


def coded(code: int, symbols: np.ndarray, contexts: np.ndarray | None, head: bytes = b"") -> Way:
    plan = ans.plan(symbols, contexts)
    return 1 + len(head) + plan.size, lambda: [bytes([code]), head, ans.write(plan, symbols, contexts)]


def decode(reader: Reader, n: int, columns: int | None, kept: np.ndarray | None = None) -> np.ndarray:
    """int8 `[n]` from the reader."""
    start = reader.at
    code = reader.byte("value code")
    if code == PACKED:
        return read_packed(reader, n)
    if code == PLAIN:
        return unzigzag(ans.decode(reader, n))
    if code == KNOWN and kept is not None and columns and is_matrix(len(kept), columns):
        return unzigzag(ans.decode(reader, n, class_of_kept(kept, columns)))
    if code == TOLD and kept is None and columns and is_matrix(n, columns):
        return read_told(reader, n, columns)
    if code != SPARSE:
        reader.refuse(f"value code {code} for {n} codes in {columns or 'no'} columns", start)
    return read_sparse(reader, n, columns if kept is None else None)


def zigzag(codes: np.ndarray) -> np.ndarray:
    """
    >>> zigzag(np.array([0, -1, 1, -128, 127], dtype=np.int8))
    array([  0,   1,   2, 255, 254], dtype=uint8)
    """
    return (codes << 1 ^ codes >> 7).view(np.uint8)


def unzigzag(symbols: np.ndarray) -> np.ndarray:
    half, odd = symbols >> 1, symbols & 1
    half ^= np.negative(odd, out=odd)
    return half.view(np.int8)


# ------------------------------------------------------------------------------------------------------------ packed


def narrowest(codes: np.ndarray) -> int:
    """
    >>> [narrowest(np.array([x], dtype=np.int8)) for x in (0, -1, 1, -2, 127)]
    [1, 1, 2, 2, 8]
    """
    return max(int(codes.max(initial=0)), ~int(codes.min(initial=0))).bit_length() + 1


def write_packed(codes: np.ndarray) -> list[bytes]:
    width = narrowest(codes)
    return [bytes([PACKED, width]), pack(codes.view(np.uint8) & np.uint8((1 << width) - 1), width)]


def read_packed(reader: Reader, n: int) -> np.ndarray:
    start = reader.at
    width = reader.byte("width")
    if not 1 <= width <= 8:
        reader.refuse(f"codes of {width} bits, must be 1 to 8", start)
    codes = unpack(reader.packed(n, width, "codes"), width, n)
    codes <<= 8 - width
    codes = codes.view(np.int8)
    codes >>= 8 - width
    if width != narrowest(codes):
        reader.refuse(f"codes of {width} bits that need {narrowest(codes)}", start)
    return codes


# ------------------------------------------------------------------------------------------------------------ sparse


def sparse(codes: np.ndarray, columns: int | None) -> Way:
    alive = codes != 0
    where, values = places.way(alive, columns), way(codes[alive], columns, alive)
    return 1 + where[0] + values[0], lambda: [bytes([SPARSE]), *where[1](), *values[1]()]


def read_sparse(reader: Reader, n: int, columns: int | None) -> np.ndarray:
    start = reader.at
    alive = places.decode(reader, n, columns)
    if reader.left and reader.data[reader.at] == SPARSE:
        reader.refuse("sparse codes in sparse codes", start)
    some = decode(reader, int(np.count_nonzero(alive)), columns, alive)
    if not some.all():
        reader.refuse("a zero among codes that are not zero", start)
    codes = np.zeros(n, np.int8)
    codes[alive] = some
    return codes


# ----------------------------------------------------------------------------------------------------------- classes


def told(symbols: np.ndarray, columns: int) -> Way:
    rows, sums = (half_octaves(x) for x in sums_of(symbols, columns))
    return coded(TOLD, symbols, class_of(rows, sums), write_levels(rows, sums))


def read_told(reader: Reader, n: int, columns: int) -> np.ndarray:
    start = reader.at
    levels = read_levels(reader, n // columns, columns)
    symbols = ans.decode(reader, n, class_of(*levels))
    for mine, sums in zip(levels, sums_of(symbols, columns), strict=True):
        if (half_octaves(sums) != mine).any():
            reader.refuse("levels that are not those of the codes", start)
    return unzigzag(symbols)


def sums_of(symbols: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Sizes of the codes in every row and in every column, added up."""
    table = symbols.reshape(-1, columns)
    rows, sums = np.empty(len(table), np.int64), np.zeros(columns, np.int64)
    for at in ans.blocks(len(table), max(1, ans.BLOCK // columns)):
        sizes = (table[at] >> 1) + (table[at] & 1)
        rows[at] = sizes.sum(1, dtype=np.int64)
        sums += sizes.sum(0, dtype=np.int64)
    return rows, sums
