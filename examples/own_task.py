"""Your own model and data: twelve sensors learn one curve, each having seen only a stretch of it."""

import torch
from torch import nn

import sparing


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))


def sensor(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of the curve, most of them near sensor i."""
    noise = torch.Generator().manual_seed(i)
    x = (i / 6 - 1) + 0.5 * torch.randn(40 + 10 * i, 1, generator=noise)
    return x, torch.sin(3 * x) + 0.05 * torch.randn(x.shape, generator=noise)


def main() -> None:
    grid = torch.linspace(-1, 1, 200)[:, None]
    task = sparing.Task(model, train=[sensor(i) for i in range(12)], test=(grid, torch.sin(3 * grid)), name="curve")
    for method in ("fedavg", "topk+int8+memory"):
        local = {"epochs": 5, "batch": 16, "lr": 0.05}
        result = sparing.run(task, method=method, rounds=40, sample=0.5, local=local, seed=0)
        print(f"{method:18} squared error {result.loss:.4f}   {result.up_bytes / 1000:5.1f} kB up")


if __name__ == "__main__":
    main()
