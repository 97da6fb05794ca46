"""The demo: FedAvg against ways to send less, on the embedded digits. Every number it shows was just measured."""

from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from sparing.core.threads import intra_op
from sparing.run.loop import Logger
from sparing.run.results import Result
from sparing.run.start import run
from sparing.ui.live import Progress, plain_lines
from sparing.ui.text import megabytes, percent

Rows = dict[str, Result]

METHODS: dict[str, Any] = {
    "fedavg": "fedavg",
    "psfed": "psfed",
    "psfed, per client": [{"psfed": {"per_client": True}}],
    "personal": "personal",
    "randk+memory": "randk+memory",
    "topk+memory": "topk+memory",
    "topk+int8+memory": "topk+int8+memory",
    "psfed+topk+int8+memory": "psfed+topk+int8+memory",
}
TASK = {"data": "digits", "clients": 20, "split": {"dirichlet": 0.3}, "model": "cnn"}
LOCAL = {"epochs": 3, "batch": 16, "lr": 0.1, "momentum": 0.9}

READ = (
    "Read every row against the first: accuracy is the global model's on all test samples, personal is the mean of "
    "the clients' own models on their own samples and worst decile that of the tenth served worst, and a megabyte is "
    "a million bytes as the encoder writes them."
)


def demo(rounds: int, seed: int, console: Console) -> Rows:
    """Run every method and show the table as it grows."""
    rows: Rows = {}
    if not console.is_terminal:
        for label in METHODS:
            rows[label] = one(label, rounds, seed, plain_lines(Progress(label, rounds)))
        console.print(table(rows))
        return rows
    with Live(console=console, refresh_per_second=8) as live:
        for label in METHODS:
            progress = Progress(label, rounds)
            live.update(Group(table(rows), "", progress))
            rows[label] = one(label, rounds, seed, progress)
        live.update(table(rows))
    return rows


def silent(rounds: int, seed: int) -> Rows:
    """The same without a word."""
    return {label: one(label, rounds, seed) for label in METHODS}


def one(label: str, rounds: int, seed: int, *loggers: Logger) -> Result:
    study: dict[str, Any] = {"local": LOCAL, "sample": 0.5, "evaluate": {"every": max(1, rounds // 10)}}
    with intra_op(1):  # so small a model gains nothing by threads; clients still train side by side
        return run(TASK, METHODS[label], rounds=rounds, seed=seed, loggers=loggers, **study)


def table(rows: Rows) -> Table:
    out = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))  # 80 columns
    out.add_column("\nmethod".ljust(1 + max(map(len, METHODS))), overflow="fold")
    for head in ("\naccuracy", "\npersonal", "worst\ndecile", "MB\nup", "MB\ndown", "fewer\nMB up", "\ntime"):
        out.add_column(head, justify="right", no_wrap=True)
    for label, result in rows.items():
        out.add_row(label, *cells(result, fewer(rows, result)))
    return out


def cells(result: Result, times: float) -> tuple[str, ...]:
    shares = (result.accuracy, result.personal_accuracy, result.worst_decile)
    return (
        *map(percent, shares),
        megabytes(result.up_bytes),
        megabytes(result.down_bytes),
        f"{times:.1f}x",
        f"{result.seconds:.1f} s",
    )


def fewer(rows: Rows, result: Result) -> float:
    """How many times fewer bytes went up than with FedAvg."""
    return rows["fedavg"].up_bytes / result.up_bytes


def print_footer(rounds: int, console: Console) -> None:
    local = " ".join(f"local.{key}={value}" for key, value in LOCAL.items())
    console.print(f"\n{READ}\n\nTry next:", highlight=False)
    console.print(f"  sparing run method=topk+int8+memory rounds={2 * rounds} {local}", soft_wrap=True, highlight=False)


def as_json(rows: Rows) -> list[dict[str, Any]]:
    return [{"label": label, **r.summary, "fewer_up": fewer(rows, r)} for label, r in rows.items()]
