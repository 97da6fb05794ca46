"""Does shrinking the averaged update by Stein's rule learn better, or more steadily?"""

from itertools import pairwise

from intervals import at_least, interval, variance_ratio
from judge import NOT_RUN, better, ends
from question import Claim, Finding, Job, Question, Row, Setting

from runs import AT, finals

HALF, ONE, FEW, ALIKE = "half of 10 clients", "one of 10 clients", "5 of 100 clients", "50 of 100 alike clients"
MNIST = {"data": "mnist", "clients": 10, "split": {"dirichlet": 0.1}, "model": "lenet5"}
LOCAL = {"epochs": 5, "batch": 512}
MANY = {"data": "mnist", "clients": 100, "split": {"dirichlet": 0.1}, "model": "lenet5"}
BETAS = (0.5, 0.7, 0.9, 1.0)
TOPK = {"topk": {"ratio": 0.1}}


def shrunk(beta: float, role: str) -> Row:
    return Row([{"sr-fedavg": {"beta": beta, "beta_role": role}}], kept=("c_min", "c_max"))


ROWS = {
    "FedAvg": Row(["fedavg"]),
    **{f"SR-FedAvg, beta {beta:g}": shrunk(beta, "target") for beta in BETAS},
    **{f"SR-FedAvg, beta {beta:g} of the coefficient": shrunk(beta, "coefficient") for beta in BETAS},
    "FedAvg, top-k 0.1": Row([TOPK]),
    "SR-FedAvg, top-k 0.1": Row([{"sr-fedavg": {"beta": 0.9, "topk": 0.1}}], kept=("c_min", "c_max")),
}
MAIN = "SR-FedAvg, beta 0.9"
FEW_ROWS = ("FedAvg", MAIN, "FedAvg, top-k 0.1", "SR-FedAvg, top-k 0.1")


def steadier_over_seeds(done: list[Job]) -> Finding:
    """A smaller variance of the final accuracy over seeds."""
    ours, theirs = (list(ends(HALF, name, done).values()) for name in (MAIN, "FedAvg"))
    if len(ours) < 3 or len(theirs) < 3:
        return NOT_RUN
    ratio, chance = variance_ratio(ours, theirs)
    verdict = "not settled" if chance > 0.05 else "holds" if ratio < 1 else "does not hold"
    return Finding(f"variance {ratio:.2f} times FedAvg's, p = {chance:.2f} (Levene)", verdict)


def steadier_over_rounds(done: list[Job]) -> Finding:
    """A smaller mean change of accuracy from round to round after the warm-up, paired by seed."""
    ours, theirs = ({job["seed"]: mean_change(job) for job in finals(HALF, name, done)} for name in (MAIN, "FedAvg"))
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        return NOT_RUN
    found = interval([theirs[seed] - ours[seed] for seed in both])
    return Finding(f"a mean change {found} points smaller", at_least(found, 0.0))


def mean_change(job: Job, warmup: int = 5) -> float:
    values = [100 * line[AT["global"]] for line in job["curve"] if line[0] > warmup]
    changes = [abs(b - a) for a, b in pairwise(values)]
    return sum(changes) / len(changes)


QUESTION = Question(
    name="shrinkage",
    asks="Does shrinking the averaged update by Stein's rule learn better, or more steadily?",
    settings={
        HALF: Setting(
            "MNIST, the study's research configuration: Dirichlet 0.1, 5 epochs of batch 512, lr 0.01, LeNet-5",
            {"task": MNIST, "sample": 5, "rounds": 50, "local": LOCAL},
            rate=0.01,
            tuning_rounds=0,
            seconds=0.1,
            device="cuda",
            evaluations=50,
        ),
        ONE: Setting(
            "the same, one client a round, as the original writes it",
            {"task": MNIST, "sample": 1, "rounds": 50, "local": LOCAL},
            rate=0.01,
            tuning_rounds=0,
            seconds=0.1,
            device="cuda",
            evaluations=50,
        ),
        FEW: Setting(
            "MNIST, Dirichlet 0.1 over 100 clients, 5 a round, 2 epochs of batch 20: few, and far apart",
            {"task": MANY, "sample": 5, "rounds": 100, "local": {"epochs": 2, "batch": 20}},
            rate=0.05,
            tuning_rounds=50,
            seconds=0.1,
            device="cuda",
        ),
        ALIKE: Setting(
            "MNIST, IID over 100 clients, 50 a round: many, and alike",
            {"task": {**MANY, "split": "iid"}, "sample": 50, "rounds": 50, "local": {"epochs": 2, "batch": 20}},
            rate=0.05,
            tuning_rounds=25,
            seconds=0.4,
            device="cuda",
        ),
    },
    rows=ROWS,
    within={ONE: ("FedAvg", MAIN), FEW: FEW_ROWS, ALIKE: FEW_ROWS},
    seeds=range(10),
    columns=("global", "difference", "up"),
    claims=(
        Claim("SR-FedAvg is ahead of FedAvg", "the study", lambda done: better(HALF, MAIN, "FedAvg", done)),
        Claim("SR-FedAvg is steadier over seeds", "the study", steadier_over_seeds),
        Claim("SR-FedAvg is steadier from round to round", "the study", steadier_over_rounds),
        Claim(
            "shrinkage helps where few clients meet and are far apart",
            "theory",
            lambda done: better(FEW, MAIN, "FedAvg", done),
        ),
        Claim(
            "shrinkage makes top-k better",
            "the study",
            lambda done: better(HALF, "SR-FedAvg, top-k 0.1", "FedAvg, top-k 0.1", done),
        ),
    ),
)
