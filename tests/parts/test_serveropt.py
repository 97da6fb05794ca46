import numpy as np
import pytest
import torch

from sparing.core.errors import ConfigError
from sparing.core.protocols import Blended
from sparing.core.tree import Layout
from sparing.parts.serveropt import momentum
from support import make_ctx

LAYOUT = Layout({"w": (6,), "m": (2,)}, {"w": torch.float32, "m": torch.float32}, frozenset({"m"}))


def test_momentum_is_the_recurrence_and_touches_only_covered_coordinates():
    step = momentum(LAYOUT, beta=0.9, lr=0.5)
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


def test_bad_options_are_refused():
    with pytest.raises(ConfigError, match=r"fedavgm\.beta is 1.2"):
        momentum(LAYOUT, beta=1.2)
