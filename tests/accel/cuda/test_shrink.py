import pytest
import torch

from sparing.core.context import context
from sparing.core.method import Arrival, Blended
from sparing.core.tree import Layout
from sparing.parts.blend.stein import SteinSettings, stein_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = {"conv": (4, 3, 3, 3), "bias": (7,), "dense": (300, 20), "few": (2,)}
LAYOUT = Layout(SHAPES, dict.fromkeys(SHAPES, torch.float32))


def played(device: str, n: int, settings: SteinSettings) -> list:
    """Five rounds of n clients that agree in part; in the third, one layer does not move."""
    g, step, ids = torch.Generator().manual_seed(n), stein_step(LAYOUT, settings), torch.arange(n)
    drift = {name: torch.randn(1, *shape, generator=g) for name, shape in SHAPES.items()}
    model = {name: torch.zeros(1, *shape, device=device) for name, shape in SHAPES.items()}
    state, found, free = step.init(model, 9000), [], dict.fromkeys(SHAPES)
    for t in range(1, 6):
        update = {name: x + 2 * torch.randn(n, *x.shape[1:], generator=g) for name, x in drift.items()}
        update["few"] *= t != 3
        weight = torch.randint(1, 99, (n,), generator=g).double() / 2**20
        mean = {name: torch.einsum("k...,k->...", x.double(), weight)[None] for name, x in update.items()}
        ctx = context(0, t, 9, ids, ids, 9000, 9, cohort=n, device=device)
        there = {name: x.to(device) for name, x in update.items()}
        seen = step.watch(state, Arrival(there, free, {}, model, ctx))
        there = {name: x.to(device) for name, x in mean.items()}
        update, state, report = step.apply(state, Blended(there, free, ctx.ids, weight.to(device), seen), ctx)
        found += [update, dict(state), report]
    return found


@pytest.mark.parametrize("n", [2, 50, 300, 5000])
@pytest.mark.parametrize(
    "settings",
    [SteinSettings(warmup=1), SteinSettings(warmup=1, only=0.5), SteinSettings(warmup=2, beta_role="coefficient")],
    ids=["target", "only", "coefficient"],
)
def test_layers_are_shrunk_as_on_the_cpu(n, settings):
    for there, here in zip(played("cuda", n, settings), played("cpu", n, settings), strict=True):
        assert list(there) == list(here)
        for name, x in here.items():
            torch.testing.assert_close(
                torch.as_tensor(there[name]).cpu(), torch.as_tensor(x), rtol=0, atol=0, equal_nan=True
            )
