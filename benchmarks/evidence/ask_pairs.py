"""Which parts help each other, and which get into each other's way, after as many bytes?"""

from itertools import combinations
from typing import Any

from ask_bytes import PLAN
from question import Job, Question, Row, Setting

from runs import AT, finals

PARTS: dict[str, Any] = {  # in the order of a list
    "personal": "personal",
    "psfed": {"psfed": {"fraction": 0.5}},
    "fedsim": "fedsim",
    "fedprox": {"fedprox": {"mu": 0.01}},
    "lowrank": {"lowrank": {"energy": 0.9}},
    "topk": {"topk": {"ratio": 0.1, "memory": True}},
    "ecsq": {"ecsq": {"memory": True}},
    "int8": "int8",
    "stein": "stein",
    "fedavgm": {"fedavgm": {"beta": 0.5}},
}
PAIRS = {f"{a}+{b}": (a, b) for a, b in combinations(PARTS, 2)}
IMPOSSIBLE = {"psfed+lowrank", "lowrank+topk", "lowrank+ecsq", "lowrank+int8", "ecsq+int8"}  # refused, with the reason
STRONGEST = 10
"""Points of the strongest colour."""
DIGITS, WRITERS = "digits", "writers"


def after_bytes(job: Job, most: float, column: str = "personal") -> float:
    """The accuracy in percent once so many bytes had gone up, on a straight line between two evaluations."""
    before = None
    for line in job["curve"]:
        if line[AT["up"]] >= most:
            if before is None:
                return 100 * line[AT[column]] * most / line[AT["up"]]
            part = (most - before[AT["up"]]) / (line[AT["up"]] - before[AT["up"]])
            return 100 * (before[AT[column]] + part * (line[AT[column]] - before[AT[column]]))
        before = line
    return 100 * job["curve"][-1][AT[column]]


def gains(setting: str, done: list[Job]) -> dict[tuple[str, str], list[float]]:
    """Of every pair over the better of its parts, in points by seed, after the bytes of the one that sends least."""
    found: dict[tuple[str, str], list[float]] = {}
    for name, parts in PAIRS.items():
        runs = {row: {job["seed"]: job for job in finals(setting, row, done)} for row in (name, *parts)}
        for seed in sorted(set.intersection(*(set(one) for one in runs.values()))):
            of = {row: one[seed] for row, one in runs.items()}
            most = min(job["curve"][-1][AT["up"]] for job in of.values())
            score = {row: after_bytes(job, most) for row, job in of.items()}
            found.setdefault(parts, []).append(score[name] - max(score[part] for part in parts))
    return found


def draw_gains(figure: Any, question: Question, done: list[Job]) -> None:
    """A matrix for each task: what the pair gains or loses."""
    names = list(PARTS)
    axes = figure.subplots(1, len(question.settings), squeeze=False)[0]
    for ax, setting in zip(axes, question.settings, strict=True):
        found, shown = gains(setting, done), [[float("nan")] * len(names) for _ in names]
        for (a, b), values in found.items():
            mean = sum(values) / len(values)
            for i, j in ((names.index(a), names.index(b)), (names.index(b), names.index(a))):
                shown[i][j] = mean
                ink = "white" if abs(mean) > 0.6 * STRONGEST else "black"
                ax.text(j, i, f"{mean:+.1f}", ha="center", va="center", fontsize=7, color=ink)
        ax.imshow(shown, cmap="RdBu", vmin=-STRONGEST, vmax=STRONGEST)
        ax.set_xticks(range(len(names)), names, rotation=60, ha="right")
        ax.set_yticks(range(len(names)), names)
        ax.set_title(setting)


def setting_of(about: str, task: dict[str, Any], sample: int, batch: int, rounds: int, seconds: float) -> Setting:
    local = {"epochs": 2, "batch": batch}
    study = {"task": task, "sample": sample, "rounds": rounds, "local": local, "plan": PLAN}
    return Setting(about, study, rate=0.1, tuning_rounds=rounds // 2, seconds=seconds)


QUESTION = Question(
    name="pairs",
    asks="Which parts help each other, and which get into each other's way, after as many bytes?",
    settings={
        DIGITS: setting_of(
            "digits, Dirichlet 0.3 over 20 clients, 10 a round, a CNN, 2 epochs of batch 16",
            {"data": "digits", "clients": 20, "split": {"dirichlet": 0.3}, "model": "cnn"},
            sample=10,
            batch=16,
            rounds=60,
            seconds=0.08,
        ),
        WRITERS: setting_of(
            "MNIST by writer, 100 clients, 20 a round, LeNet-5, 2 epochs of batch 20",
            {"data": "mnist-writers", "split": "writer", "clients": 100, "model": "lenet5"},
            sample=20,
            batch=20,
            rounds=80,
            seconds=0.25,
        ),
    },
    rows={
        "FedAvg": Row(["fedavg"], "personal"),
        **{name: Row([part], "personal") for name, part in PARTS.items()},
        **{name: Row([PARTS[a], PARTS[b]], "personal") for name, (a, b) in PAIRS.items() if name not in IMPOSSIBLE},
    },
    seeds=range(5),
    columns=("personal", "difference", "global", "worst", "up"),
    figure="gains",
)
