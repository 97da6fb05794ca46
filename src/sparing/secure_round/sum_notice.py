"""What a client is told of a round's sum together with its download: the terms, and the grid of the fold.

The grid follows from the server's whole model and from everybody's weight, which a client does not have.
"""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from sparing.core.errors import SecureError
from sparing.core.grid import REACH, Grid, Limits
from sparing.secure.sum_terms import SumTerms, read_sum_terms, write_sum_terms

_HEAD = struct.Struct("<4sIId")
_MAGIC = b"SNTC"
_MOST_WEIGHT = 2.0**52
_EXPONENTS = range(int(math.log2(REACH)), 513)


class SumNotice(NamedTuple):
    terms: SumTerms
    total: float  # what the cohort's weights add up to at most
    exponents: tuple[int, ...]  # of each tensor that is summed: its largest update is 2 to this

    def grid(self, names: Sequence[str]) -> Grid:
        """That of the fold, for the tensors that are summed, in their order."""
        if len(names) != len(self.exponents):
            raise SecureError(
                f"a notice of a sum of {len(self.exponents)} tensors, where this client has {len(names)}; send it again"
            )
        limits = torch.tensor([2.0**exponent for exponent in self.exponents], dtype=torch.float64)
        return Grid(Limits(tuple(names), limits), self.total)


def sum_notice(terms: SumTerms, grid: Grid, total: float, names: Sequence[str]) -> SumNotice:
    return SumNotice(terms, total, tuple(int(grid.limit(name).log2()) for name in names))


def write_notice(notice: SumNotice) -> bytes:
    terms, exponents = write_sum_terms(notice.terms), np.array(notice.exponents, "<i2").tobytes()
    return _HEAD.pack(_MAGIC, len(terms), len(notice.exponents), notice.total) + terms + exponents


def notice_bytes(cohort: int, tensors: int) -> int:
    """
    >>> terms = SumTerms(bytes(16), 1, 1, (3, 4, 5), size=7, bits=53, degree=2, threshold=2, least=3)
    >>> len(write_notice(SumNotice(terms, 50.0, (16,)))) == notice_bytes(3, 1)
    True
    """
    empty = SumTerms(bytes(16), 0, 0, (), size=0, bits=0, degree=0, threshold=0, least=0)
    return _HEAD.size + len(write_sum_terms(empty)) + 4 * cohort + 2 * tensors


def read_notice(body: bytes) -> tuple[SumNotice, bytes]:
    """The notice at the beginning of bytes that may come from anyone, and the rest of them."""
    if len(body) < _HEAD.size or body[:4] != _MAGIC:
        raise SecureError("a letter of a secure round without a notice of its sum; set secure on both sides")
    _, length, tensors, total = _HEAD.unpack_from(body)
    start, end = _HEAD.size + length, _HEAD.size + length + 2 * tensors
    if end > len(body):
        raise SecureError(f"a notice of {end} bytes in a letter of {len(body)}; send it again")
    exponents = tuple(np.frombuffer(body[start:end], "<i2").tolist())
    if not all(exponent in _EXPONENTS for exponent in exponents):
        raise SecureError("a notice with limits that no model has; send it again")
    if not 1 <= total <= _MOST_WEIGHT:
        raise SecureError(f"a notice of weights that add up to {total:g}; send it again")
    return SumNotice(read_sum_terms(body[_HEAD.size : start]), total, exponents), body[end:]
