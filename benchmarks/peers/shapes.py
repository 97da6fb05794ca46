"""What is timed: the model, the clients' samples (random, from a seed) and how they train. Needs torch alone."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
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


class LoraLinear(nn.Linear):
    """A frozen dense layer, beside it a product of two thin ones that trains."""

    def __init__(self, inputs: int, outputs: int, rank: int = 8):
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(rank, inputs) / inputs), nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.a), self.b)


class VitBlock(nn.Module):
    """Attention and two dense layers, each beside a shortcut."""

    def __init__(self, width: int, heads: int, linear: type[nn.Linear]):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = linear(width, 3 * width), linear(width, width)
        self.wide, self.narrow = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.mix(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class Vit(nn.Module):
    """6 layers of width 192 over the 64 patches of an image 3x32x32."""

    def __init__(self, linear: type[nn.Linear] = nn.Linear, width: int = 192, depth: int = 6):
        super().__init__()
        self.patch, self.at = nn.Linear(48, width), nn.Parameter(torch.randn(64, width) / 50)
        self.blocks = nn.Sequential(*(VitBlock(width, 3, linear) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.unflatten(2, (8, 4)).unflatten(4, (8, 4)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return self.head(self.norm(self.blocks(self.patch(patches) + self.at)).mean(1))


def vit_lora() -> nn.Module:
    """The base is frozen; what is added to its layers, and the head, train."""
    model = Vit(LoraLinear)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.endswith((".a", ".b")) or name.startswith("head."))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "cnn": cnn,
    "mlp": mlp,
    "resnet18": resnet18,
    "resnet18-50": resnet18,
    "vit": Vit,
    "vit-lora": vit_lora,
}


def shape_of(name: str, device: str) -> Shape:
    small = device == "cpu"
    if name == "cnn":
        return Shape(name, (3, 32, 32), clients=1000, samples=50, cohort=10 if small else 50)
    if name == "mlp":
        return Shape(name, (784,), clients=1000, samples=20, cohort=100)
    if name != "resnet18":
        samples, batch, cohort = (20, 10, 2) if small else (250, 50, 20)
        return Shape(name, (3, 32, 32), clients=40, samples=samples, cohort=cohort, batch=batch, lr=0.01)
    return Shape(name, (3, 32, 32), clients=100, samples=20 if small else 50, cohort=2 if small else 10, lr=0.01)
