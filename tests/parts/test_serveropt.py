import numpy as np
import pytest
import torch

from sparing.core.errors import ConfigError
from sparing.core.method import Blended
from sparing.core.tree import Layout
from sparing.parts.blend.server_optimisers import adaptive_server_step, server_momentum_step
from support import make_ctx

LAYOUT = Layout({"w": (6,), "m": (2,)}, {"w": torch.float32, "m": torch.float32}, frozenset({"m"}))


def test_momentum_is_the_recurrence_and_touches_only_covered_coordinates():
    step = server_momentum_step(LAYOUT, beta=0.9, lr=0.5)
    state = step.init({"w": torch.zeros(1, 6), "m": torch.zeros(1, 2)}, 3)
    rng, v = np.random.default_rng(0), np.zeros(6)
    for _ in range(5):
        x, mask = rng.normal(size=6), rng.random(6) < 0.5
        x *= mask
        blended = Blended(
            {"w": torch.tensor(x)[None], "m": torch.ones(1, 2).double()},
            {"w": torch.tensor(mask)[None], "m": None},
            torch.tensor([0]),
            torch.ones(1),
            {},
        )
        update, state, _ = step.apply(state, blended, make_ctx([0]))
        v = np.where(mask, 0.9 * v + x, v)
        np.testing.assert_allclose(update["w"][0], np.where(mask, 0.5 * v, 0), rtol=1e-15)
        assert update["m"].tolist() == [[1.0, 1.0]], "buffers move by the mean itself"
    assert set(state) == {"w"}


def blended(x, mask=None):
    return Blended(
        {"w": torch.tensor(x)[None], "m": torch.ones(1, 2).double()},
        {"w": None if mask is None else torch.tensor(mask)[None], "m": None},
        torch.tensor([0]),
        torch.ones(1),
        {},
    )


SQUARES = {
    "fedadagrad": lambda v, d: v + d**2,
    "fedadam": lambda v, d: 0.7 * v + 0.3 * d**2,
    "fedyogi": lambda v, d: np.where(v > d**2, v - 0.3 * d**2, v + 0.3 * d**2),
}


@pytest.mark.parametrize("kind", SQUARES)
def test_adaptive_steps_are_the_recurrences_and_touch_only_covered_coordinates(kind):
    lr, beta1, tau = 0.1, 0.6, 0.05
    step = adaptive_server_step(LAYOUT, kind, lr, beta1, 0.7, tau)
    state = step.init({"w": torch.zeros(1, 6), "m": torch.zeros(1, 2)}, 3)
    rng, m, v = np.random.default_rng(0), np.zeros(6), np.full(6, tau**2)
    rose = fell = 0
    for _ in range(8):
        d, mask = rng.normal(size=6) * rng.choice([0.01, 1.0], size=6), rng.random(6) < 0.5
        d *= mask
        update, state, _ = step.apply(state, blended(d, mask), make_ctx([0]))
        m, old = np.where(mask, beta1 * m + (1 - beta1) * d, m), v
        v = np.where(mask, SQUARES[kind](v, d), v)
        rose, fell = rose + int((v > old).sum()), fell + int((v < old).sum())
        np.testing.assert_allclose(update["w"][0], np.where(mask, lr * m / (np.sqrt(v) + tau), 0), rtol=1e-13)
        np.testing.assert_allclose(state["square/w"][0], v, rtol=1e-13)
        np.testing.assert_allclose(state["mean/w"][0], m, rtol=1e-13)
        assert update["m"].tolist() == [[1.0, 1.0]], "buffers move by the mean itself"
    assert rose
    assert fell or kind == "fedadagrad"
    assert set(state) == {"mean/w", "square/w"}


@pytest.mark.parametrize("kind", SQUARES)
def test_with_a_large_tau_and_no_momentum_the_model_moves_by_the_mean(kind):
    """sqrt(v) and tau are then both tau, so the step is lr / (2 tau) times the mean."""
    step = adaptive_server_step(LAYOUT, kind, 2e6, 0.0, 1.0, 1e6)
    d = np.linspace(-1, 1, 6)
    state = step.init({"w": torch.zeros(1, 6), "m": torch.zeros(1, 2)}, 3)
    update, _, _ = step.apply(state, blended(d), make_ctx([0]))
    np.testing.assert_allclose(update["w"][0], d, rtol=1e-9)


def test_bad_options_are_refused():
    with pytest.raises(ConfigError, match=r"fedavgm\.beta is 1.2"):
        server_momentum_step(LAYOUT, beta=1.2)
    with pytest.raises(ConfigError, match=r"fedyogi\.tau is 0; it must be above 0"):
        adaptive_server_step(LAYOUT, "fedyogi", 0.1, 0.9, 0.99, 0)
    with pytest.raises(ConfigError, match=r"fedadam\.beta2 is 1.5"):
        adaptive_server_step(LAYOUT, "fedadam", 0.1, 0.9, 1.5, 0.1)
