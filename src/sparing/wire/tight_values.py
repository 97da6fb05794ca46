"""int8 codes in the fewest bytes we know: what tight leaves write as values.

    0 packed    one byte, the narrowest width w that holds them all; then w bits each, two's complement
    1 plain     every code entropy-coded
    2 rows      every code entropy-coded, the number of its row as context, rows being few
    3 told      the codes being a matrix: levels of how large they are in every row and column, then every code
                entropy-coded in its class (`levels.py`)
    4 known     the codes being the kept positions of a matrix that the reader knows by now: every code entropy-coded
                in the class of its position, by how many are kept in its row and column
    5 sparse    which are not zero (`tight_index.py`), then those by another code

Entropy coding takes codes in zigzag order: 0, -1, 1, -2, ... as 0, 1, 2, 3, ...

    >>> b"".join(encode_tight_values(np.array([0, 0, 3], dtype=np.int8), None)).hex()
    '0003c000'
"""

import numpy as np

from sparing.core.operation import operation
from sparing.wire import rans, tight_index
from sparing.wire.index import Reader, pack, packed_size, unpack
from sparing.wire.levels import class_of, class_of_kept, half_octaves, is_matrix, levels_way, read_levels, row_of
from sparing.wire.tight_index import Way

PACKED, PLAIN, ROWS, TOLD, KNOWN, SPARSE = range(6)
SMALL = 1 << 16
"""Up to so many codes, everything is tried; beyond, what promises most."""


@operation
def encode_tight_values(codes: np.ndarray, columns: int | None, kept: np.ndarray | None = None) -> list[bytes]:
    """int8 `[n]` as the code's byte and what follows.

    `columns` is a row's length where the codes are a matrix, or the positions `kept`, bool `[u]`, of one.
    """
    return _tight_values_way(codes, columns, kept)[1]()


def _tight_values_way(codes: np.ndarray, columns: int | None, kept: np.ndarray | None) -> Way:
    symbols, zeros = zigzag(codes), len(codes) - int(np.count_nonzero(codes))
    packed: Way = (2 + packed_size(len(codes), narrowest(codes)), lambda: write_packed(codes))
    tried, small = [rans_way(PLAIN, symbols, None)], len(codes) <= SMALL
    if columns and has_rows(len(codes) if kept is None else len(kept), columns):
        tried.append(rans_way(ROWS, symbols, row_of(len(codes), columns, kept)))
    if kept is not None and columns and is_matrix(len(kept), columns):
        tried.append(rans_way(KNOWN, symbols, class_of_kept(kept, columns)))
    if kept is None and columns and is_matrix(len(codes), columns) and (small or 32 * zeros < 31 * len(codes)):
        tried.append(row_sums_way(symbols, columns))
    if zeros and (small or 2 * zeros > len(codes)):
        tried.append(_sparse_way(codes, columns if kept is None else None))
    return tight_index.shortest_way(packed, tried)


def rans_way(code: int, symbols: np.ndarray, contexts: np.ndarray | None) -> Way:
    plan = rans.plan_rans(symbols, contexts)
    return 1 + plan.size, lambda: [bytes([code]), rans.write_rans(plan, symbols, contexts)]


def has_rows(u: int, columns: int) -> bool:
    """Whether the rows of u positions are few enough to be contexts."""
    return columns < u <= 256 * columns and u % columns == 0


def decode_tight_values(reader: Reader, n: int, columns: int | None, kept: np.ndarray | None = None) -> np.ndarray:
    """int8 `[n]` from the reader."""
    start, u = reader.at, n if kept is None else len(kept)
    code = reader.byte("value code")
    if code == PACKED:
        return read_packed(reader, n)
    if code == PLAIN:
        return unzigzag(rans.decode_rans(reader, n))
    if code == ROWS and columns and has_rows(u, columns):
        return unzigzag(rans.decode_rans(reader, n, row_of(n, columns, kept)))
    if code == TOLD and kept is None and columns and is_matrix(n, columns):
        return unzigzag(rans.decode_rans(reader, n, class_of(*read_levels(reader, n // columns, columns))))
    if code == KNOWN and kept is not None and columns and is_matrix(u, columns):
        return unzigzag(rans.decode_rans(reader, n, class_of_kept(kept, columns)))
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
    return codes


# ------------------------------------------------------------------------------------------------------------ sparse


def _sparse_way(codes: np.ndarray, columns: int | None) -> Way:
    alive, sent = nonzero_codes(codes)
    where, values = tight_index.tight_index_way(alive, columns), _tight_values_way(sent, columns, alive)
    return 1 + where[0] + values[0], lambda: [bytes([SPARSE]), *where[1](), *values[1]()]


def nonzero_codes(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which are not zero, and those."""
    alive = codes != 0
    return alive, codes[alive]


def read_sparse(reader: Reader, n: int, columns: int | None) -> np.ndarray:
    start = reader.at
    alive = tight_index.decode_tight_index(reader, n, columns)
    if reader.left and reader.data[reader.at] == SPARSE:
        reader.refuse("sparse codes in sparse codes", start)
    codes = np.zeros(n, np.int8)
    codes[alive] = decode_tight_values(reader, int(np.count_nonzero(alive)), columns, alive)
    return codes


# ----------------------------------------------------------------------------------------------------------- classes


def row_sums_way(symbols: np.ndarray, columns: int) -> Way:
    levels = tuple(half_octaves(sums) for sums in sums_of(symbols, columns))
    (size, write_levels), (rest, write) = levels_way(*levels), rans_way(TOLD, symbols, class_of(*levels))

    def written() -> list[bytes]:
        code, body = write()
        return [code, write_levels(), body]

    return size + rest, written


@operation
def sums_of(symbols: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Sizes of the codes in every row and in every column, added up."""
    table = symbols.reshape(-1, columns)
    rows, sums = np.empty(len(table), np.int64), np.zeros(columns, np.int64)
    for at in rans._block_slices(len(table), max(1, rans.BLOCK // columns)):
        sizes = (table[at] >> 1) + (table[at] & 1)
        rows[at] = sizes.sum(1, dtype=np.int64)
        sums += sizes.sum(0, dtype=np.int64)
    return rows, sums
