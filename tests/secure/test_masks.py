"""Words, packing and masks against the same in Python's integers; what passes by looks like noise."""

import numpy as np
import pytest
from scipy.stats import chisquare

from secure.parties import make_clients, prepared_sum, random_values, terms_of
from sparing.core.errors import SecureError
from sparing.secure.bit_packing import pack_words, packed_bytes, unpack_words
from sparing.secure.masks import add_mask, word_type
from sparing.secure.primitives import chacha20
from sparing.secure.sum_messages import read_upload

RARE = 1e-9
"""A test that fails by chance so seldom says something when it fails."""


def planes_in_python(values: list[int], bits: int) -> bytes:
    """The layout of `bit_packing`'s docstring, value by value."""
    out, shift = bytearray(), 0
    for width in (64, 32, 16, 8, 4, 2, 1):
        if not bits & width:
            continue
        part = [v >> shift & (2**width - 1) for v in values]
        shift += width
        if width >= 8:
            out += b"".join(v.to_bytes(width // 8, "little") for v in part)
            continue
        per = 8 // width
        rows = -(-len(part) // per)
        part += [0] * (per * rows - len(part))
        out += bytes(sum(part[i * rows + r] << (i * width) for i in range(per)) for r in range(rows))
    return bytes(out)


@pytest.mark.parametrize("bits", range(8, 65))
@pytest.mark.parametrize("size", [1, 7, 8, 129])
def test_packing(bits, size):
    values = np.random.default_rng(bits).integers(0, 2**bits - 1, size, np.uint64, endpoint=True)
    values[0] = 2**bits - 1
    words = values.astype(word_type(bits))
    data = pack_words(words, bits)
    assert data == planes_in_python(values.tolist(), bits)
    assert len(data) == packed_bytes(size, bits) <= -(-size * bits // 8) + 2
    assert unpack_words(data, size, bits).tolist() == values.tolist()


def test_packing_takes_no_other_bytes():
    data = pack_words(np.arange(5, dtype="<u4"), 21)
    for wrong in (data[:-1], data + b"\0", b"", data[:-1] + b"\x80"):
        with pytest.raises(SecureError):
            unpack_words(wrong, 5, 21)


@pytest.mark.parametrize("bits", [8, 16, 21, 53])
@pytest.mark.parametrize("size", [1, 1000, 300_001])
def test_a_mask_is_the_stream_in_words(bits, size):
    key, word = bytes(range(32)), word_type(bits)
    words = np.frombuffer(chacha20(key).update(bytes(size * word.itemsize)), word)
    total = np.ones(size, word)
    add_mask(total, key)
    assert np.array_equal(total, words + word.type(1))
    add_mask(total, key, -1)
    assert (total == 1).all()


def uploads_of(client: int, terms_list, values) -> list[np.ndarray]:
    clients = make_clients(5)
    found = []
    for terms in terms_list:
        total = prepared_sum(clients, terms)
        upload = clients[client].upload(total.introduction(client), values)
        found.append(unpack_words(read_upload(upload, terms, client), terms.size, terms.bits))
    return found


@pytest.mark.parametrize("bits", [8, 15, 21, 53])
def test_masked_uploads_are_uniform(bits):
    terms = terms_of(range(5), size=50_000, bits=bits)
    (masked,) = uploads_of(2, [terms], np.zeros(terms.size, np.uint64))
    for shift in (0, bits - 8):
        counts = np.bincount((masked >> masked.dtype.type(shift)).astype(np.uint64) & np.uint64(255), minlength=256)
        assert chisquare(counts).pvalue > RARE
    pairs = np.bincount((masked[::2] % 16).astype(int) * 16 + (masked[1::2] % 16).astype(int), minlength=256)
    assert chisquare(pairs).pvalue > RARE


@pytest.mark.parametrize("other", [{"t": 2}, {"attempt": 2}, {}])
def test_the_same_values_are_masked_unrelatedly(other):
    """In two rounds, in two attempts, and in one attempt that was prepared twice."""
    one, two = terms_of(range(5), size=50_000, bits=16), terms_of(range(5), size=50_000, bits=16, **other)
    values = random_values(one, 0)[3]
    first, second = uploads_of(3, [one, two], values)
    for related in (first - second, first + second, first ^ second):
        assert chisquare(np.bincount(related & 255, minlength=256)).pvalue > RARE
        assert chisquare(np.bincount(related >> 8, minlength=256)).pvalue > RARE
