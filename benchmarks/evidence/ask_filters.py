"""What does FedSCR keep back, and what does it cost?"""

from judge import NOT_RUN, within
from question import Claim, Finding, Job, Question, Row, Setting

from runs import finals

IID, SPLIT = "IID", "Dirichlet 0.5"
THRESHOLDS = (0.3, 0.7, 0.9)
NOT_SENT = {0.3: 49.5, 0.7: 86.6, 0.9: 95.1}
"""Published for fixed thresholds, in percent."""
TASK = {"data": "cifar10", "clients": 50, "model": "resnet18", "augment": ["crop", "flip"]}


def fedscr(threshold: float, adaptive: bool) -> Row:
    return Row([{"fedscr": {"threshold": threshold, "adaptive": adaptive}}], kept=("pruned_share",))


ROWS = {
    "FedAvg": Row(["fedavg"]),
    **{f"FedSCR {threshold:g}": fedscr(threshold, False) for threshold in THRESHOLDS},
    **{f"FedSCR {threshold:g}, adaptive": fedscr(threshold, True) for threshold in THRESHOLDS},
    "STC 1 %": Row([{"stc": {"ratio": 0.01}}]),
    "dropping 90 %": Row([{"topk": {"ratio": 0.1, "mode": "quantile", "memory": True}}]),
}


def share_kept_back(threshold: float, done: list[Job]) -> Finding:
    """Whether the share of filters not sent in the last round is that published, within 5 points."""
    shares = [100 * job["metrics"]["pruned_share"] for job in finals(IID, f"FedSCR {threshold:g}", done)]
    if not shares:
        return NOT_RUN
    mean = sum(shares) / len(shares)
    return Finding(f"{mean:.1f} %", "holds" if abs(mean - NOT_SENT[threshold]) <= 5 else "does not hold")


def setting(split: object, about: str) -> Setting:
    study = {
        "task": {**TASK, "split": split},
        "sample": 5,
        "rounds": 100,
        "local": {"epochs": 1, "batch": 50},
        "plan": {"precision": "bf16"},
    }
    return Setting(about, study, rate=0.05, tuning_rounds=0, seconds=0.6, device="cuda")


QUESTION = Question(
    name="filters",
    asks="What does FedSCR keep back, and what does it cost?",
    settings={
        IID: setting(
            "iid", "CIFAR-10, IID over 50 clients, 5 a round, ResNet-18, one epoch of batch 50, lr 0.05, untuned"
        ),
        SPLIT: setting({"dirichlet": 0.5}, "the same, Dirichlet 0.5"),
    },
    rows=ROWS,
    seeds=range(2),
    columns=("global", "difference", "pruned_share", "up"),
    claims=(
        *(
            Claim(
                f"threshold {threshold:g} keeps back {NOT_SENT[threshold]} % of what is to be sent",
                "FedSCR",
                lambda done, threshold=threshold: share_kept_back(threshold, done),
            )
            for threshold in THRESHOLDS
        ),
        Claim(
            "threshold 0.3 costs nothing (a point)", "FedSCR", lambda done: within(IID, "FedSCR 0.3", "FedAvg", done, 1)
        ),
        Claim(
            "filters are a better choice than single entries (dropping 90 %)",
            "FedSCR",
            lambda done: within(IID, "FedSCR 0.7", "dropping 90 %", done, 0),
        ),
    ),
)
