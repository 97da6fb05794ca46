"""Networks that are trained first, and what they are adapted to: the code that studies of `ask_adapters` name.

    python benchmarks/evidence/adapter_tasks.py speech vision digits [--device cuda]

trains the networks and writes them to runs/evidence/bases, about a minute each on a GPU, `digits` seconds on a CPU.

speech  a character model on two thirds of Shakespeare's plays; adapted to the speakers of the others
vision  a vision transformer on CIFAR-10; adapted to the superclasses of CIFAR-100
digits  dense layers on MNIST; adapted to 20 clients, to whom it is turned, thin or thick, inverted, or noisy
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import sparing
from sparing.data.dataset import Dataset
from sparing.data.registry import load_dataset
from sparing.models import build_network
from sparing.models.text import Transformer

sys.path.insert(0, str(Path(__file__).parents[1]))
BASES = Path("runs/evidence/bases")
SPEAKERS = 40
EPOCHS = {"speech": 30, "vision": 30, "digits": 5}
"""For which each is trained first."""


def _of_first_plays(dataset: Dataset) -> Tensor:
    """Which pieces of text belong to the plays that the network is trained on first: two of three, by their names."""
    plays = [role.partition("|")[0] for role in dataset.names["role"]]
    order = {play: i for i, play in enumerate(sorted(set(plays)))}
    return torch.tensor([order[play] % 3 != 2 for play in plays])[dataset.groups["role"]]


def speakers(length: int = 80) -> list[tuple[Tensor, Tensor]]:
    """The speakers with most text in the plays that the network has not seen."""
    dataset = load_dataset("shakespeare", length=length)
    role = torch.where(_of_first_plays(dataset), -1, dataset.groups["role"])
    count = torch.bincount(role[role >= 0])
    largest = sorted(count.argsort(descending=True, stable=True)[:SPEAKERS].tolist())
    return [(dataset.x[role == one], dataset.y[role == one]) for one in largest]


def _speech_network() -> nn.Module:
    return Transformer(vocabulary=97, length=80, width=128, layers=4, heads=4, last=False)


def speech_model() -> nn.Module:
    return _with_base(_speech_network(), "speech")


def _with_base(model: nn.Module, name: str) -> nn.Module:
    """What it has learned."""
    model.load_state_dict(_read_base(name))
    return model


def digit_network() -> nn.Module:
    return build_network({"mlp": {"hidden": [200, 200]}}, (1, 28, 28), 10)


def digit_model() -> nn.Module:
    return _with_base(digit_network(), "digits")


def vision_network(classes: int) -> nn.Module:
    from peers.shapes import Vit

    model = Vit()
    model.head = nn.Linear(model.head.in_features, classes)
    return model


def vision_model(classes: int) -> nn.Module:
    """What `vision` has learned, with a head for these classes."""
    model = vision_network(classes)
    learned = _read_base("vision")
    model.load_state_dict({name: x for name, x in learned.items() if not name.startswith("head.")}, strict=False)
    return model


def _read_base(name: str) -> dict[str, Tensor]:
    path = BASES / f"{name}.safetensors"
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: python benchmarks/evidence/adapter_tasks.py {name}")
    return load_file(path)


def train_base(name: str, device: str) -> float:
    """One client with all samples; the accuracy on what it has not seen."""
    adam = {"epochs": 1, "batch": 64, "optimiser": "adamw", "lr": 1e-3, "schedule": "cosine", "clip": 1.0}
    tasks = {"speech": _first_speech, "vision": _first_vision, "digits": _first_digits}
    evaluate = {"every": EPOCHS[name], "who": ["global"]}
    result = sparing.run(tasks[name](), rounds=EPOCHS[name], local=adam, device=device, evaluate=evaluate)
    BASES.mkdir(parents=True, exist_ok=True)
    save_file({name: x.contiguous() for name, x in result.model.items()}, BASES / f"{name}.safetensors")
    return result.accuracy


def _first_speech() -> sparing.Task:
    dataset = load_dataset("shakespeare", length=80)
    first = _of_first_plays(dataset)
    train, test = ((dataset.x[mask], dataset.y[mask]) for mask in (first, ~first))
    return sparing.Task(_speech_network, train=[train], test=test)


def _first_vision() -> dict[str, Any]:
    model = f"{Path(__file__).relative_to(Path.cwd())}:vision_network"
    return {"data": "cifar10", "split": "iid", "clients": 1, "augment": ["crop", "flip"], "model": model}


def _first_digits() -> dict[str, Any]:
    model = f"{Path(__file__).relative_to(Path.cwd())}:digit_network"
    return {"data": "mnist", "split": "iid", "clients": 1, "model": model}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("bases", nargs="+", choices=tuple(EPOCHS))
    options.add_argument("--device", default="cpu")
    args = options.parse_args()
    for name in args.bases:
        print(f"{name}: {100 * train_base(name, args.device):.1f} % on samples it has not seen")


if __name__ == "__main__":
    main()
