"""Do low-rank clients learn as well as narrow ones of the same size, and as full ones?"""

from typing import Any

from judge import better, level
from question import Claim, Question, Row, Setting

PUBLISHED = "ResNet-18"
STUDY = {
    "task": {"data": "cifar100", "clients": 20, "split": "iid", "model": "resnet18", "augment": ["crop", "flip"]},
    "sample": 10,
    "rounds": 100,
    "local": {"epochs": 5, "batch": 64},
    "plan": {"precision": "bf16"},
}


def low_rank(factor: int, blend: str) -> Row:
    """Full clients and clients of this rank factor in turn."""
    return Row([{"fedhm": {"ratios": [1, 1 / factor], "blend": blend}}], kept=("truncation_error",))


def mixed(recipe: str, options: dict[str, Any]) -> Row:
    return Row([{recipe: options}])


ROWS = {
    "FedAvg": Row(["fedavg"]),
    **{
        f"FedHM {factor}, {blend}": low_rank(factor, blend)
        for factor in (2, 8)
        for blend in ("products", "increments", "partitioned")
    },
    "HeteroFL 0.64": mixed("heterofl", {"ratios": [1, 0.64]}),
    "HeteroFL 0.4": mixed("heterofl", {"ratios": [1, 0.4]}),
    "Split-Mix 0.25": mixed("split-mix", {"ratio": 0.25}),
    "FedHM 4, increments": low_rank(4, "increments"),
    "FedHM 12, increments": low_rank(12, "increments"),
}

QUESTION = Question(
    name="ranks",
    asks="Do low-rank clients learn as well as narrow ones of the same size, and as full ones?",
    settings={
        PUBLISHED: Setting(
            "CIFAR-100, IID over 20 clients, 10 a round, ResNet-18, 5 epochs (published: 10) of batch 64, untuned",
            STUDY,
            rate=0.1,
            tuning_rounds=0,
            seconds=4.0,
            device="cuda",
        )
    },
    rows=ROWS,
    seeds=range(2),
    columns=("global", "difference", "up", "down"),
    claims=(
        Claim("low rank 2 reaches 71.9 %", "FedHM", lambda done: level(PUBLISHED, "FedHM 2, products", 71.9, done)),
        Claim("low rank 8 reaches 71.1 %", "FedHM", lambda done: level(PUBLISHED, "FedHM 8, products", 71.1, done)),
        Claim("width-slimmed 0.64 reaches 67.5 %", "FedHM", lambda done: level(PUBLISHED, "HeteroFL 0.64", 67.5, done)),
        Claim(
            "low rank is ahead of width-slimmed at equal size",
            "FedHM",
            lambda done: better(PUBLISHED, "FedHM 2, products", "HeteroFL 0.64", done),
        ),
        Claim(
            "blending increments is ahead of blending products",
            "ours",
            lambda done: better(PUBLISHED, "FedHM 8, increments", "FedHM 8, products", done),
        ),
    ),
)
