"""What is timed: the model, the clients' samples (random, from a seed) and how they train. Needs torch alone."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Shape(NamedTuple):
    name: str
    image: tuple[int, ...]
    clients: int
    samples: int  # of each client
    cohort: int  # clients a round
    batch: int = 10
    epochs: int = 1
    lr: float = 0.1
    dropout: bool = True  # without it, every contestant must reach the same model

    def model(self) -> nn.Module:
        """The same weights in every process."""
        torch.manual_seed(0)
        model = MODELS[self.name]()
        for module in model.modules():
            if isinstance(module, nn.Dropout) and not self.dropout:
                module.p = 0.0
        return model

    def data(self, seed: int) -> tuple[Tensor, Tensor]:
        """Samples `[clients, samples, ...]` and labels `[clients, samples]`."""
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(self.clients, self.samples, *self.image, generator=g)
        return x, torch.randint(10, (self.clients, self.samples), generator=g)


def cnn() -> nn.Module:
    """The network of pfl's CIFAR-10 benchmark: 1,626,442 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(12544, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))


def resnet18() -> nn.Module:
    from sparing.models import build_network

    return build_network("resnet18", (3, 32, 32), 10)


MODELS: dict[str, Callable[[], nn.Module]] = {"cnn": cnn, "mlp": mlp, "resnet18": resnet18}


def shape_of(name: str, device: str) -> Shape:
    small = device == "cpu"
    if name == "cnn":
        return Shape(name, (3, 32, 32), clients=1000, samples=50, cohort=10 if small else 50)
    if name == "mlp":
        return Shape(name, (784,), clients=1000, samples=20, cohort=100)
    return Shape(name, (3, 32, 32), clients=100, samples=20 if small else 50, cohort=2 if small else 10, lr=0.01)
