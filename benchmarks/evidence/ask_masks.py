"""Which part of a model should travel, if as many bytes go up in all?"""

from typing import Any

from ask_bytes import PLAN
from judge import better
from question import Claim, Question, Row, Setting

DIGITS, WRITERS = "digits", "writers"
ROUNDS = {DIGITS: 60, WRITERS: 40}
"""Of FedAvg; who sends a part has as many more as take the same bytes up."""
WARM = 20


def share(fraction: float, **options: Any) -> Row:
    """PSFed, for as many rounds as cost what FedAvg's do; a warm-up comes in full rounds of its own."""
    sync = options.get("sync")
    each = fraction + ((1 - fraction) / sync if sync else 0)
    kept = ("coverage", "stale_divergence", "mask_count")
    return Row([{"psfed": {"fraction": fraction, **options}}], stretch=1 / each, kept=kept)


def warmed(fraction: float) -> Row:
    """From everything to the fraction, over some rounds; fewer rounds follow."""
    row = share(fraction, start=1.0, warmup=WARM)
    rounds = WARM + (ROUNDS[DIGITS] - WARM * (1 + fraction) / 2) / fraction
    return row._replace(stretch=rounds / ROUNDS[DIGITS])


ROWS = {
    "FedAvg": Row(["fedavg"]),
    **{f"random {fraction:g}": share(fraction) for fraction in (0.1, 0.3, 0.5, 0.7)},
    "random 0.3, full sync each 10": share(0.3, sync=10),
    "random 0.3, warm-up": warmed(0.3),
    "random 0.3, a mask for each client": share(0.3, per_client=True),
    "fixed 0.3": share(0.3, selector="fixed"),
    "layers 0.3": share(0.3, selector="layers"),
    "magnitude 0.3": share(0.3, selector="magnitude"),
    "gradient 0.3": share(0.3, selector="gradient"),
}

QUESTION = Question(
    name="masks",
    asks="Which part of a model should travel, if as many bytes go up in all?",
    settings={
        DIGITS: Setting(
            "digits, Dirichlet 0.3 over 20 clients, 10 a round, CNN, 2 epochs of batch 16; bytes of 60 FedAvg rounds",
            {
                "task": {"data": "digits", "clients": 20, "split": {"dirichlet": 0.3}, "model": "cnn"},
                "sample": 10,
                "rounds": ROUNDS[DIGITS],
                "local": {"epochs": 2, "batch": 16},
                "plan": PLAN,
            },
            rate=0.1,
            tuning_rounds=30,
            seconds=0.07,
        ),
        WRITERS: Setting(
            "MNIST by writer, 100 clients, 20 a round, LeNet-5, 2 epochs of batch 20; bytes of 40 rounds of FedAvg",
            {
                "task": {"data": "mnist-writers", "split": "writer", "clients": 100, "model": "lenet5"},
                "sample": 20,
                "rounds": ROUNDS[WRITERS],
                "local": {"epochs": 2, "batch": 20},
                "plan": PLAN,
            },
            rate=0.1,
            tuning_rounds=20,
            seconds=0.2,
        ),
    },
    rows=ROWS,
    within={WRITERS: tuple(name for name in ROWS if "warm-up" not in name)},
    seeds=range(10),
    seeds_of={WRITERS: range(5)},
    columns=("global", "difference", "rounds", "up", "down", "stale_divergence"),
    claims=(
        Claim(
            "sharing a random half is ahead of FedAvg at equal bytes, digits",
            "ours",
            lambda done: better(DIGITS, "random 0.5", "FedAvg", done),
        ),
        Claim("the same, MNIST by writer", "ours", lambda done: better(WRITERS, "random 0.5", "FedAvg", done)),
        Claim(
            "choosing by gradient is ahead of choosing at random, digits",
            "ours",
            lambda done: better(DIGITS, "gradient 0.3", "random 0.3", done),
        ),
        Claim(
            "choosing by magnitude is ahead of choosing at random, digits",
            "ours",
            lambda done: better(DIGITS, "magnitude 0.3", "random 0.3", done),
        ),
        Claim(
            "a mask for each client is ahead of one for all, digits",
            "ours",
            lambda done: better(DIGITS, "random 0.3, a mask for each client", "random 0.3", done),
        ),
        Claim(
            "a full sync now and then pays, digits",
            "ours",
            lambda done: better(DIGITS, "random 0.3, full sync each 10", "random 0.3", done),
        ),
    ),
)
