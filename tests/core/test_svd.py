"""Decompositions: the exact one is exact, the one that goes on is near it, and says so when it is not."""

from functools import partial

import pytest
import torch

from sparing.accel.fedhm_bodies import HOST
from sparing.core.threads import intra_op
from sparing.parts.size.fedhm.svd import (
    PROBES,
    _svd_residual,
    _warm_started,
    exact_svd,
    exact_svds,
    matrix_energy,
    renewed_svd,
)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def probes(m, seed=9):
    return torch.rand(len(m), m.shape[2], PROBES, generator=torch.Generator().manual_seed(seed)) - 0.5


def excess(m, found):
    """How much larger the error is than the best of this rank, at most over the matrices."""
    best = torch.linalg.svdvals(m.double())[:, found.s.shape[1] :].square().sum(1).sqrt()
    u, s, v = (x.double() for x in found)
    error = (m.double() - u * s[:, None] @ v.mT).flatten(1).norm(dim=1)
    return float((error / best).max()) - 1


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (12, 12), (5, 1), (1, 5)])
def test_exact_is_the_truncated_svd(shape):
    m, r = gaussian(3, *shape).double(), min(4, *shape)
    u, s, v = exact_svd(m, r)
    assert torch.allclose(s, torch.linalg.svdvals(m)[:, :r], atol=1e-12)
    for x in (u, v):
        assert torch.allclose(x.mT @ x, torch.eye(r).double().expand(3, r, r), atol=1e-7)
    best, values, right = torch.linalg.svd(m, full_matrices=False)
    assert torch.allclose(u * s[:, None] @ v.mT, best[:, :, :r] * values[:, None, :r] @ right[:, :r], atol=1e-10)


def test_matrices_of_lower_rank_and_zero_have_no_nan():
    thin = gaussian(1, 90, 3) @ gaussian(1, 3, 80, seed=1)
    m = torch.cat([thin, torch.zeros(1, 90, 80)])
    for found in (exact_svd(m, 10), _warm_started(m, exact_svd(m, 10).v, probes(m))[0], exact_svd(m.mT, 10)):
        want = m if found.u.shape[1] == 90 else m.mT
        assert torch.allclose(found.u * found.s[:, None] @ found.v.mT, want, atol=1e-5)
    assert bool(_warm_started(m, exact_svd(m, 10).v, probes(m))[1].all()), "rounding must not look like a miss"


@pytest.mark.parametrize("drift_rank", [1, 8, 40])
def test_going_on_after_low_rank_drift_is_within_three_percent(drift_rank):
    m = gaussian(2, 180, 150)
    v = exact_svd(m, 24).v
    for t in range(3):
        push = gaussian(2, 180, drift_rank, seed=2 * t + 1) @ gaussian(2, drift_rank, 150, seed=2 * t + 2)
        m = m + push * (0.3 * matrix_energy(m) / matrix_energy(push)).sqrt()[:, None, None].float()
        found, fallbacks = renewed_svd(m, 24, v, partial(probes, m))
        assert fallbacks == 0
        assert 0 <= excess(m, found) < 0.03
        v = found.v


def test_a_new_direction_orthogonal_to_all_that_was_known_is_found():
    m = gaussian(1, 120, 120)
    u, s, vt = torch.linalg.svd(m[0])
    moved = (m[0] + 2 * s[0] * u[:, -1:] @ vt[-1:])[None]
    found, fallbacks = renewed_svd(moved, 15, vt[:15].T[None], partial(probes, m))
    assert fallbacks == 0
    assert excess(moved, found) < 0.03


@pytest.mark.parametrize("steps", [1, 3])
def test_a_wholly_new_matrix_takes_more_steps_or_the_exact_one(monkeypatch, steps):
    monkeypatch.setattr("sparing.parts.size.fedhm.svd.STEPS", steps)
    kept, new = gaussian(1, 160, 160), gaussian(1, 160, 100, seed=5) @ gaussian(1, 100, 160, seed=6)
    m = torch.cat([kept, new])
    v = exact_svd(m, 20).v
    v[1] = torch.linalg.svd(new[0]).Vh[-20:].T  # of the new matrix these see nothing
    with intra_op(1):
        alone = _warm_started(m, v, probes(m))[0]
    found, fallbacks = renewed_svd(m, 20, v, partial(probes, m))
    assert excess(m, found) < 0.03
    assert fallbacks == (1 if steps == 1 else 0)
    if fallbacks:
        assert excess(m, alone) > 0.03, "the fallback was needed"
        assert torch.equal(found.v[1:], exact_svd(new, 20).v)
        assert torch.equal(found.v[:1], alone.v[:1])


def test_the_residual_is_estimated_well():
    m = gaussian(1, 200, 180)
    u, s, v = exact_svd(m, 60)
    v = v + 0.02 * gaussian(1, 180, 60, seed=2)
    true = float((m.mT @ u - v * s[:, None]).square().sum())
    guesses = [float(_svd_residual(m, u, s, v, probes(m, seed))) for seed in range(10)]
    assert sum(guesses) / 10 == pytest.approx(true, rel=0.1)
    assert all(0.5 * true < guess < 2 * true for guess in guesses)


def test_where_the_rank_is_near_the_size_it_starts_anew():
    m = gaussian(1, 40, 40)
    found, fallbacks = renewed_svd(m, 16, gaussian(1, 40, 16), partial(probes, m))
    assert fallbacks == 0
    assert all(torch.equal(a, b) for a, b in zip(found, exact_svd(m, 16), strict=True))


def test_bits_do_not_depend_on_threads_and_threads_are_left_as_they_were():
    m, before, seen = gaussian(2, 300, 300), torch.get_num_threads(), []
    v = exact_svd(m, 40).v
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            seen.append(renewed_svd(m + 0.1 * gaussian(2, 300, 300, seed=3), 40, v, partial(probes, m))[0])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(192, 96), (64, 300), (300, 260)])
def test_gpu_agrees_with_the_cpu(shape):
    m = gaussian(2, *shape)
    found, fallbacks = renewed_svd(m.cuda(), 20, exact_svd(m, 20).v.cuda(), lambda: probes(m).cuda())
    assert fallbacks == 0
    assert all(x.is_cuda and x.dtype == m.dtype for x in found)
    here = found._replace(u=found.u.cpu(), s=found.s.cpu(), v=found.v.cpu())
    assert -1e-6 < excess(m, here) < 0.03
    if min(shape) <= HOST:
        want = exact_svd(m, 20)
        both = (x.u * x.s[:, None] @ x.v.mT for x in (here, want))
        assert torch.allclose(*both, atol=1e-5), "exact on either"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_several_shapes_at_once(device):
    matrices = [gaussian(2, 40, 30).to(device), gaussian(1, 20, 50).to(device), gaussian(1, HOST + 9, 300).to(device)]
    ranks = [10, 20, 5]
    for m, rank, found in zip(matrices, ranks, exact_svds(matrices, ranks), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, exact_svd(m, rank), strict=True))
    assert exact_svds([], []) == []
