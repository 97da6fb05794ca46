"""What does FedAvg's accuracy cost in bytes, once all have learned what they can?"""

from typing import Any

from judge import NOT_RUN, saved, within
from question import Claim, Finding, Job, Question, Row, Setting

THIN = {"links": {"kind": "mixed", "speed": 2000, "spread": 0.3}, "latency": 0.05}
PLAN = {"path": "loop-fast"}
CNN = {"data": "cifar100", "split": "superclass", "model": "fedavg-cnn", "augment": ["crop", "flip"]}
FAST = {"precision": "bf16"}


def both_ways(up: Any, down: Any = None) -> list[Any]:
    """The same down as up, or another; clients build the first model from the seed."""
    first = up if isinstance(up, list) else [up]
    return [*first, {"broadcast": {"by": down or first, "seeded": True}}]


def low_rank(up: float, down: float) -> list[Any]:
    return both_ways({"lowrank": {"energy": up}}, [{"lowrank": {"energy": down}}])


ECSQ = [{"ecsq": {"memory": True}}, {"broadcast": {"seeded": True}}]
STC = [{"stc": {"ratio": 0.01, "down": False}}]
DOWN = [{"lowrank": {"energy": 0.95}}]
ROWS = {
    "FedAvg": Row(["fedavg"]),
    "fp16, both ways": Row(both_ways("fp16")),
    "QSGD 8 bits": Row([{"qsgd": {"levels": 127, "bucket": 512}}]),
    "QSGD 4 bits": Row([{"qsgd": {"levels": 7, "bucket": 512}}]),
    "EDEN 2 bits": Row([{"eden": {"bits": 2}}]),
    "top-k 3 %, 8 bits": Row([{"topk": {"ratio": 0.03, "memory": True}}, "int8"]),
    "STC 1 %, both ways": Row(both_ways(STC)),
    "PowerSGD 4": Row([{"powersgd": {"rank": 4}}]),
    "ecsq, both ways": Row(ECSQ),
    "low rank 0.9, down 0.98": Row(low_rank(0.9, 0.98)),
    "low rank 0.5, down 0.9": Row(low_rank(0.5, 0.9)),
    **{f"budget {size}, down 0.95": Row(both_ways({"budget": size}, DOWN)) for size in ("5kB", "20kB", "80kB")},
}
SMALL = {  # networks of 60,000 weights: budgets in proportion
    "budget 500 B, down 0.95": Row(both_ways({"budget": "500B"}, DOWN)),
    "budget 2 kB, down 0.95": Row(both_ways({"budget": "2kB"}, DOWN)),
}
OF_SMALL = (*(name for name in ROWS if not name.startswith("budget")), *SMALL, "budget 5kB, down 0.95")


def fewer_bytes(setting: str, row: str, up: float, down: float, done: list[Job]) -> Finding:
    """Within half a point of FedAvg, with so many times fewer bytes each way."""
    found = within(setting, row, "FedAvg", done, 0.5)
    if found == NOT_RUN:
        return found
    ways = [saved(setting, row, "FedAvg", done, way) for way in ("up", "down")]
    verdict = found.verdict if ways[0] >= up and ways[1] >= down else "does not hold"
    return Finding(f"{found.measured}, {ways[0]:,.0f} times fewer up, {ways[1]:,.0f} down", verdict)


QUESTION = Question(
    name="bytes",
    asks="What does FedAvg's accuracy cost in bytes, once all have learned what they can?",
    settings={
        "superclasses": Setting(
            "CIFAR-100, its 20 superclasses as clients, all in every round, FedAvg's CNN (2.2M), crop and flip",
            {"task": CNN, "sample": 20, "rounds": 400, "local": {"epochs": 1, "batch": 32}, "plan": FAST},
            rate=0.05,
            tuning_rounds=150,
            seconds=0.2,
            device="cuda",
        ),
        "superclasses, 5 a round": Setting(
            "the same, 5 clients a round",
            {"task": CNN, "sample": 5, "rounds": 600, "local": {"epochs": 1, "batch": 32}, "plan": FAST},
            rate=0.05,
            tuning_rounds=200,
            seconds=0.06,
            device="cuda",
        ),
        "writers": Setting(
            "MNIST by writer, 100 clients, 20 a round, LeNet-5 (62k), 2 epochs of batch 20, mixed links",
            {
                "task": {"data": "mnist-writers", "split": "writer", "clients": 100, "model": "lenet5"},
                "sample": 20,
                "rounds": 200,
                "local": {"epochs": 2, "batch": 20},
                "fleet": THIN,
                "plan": PLAN,
            },
            rate=0.1,
            tuning_rounds=80,
            seconds=0.2,
        ),
        "fashion": Setting(
            "Fashion-MNIST, Dirichlet 0.1 over 20 clients, 10 a round, LeNet-5, one epoch of batch 32, mixed links",
            {
                "task": {"data": "fashion-mnist", "split": {"dirichlet": 0.1}, "clients": 20, "model": "lenet5"},
                "sample": 10,
                "rounds": 200,
                "local": {"epochs": 1, "batch": 32},
                "fleet": THIN,
            },
            rate=0.05,
            tuning_rounds=60,
            seconds=0.05,
            device="cuda",
        ),
        "shakespeare": Setting(
            "Shakespeare by role, 60 clients, 10 a round, LSTM of 64 (49k), one epoch of batch 10, mixed links",
            {
                "task": {
                    "data": "shakespeare",
                    "split": {"role": {"least": 40}},
                    "clients": 60,
                    "model": {"lstm": {"hidden": 64, "layers": 1}},
                },
                "sample": 10,
                "rounds": 300,
                "local": {"epochs": 1, "batch": 10, "clip": 5.0},
                "fleet": THIN,
                "plan": PLAN,
            },
            rate=1.0,
            tuning_rounds=100,
            seconds=0.16,
        ),
    },
    rows={**ROWS, **SMALL},
    within={
        "superclasses": tuple(ROWS),
        "superclasses, 5 a round": tuple(ROWS),
        **dict.fromkeys(("writers", "fashion", "shakespeare"), OF_SMALL),
    },
    seeds=range(5),
    claims=(
        Claim(
            "500 times fewer bytes up and 100 times fewer down within half a point, CIFAR-100 superclasses",
            "our goal",
            lambda done: fewer_bytes("superclasses", "budget 20kB, down 0.95", 500, 100, done),
        ),
        Claim(
            "the same, MNIST by writer, 500 B an upload",
            "our goal",
            lambda done: fewer_bytes("writers", "budget 500 B, down 0.95", 500, 100, done),
        ),
        Claim(
            "low rank 0.9, down 0.98: within half a point of FedAvg, MNIST by writer",
            "ours, before",
            lambda done: within("writers", "low rank 0.9, down 0.98", "FedAvg", done, 0.5),
        ),
        Claim(
            "EDEN with 2 bits costs nothing (half a point), MNIST by writer",
            "ours, before",
            lambda done: within("writers", "EDEN 2 bits", "FedAvg", done, 0.5),
        ),
        Claim(
            "STC 1 % both ways costs nothing (half a point), MNIST by writer",
            "Sattler et al. 2019",
            lambda done: within("writers", "STC 1 %, both ways", "FedAvg", done, 0.5),
        ),
        Claim(
            "ecsq with memory, both ways: within half a point of FedAvg, Shakespeare by role",
            "ours",
            lambda done: within("shakespeare", "ecsq, both ways", "FedAvg", done, 0.5),
        ),
    ),
    columns=("global", "difference", "up", "times up", "down", "times down", "clock", "flat"),
    figure="bytes",
)
