"""Loops over the rows of trees, each entry read once: numbers are float32, or seen as int32 where only bits matter.

A tensor with one row stands for all clients. A mask is int8, zeros and ones; as -mask it has all bits or none.
"""

import numpy as np

from sparing.accel.compiled.compile import compiled

BLOCK = 1 << 12
"""Sums that stay in a core's nearest cache."""


@compiled
def clear_rows(bits: np.ndarray, mask: np.ndarray, out: np.ndarray, first: int, last: int) -> None:
    for k in range(first, last):
        x, m, o = bits[min(k, len(bits) - 1)], mask[min(k, len(mask) - 1)], out[k]
        for i in range(len(o)):
            o[i] = x[i] & -np.int32(m[i])


@compiled
def overlay_rows(own: np.ndarray, new: np.ndarray, mask: np.ndarray, out: np.ndarray, first: int, last: int) -> None:
    for k in range(first, last):
        x, y, o = own[min(k, len(own) - 1)], new[min(k, len(new) - 1)], out[k]
        m = mask[min(k, len(mask) - 1)]
        for i in range(len(o)):
            o[i] = x[i] ^ ((x[i] ^ y[i]) & -np.int32(m[i]))


@compiled
def subtract_rows(
    x: np.ndarray, base: np.ndarray, mask: np.ndarray, out: np.ndarray, bits: np.ndarray, first: int, last: int
) -> None:
    """x - base where the mask is true; `bits` is `out`."""
    for k in range(first, last):
        a, b, m = x[min(k, len(x) - 1)], base[min(k, len(base) - 1)], mask[min(k, len(mask) - 1)]
        for start in range(0, out.shape[1], BLOCK):
            stop = min(start + BLOCK, out.shape[1])
            o, some, others = out[k, start:stop], a[start:stop], b[start:stop]
            for i in range(len(o)):
                o[i] = some[i] - others[i]
            seen, here = bits[k, start:stop], m[start:stop]
            for i in range(len(seen)):
                seen[i] &= -np.int32(here[i])


@compiled
def largest_bits(bits: np.ndarray, out: np.ndarray, first: int, last: int) -> None:
    """Of the largest magnitude of every row, NaN above all."""
    largest, size = np.empty(BLOCK, np.int32), np.int32(0x7FFFFFFF)
    for k in range(first, last):
        largest[:] = 0
        for start in range(0, bits.shape[1], BLOCK):
            row = bits[k, start : min(start + BLOCK, bits.shape[1])]
            for i in range(len(row)):
                largest[i] = max(largest[i], row[i] & size)
        out[k] = largest.max()


@compiled
def multiply_codes(codes: np.ndarray, step: np.ndarray, out: np.ndarray, first: int, last: int) -> None:
    for k in range(first, last):
        row, into, by = codes[k], out[k], step[k]
        for i in range(len(into)):
            into[i] = np.float32(row[i]) * by


@compiled
def add_rows_to_sums(
    x: np.ndarray, bits: np.ndarray, share: np.ndarray, magic: float, sums: np.ndarray, first: int, last: int
) -> int:
    """sums += sum_k round(share_k * x_k), in these blocks of columns; the bits of the largest magnitude, NaN above all.

    `bits` is x. What is added is rounded by adding and subtracting `magic`: see `core.fold`. Four clients at a time.
    """
    largest, size, one = np.zeros(BLOCK, np.int32), np.int32(0x7FFFFFFF), len(x) == 1
    for start in range(first * BLOCK, min(last * BLOCK, len(sums)), BLOCK):
        into = sums[start : start + BLOCK]
        stop = start + len(into)
        k = 0
        while k + 4 <= len(share) and not one:
            x0, x1, x2, x3 = x[k, start:stop], x[k + 1, start:stop], x[k + 2, start:stop], x[k + 3, start:stop]
            w0, w1, w2, w3 = share[k], share[k + 1], share[k + 2], share[k + 3]
            for i in range(len(into)):
                low = ((x0[i] * w0 + magic) - magic) + ((x1[i] * w1 + magic) - magic)
                high = ((x2[i] * w2 + magic) - magic) + ((x3[i] * w3 + magic) - magic)
                into[i] += low + high
            b0, b1 = bits[k, start:stop], bits[k + 1, start:stop]
            b2, b3 = bits[k + 2, start:stop], bits[k + 3, start:stop]
            for i in range(len(b0)):
                most = max(max(b0[i] & size, b1[i] & size), max(b2[i] & size, b3[i] & size))
                largest[i] = max(largest[i], most)
            k += 4
        for j in range(k, len(share)):
            row = min(j, len(x) - 1)
            a, b, weight = x[row, start:stop], bits[row, start:stop], share[j]
            for i in range(len(into)):
                largest[i] = max(largest[i], b[i] & size)
                into[i] += (a[i] * weight + magic) - magic
    return largest.max()


@compiled
def add_votes_of_rows(mask: np.ndarray, share: np.ndarray, sums: np.ndarray) -> None:
    for start in range(0, len(sums), BLOCK):
        into = sums[start : start + BLOCK]
        for k in range(len(share)):
            row, weight = mask[min(k, len(mask) - 1), start : start + len(into)], share[k]
            for i in range(len(into)):
                into[i] += row[i] * weight


@compiled
def add_differences(x: np.ndarray, origin: np.ndarray, k: int, sums: np.ndarray, first: int, last: int) -> None:
    """sums `[2, n]` += x_k - origin and its square, one client after the other, in these blocks of columns."""
    n, one = sums.shape[1], len(x) == 1
    for start in range(first * BLOCK, min(last * BLOCK, n), BLOCK):
        stop = min(start + BLOCK, n)
        plain, square, base = sums[0, start:stop], sums[1, start:stop], origin[start:stop]
        j = 0
        while j + 4 <= k and not one:
            x0, x1, x2, x3 = x[j, start:stop], x[j + 1, start:stop], x[j + 2, start:stop], x[j + 3, start:stop]
            for i in range(len(plain)):
                o = np.float64(base[i])
                d0, d1, d2, d3 = x0[i] - o, x1[i] - o, x2[i] - o, x3[i] - o
                plain[i] = (((plain[i] + d0) + d1) + d2) + d3
                square[i] = (((square[i] + d0 * d0) + d1 * d1) + d2 * d2) + d3 * d3
            j += 4
        while j < k:
            row = x[min(j, len(x) - 1), start:stop]
            for i in range(len(plain)):
                away = row[i] - np.float64(base[i])
                plain[i] += away
                square[i] += away * away
            j += 1


@compiled
def keep_crossings(
    bits: np.ndarray, filters: np.ndarray, channels: np.ndarray, out: np.ndarray, first: int, last: int
) -> None:
    """Of `[K, F, C, kernel]` the entries whose filter and whose channel is chosen."""
    wide = bits.shape[3]
    for k in range(first, last):
        chosen = channels[k]
        for f in range(bits.shape[1]):
            x, o = bits[k, f], out[k, f]
            if not filters[k, f]:
                o[:] = 0
            elif wide == 1:
                row, into = x[:, 0], o[:, 0]
                for c in range(len(into)):
                    into[c] = row[c] & -np.int32(chosen[c])
            else:
                for c in range(len(o)):
                    some, into, all_bits = x[c], o[c], -np.int32(chosen[c])
                    for i in range(len(into)):
                        into[i] = some[i] & all_bits


@compiled
def copy_rows_to(x: np.ndarray, place: np.ndarray, out: np.ndarray) -> None:
    """out[place_k] = x_k."""
    for k in range(len(place)):
        row, o = x[min(k, len(x) - 1)], out[place[k]]
        for i in range(len(o)):
            o[i] = row[i]
