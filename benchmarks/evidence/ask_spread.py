"""Where clients differ in what they see, or in how much: who gains from weighing by similarity?"""

from judge import better
from question import Claim, Question, Row, Setting

STYLES, DOMAINS, QUANTITY = "20 digit styles", "four domains", "50 clients, n_k ~ 1/k"
ROWS = {
    "FedAvg": Row(["fedavg"], "personal"),
    "local": Row(["local"], "personal"),
    "personal layers": Row(["personal"], "personal"),
    "FedSim": Row(["fedsim"], "personal"),
    "pFedSim": Row(["pfedsim"], "personal"),
    "pFedSim, published form": Row([{"pfedsim": {"mode": "published", "warmup": 0.5}}], "personal"),
}
SGD = {"epochs": 1, "batch": 32}

QUESTION = Question(
    name="spread",
    asks="Where clients differ in what they see, or in how much: who gains from weighing by similarity?",
    settings={
        STYLES: Setting(
            "MNIST, 20 clients with a style each, 5 a round, LeNet-5, one epoch of batch 32",
            {
                "task": {"data": "mnist", "split": "styles", "clients": 20, "model": "lenet5"},
                "sample": 5,
                "rounds": 100,
                "local": SGD,
            },
            rate=0.05,
            tuning_rounds=40,
            seconds=0.05,
            device="cuda",
        ),
        DOMAINS: Setting(
            "Office-Caltech10 at 32x32, four domains, all in every round, ResNet-18, untuned, lr 0.05",
            {
                "task": {"data": "office-caltech10", "split": "domain", "model": "resnet18"},
                "sample": 4,
                "rounds": 60,
                "local": {"epochs": 2, "batch": 32},
                "plan": {"precision": "bf16"},
            },
            rate=0.05,
            tuning_rounds=0,
            seconds=1.0,
            device="cuda",
        ),
        QUANTITY: Setting(
            "MNIST, 50 clients with n_k ~ 1/k, 10 a round, LeNet-5, one epoch of batch 32",
            {
                "task": {"data": "mnist", "split": {"quantity": 1.0}, "clients": 50, "model": "lenet5"},
                "sample": 10,
                "rounds": 100,
                "local": SGD,
            },
            rate=0.05,
            tuning_rounds=40,
            seconds=0.05,
            device="cuda",
        ),
    },
    rows=ROWS,
    seeds=range(5),
    seeds_of={DOMAINS: range(2)},
    columns=("global", "personal", "difference", "worst", "up"),
    claims=tuple(
        Claim(
            f"pFedSim serves clients better than FedAvg: {setting}",
            "pFedSim",
            lambda done, setting=setting: better(setting, "pFedSim, published form", "FedAvg", done, "personal"),
        )
        for setting in (STYLES, DOMAINS, QUANTITY)
    ),
)
