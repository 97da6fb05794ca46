"""Which method gives every client the best model of its own, and does sharing beat training alone?"""

from ask_bytes import CNN, FAST
from judge import better, level
from question import Claim, Question, Row, Setting

RESNET = {**CNN, "model": "resnet18"}
ROWS = {
    "local": Row(["local"], "personal"),
    "FedAvg": Row(["fedavg"], "personal"),
    "FedSim": Row(["fedsim"], "personal"),
    "pFedSim": Row(["pfedsim"], "personal"),
    "pFedSim, published form": Row([{"pfedsim": {"mode": "published", "warmup": 0.5}}], "personal"),
    "personal layers": Row(["personal"], "personal"),
    "FedRep": Row([{"fedrep": {"head": 1, "body": 1}}], "personal"),
    "Ditto": Row([{"ditto": {"lam": 0.1}}], "personal"),
    "FedAvg, fine-tuned": Row([{"finetune": {"epochs": 3}}], "after"),
    "PSFed 0.5": Row([{"psfed": {"fraction": 0.5}}], "personal"),
    "psfed+pfedsim+int8": Row([{"psfed": {"fraction": 0.7}}, "pfedsim", "int8"], "personal"),
    "personal+lowrank, both ways": Row(
        ["personal", {"lowrank": {"energy": 0.9}}, {"broadcast": {"by": [{"lowrank": {"energy": 0.98}}]}}], "personal"
    ),
    "fedrep+ecsq+memory": Row([{"fedrep": {"head": 1, "body": 1}}, {"ecsq": {"memory": True}}], "personal"),
}
SMALL = "superclasses"
LARGE = "superclasses, ResNet-18"
OF_LARGE = ("local", "FedAvg", "pFedSim", "FedRep")
LOCAL = {"epochs": 1, "batch": 32}

QUESTION = Question(
    name="personal",
    asks="Which method gives every client the best model of its own, and does sharing beat training alone?",
    settings={
        SMALL: Setting(
            "CIFAR-100, its 20 superclasses as clients, all in every round, FedAvg's CNN (2.2M), crop and flip",
            {"task": CNN, "sample": 20, "rounds": 400, "local": LOCAL, "plan": FAST},
            rate=0.05,
            tuning_rounds=150,
            seconds=0.2,
            device="cuda",
        ),
        LARGE: Setting(
            "the same with ResNet-18 (group norm), untuned, lr 0.05",
            {"task": RESNET, "sample": 20, "rounds": 100, "local": LOCAL, "plan": FAST},
            rate=0.05,
            tuning_rounds=0,
            seconds=2.0,
            device="cuda",
        ),
    },
    rows=ROWS,
    within={SMALL: tuple(ROWS), LARGE: OF_LARGE},
    seeds=range(5),
    seeds_of={LARGE: range(3)},
    reference="local",
    columns=("global", "personal", "difference", "worst", "after", "up", "flat"),
    claims=(
        Claim("FedAvg reaches 42.3 % global", "published", lambda done: level(SMALL, "FedAvg", 42.3, done)),
        Claim("FedSim reaches 45.8 % global", "published", lambda done: level(SMALL, "FedSim", 45.8, done)),
        Claim("FedSim is ahead of FedAvg (global)", "published", lambda done: better(SMALL, "FedSim", "FedAvg", done)),
        Claim(
            "pFedSim reaches 41.2 % global",
            "published",
            lambda done: level(SMALL, "pFedSim, published form", 41.2, done),
        ),
        Claim(
            "pFedSim reaches 58.7 % personal",
            "published",
            lambda done: level(SMALL, "pFedSim, published form", 58.7, done, "personal"),
        ),
        Claim(
            "FedRep is ahead of training alone (personal)",
            "ours, before",
            lambda done: better(SMALL, "FedRep", "local", done, "personal"),
        ),
        Claim(
            "psfed+pfedsim+int8 is ahead of pfedsim alone (personal)",
            "ours, before",
            lambda done: better(SMALL, "psfed+pfedsim+int8", "pFedSim", done, "personal"),
        ),
    ),
)
