"""What clients are told of a sum: it comes back as it was, and from strange bytes nothing but a SecureError comes."""

import numpy as np
import pytest
import torch

from sparing.core.errors import SecureError
from sparing.core.grid import Grid, Limits
from sparing.secure.sum_terms import make_sum_terms
from sparing.secure_round.sum_notice import notice_bytes, read_notice, sum_notice, write_notice

NAMES = ("conv.weight", "conv.bias", "head")
GRID = Grid(Limits(NAMES, torch.tensor([2.0**16, 2.0**17, 2.0**40], dtype=torch.float64)), 97.0)
TERMS = make_sum_terms(bytes(range(16)), 7, 2, (1, 4, 9, 11, 200), size=1234, bits=53)
NOTICE = sum_notice(TERMS, GRID, 97.0, NAMES)
WRITTEN = write_notice(NOTICE)


def test_a_notice_comes_back_as_it_was():
    notice, rest = read_notice(WRITTEN + b"the parcel")
    assert (notice, rest) == (NOTICE, b"the parcel")
    assert (notice.terms, notice.total) == (TERMS, 97.0)
    grid = notice.grid(NAMES)
    assert grid.scale == GRID.scale == 128
    assert [float(grid.limit(name)) for name in NAMES] == [float(GRID.limit(name)) for name in NAMES]
    assert len(WRITTEN) == notice_bytes(len(TERMS.cohort), len(NAMES))


def test_a_letter_without_a_notice_is_refused():
    with pytest.raises(SecureError, match=r"without a notice .*; set secure on both sides"):
        read_notice(b"SPAR a parcel and no notice")


def test_truncated_notices_and_those_of_other_tensors_are_refused():
    for end in range(len(WRITTEN)):
        with pytest.raises(SecureError):
            read_notice(WRITTEN[:end])
    for other in (WRITTEN[1:], b"", bytes(len(WRITTEN))):
        with pytest.raises(SecureError):
            read_notice(other)
    with pytest.raises(SecureError, match="3 tensors, where this client has 2"):
        NOTICE.grid(NAMES[:2])


def test_hostile_bytes_give_a_notice_or_a_secure_error():
    rng, fine = np.random.default_rng(0), 0
    for _ in range(4000):
        data = bytearray(WRITTEN)
        for _ in range(int(rng.integers(1, 6))):
            data[int(rng.integers(len(data)))] = int(rng.choice([0, 1, 127, 128, 255, rng.integers(256)]))
        if rng.random() < 0.3:
            a, b = sorted(rng.integers(0, len(data), 2).tolist())
            del data[a:b]
        try:
            notice, _ = read_notice(bytes(data))
            grid = notice.grid(NAMES)
        except SecureError:
            continue
        fine += 1
        assert 1 <= notice.total <= 2.0**52
        assert all(2.0**16 <= float(grid.limit(name)) < float("inf") for name in NAMES)
    assert fine, "some bytes say something else that makes sense"


@pytest.mark.parametrize("exponent", [-1, 0, 15, 513])
def test_limits_that_no_model_has_are_refused(exponent):
    """By the small ones a server would learn from a refusal how large one client's update is."""
    with pytest.raises(SecureError, match="limits that no model has"):
        read_notice(write_notice(NOTICE._replace(exponents=(16, exponent, 17))))


@pytest.mark.parametrize("total", [float("nan"), float("inf"), 0.0, -1.0, 2.0**53])
def test_weights_that_cannot_be_are_refused(total):
    with pytest.raises(SecureError, match="weights that add up to"):
        read_notice(write_notice(NOTICE._replace(total=total)))
