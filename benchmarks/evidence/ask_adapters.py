"""Which blend of adapters learns best, at equal ranks and at ranks that differ, and what does it cost in bytes?"""

from typing import Any

from judge import better
from question import Claim, Question, Row, Setting

CODE = "benchmarks/evidence/adapter_tasks.py"
SPEECH, VISION, STYLES = "speakers", "superclasses", "20 digit styles"
EQUAL, UNEQUAL = {"rank": 8}, {"ranks": [32, 16, 8, 4]}
OF_EQUAL = ("average", "freeze-a", "exact", "stack", "padded", "svd", "increments")
OF_UNEQUAL = ("freeze-a", "stack", "padded", "svd", "partitioned", "increments")
KEPT = ("perplexity", "truncation_error")


def adapters(targets: list[str], full: list[str], **options: Any) -> list[Any]:
    return [{"lora": {"targets": targets, **({"full": full} if full else {}), **options}}]


def rows_for(targets: list[str], full: list[str]) -> dict[str, Row]:
    """By name, the same for both tasks, which differ in the layers that are adapted and in those that train whole."""

    def row(*more: Any, **options: Any) -> Row:
        return Row([*adapters(targets, full, **options), *more], "personal", kept=KEPT)

    return {
        REFERENCE: Row(["fedavg"], "personal", kept=KEPT),
        "full fine-tuning, alone": Row(["local"], "personal", kept=KEPT),
        "adapters alone": row("local", **EQUAL),
        **{f"{blend}, rank 8": row(blend=blend, **EQUAL) for blend in OF_EQUAL},
        **{f"{blend}, ranks 4 to 32": row(blend=blend, **UNEQUAL) for blend in OF_UNEQUAL},
        "increments, ranks 4 to 32, keep all": row(blend="increments", keep="all", **UNEQUAL),
        "average, rank 8, int8": row("int8", blend="average", **EQUAL),
    }


ADAM = {"epochs": 1, "batch": 16, "optimiser": "adamw", "clip": 1.0}
REFERENCE = "full fine-tuning"
COLUMNS = ("personal", "difference", "global", "worst", "up", "down", "flat")


def ahead(setting: str, row: str, other: str, said: str, where: str) -> Claim:
    return Claim(f"{said}: {setting}", where, lambda done: better(setting, row, other, done, "personal"))


def claims_in(setting: str) -> tuple[Claim, ...]:
    equal, unequal = "average, rank 8", "svd, ranks 4 to 32"
    return (
        ahead(setting, "svd, rank 8", equal, "means of products (svd) are ahead of means of factors", "FlexLoRA"),
        ahead(setting, "exact, rank 8", equal, "the exact residual is ahead of means of factors", "FedEx-LoRA"),
        ahead(setting, "partitioned, ranks 4 to 32", unequal, "partitions are ahead of whole products", "raFLoRA"),
        ahead(setting, "increments, ranks 4 to 32", unequal, "increments are ahead of products", "ours"),
    )


QUESTION = Question(
    name="adapters",
    asks="Which blend of adapters learns best, at equal ranks and at ranks that differ, and at which price in bytes?",
    settings={
        SPEECH: Setting(
            "a character model of 4 x 128, trained on two thirds of Shakespeare's plays; 40 speakers of the others, "
            "10 a round",
            {
                "task": {"data": f"{CODE}:speakers", "split": None, "model": f"{CODE}:speech_model"},
                "sample": 10,
                "rounds": 60,
                "local": ADAM,
                "evaluate": {"metrics": ["accuracy", "perplexity"]},
            },
            rate=0.002,
            tuning_rounds=30,
            seconds=0.3,
            device="cuda",
        ),
    },
    rows=rows_for(["qkv", "out"], []),
    seeds=range(3),
    reference=REFERENCE,
    columns=("perplexity", *COLUMNS),
    claims=claims_in(SPEECH),
)
VISION_QUESTION = Question(
    name="vision-adapters",
    asks="The same of a vision transformer: which blend of adapters learns best?",
    settings={
        VISION: Setting(
            "a vision transformer of 6 x 192, trained on CIFAR-10; CIFAR-100's superclasses as 20 clients, all in "
            "every round",
            {
                "task": {
                    "data": "cifar100",
                    "split": "superclass",
                    "model": f"{CODE}:vision_model",
                    "augment": ["crop", "flip"],
                },
                "sample": 20,
                "rounds": 40,
                "local": {**ADAM, "batch": 32},
                "plan": {"precision": "bf16"},
            },
            rate=0.002,
            tuning_rounds=15,
            seconds=1.0,
            device="cuda",
        ),
    },
    rows=rows_for(["mix", "out"], ["head"]),
    seeds=range(3),
    reference=REFERENCE,
    columns=COLUMNS,
    claims=claims_in(VISION),
)
DIGITS_QUESTION = Question(
    name="digit-adapters",
    asks="The same of dense layers: which blend of adapters learns best?",
    settings={
        STYLES: Setting(
            "784-200-200-10, trained on MNIST; 20 clients who see it in a style each, 10 a round, 10 steps of 32",
            {
                "task": {"data": "mnist", "split": "styles", "clients": 20, "model": f"{CODE}:digit_model"},
                "sample": 10,
                "rounds": 100,
                "local": {"steps": 10, "batch": 32, "optimiser": "adamw", "clip": 1.0},
            },
            rate=0.002,
            tuning_rounds=50,
            seconds=0.2,
        ),
    },
    rows=rows_for(["dense1", "dense2"], ["head"]),
    seeds=range(5),
    reference=REFERENCE,
    columns=COLUMNS,
    claims=claims_in(STYLES),
)
