"""The demo: FedAvg against ways to send less, on the embedded digits. Every number it shows was just measured."""

from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from sparing.cli.progress import RunProgress, log_plain_lines
from sparing.cli.wording import megabytes_text, percent
from sparing.core.threads import intra_op
from sparing.runs.loop import Logger
from sparing.runs.results import Result
from sparing.runs.start import run

_DemoRows = dict[str, Result]

_DEMO_METHODS: dict[str, Any] = {
    "fedavg": "fedavg",
    "psfed": "psfed",
    "psfed, per client": [{"psfed": {"per_client": True}}],
    "personal": "personal",
    "randk+memory": "randk+memory",
    "topk+memory": "topk+memory",
    "topk+int8+memory": "topk+int8+memory",
    "psfed+topk+int8+memory": "psfed+topk+int8+memory",
}
_DEMO_TASK = {"data": "digits", "clients": 20, "split": {"dirichlet": 0.3}, "model": "cnn"}
_DEMO_LOCAL = {"epochs": 3, "batch": 16, "lr": 0.1, "momentum": 0.9}

_HOW_TO_READ = (
    "Compare each row with the first. Accuracy: the global model on all test samples. Personalized: each client's own "
    "model on its own test samples, mean over clients; worst decile: the mean over the tenth of clients with the "
    "lowest accuracy. MB: millions of bytes as encoded, of all clients together."
)


def run_demo(rounds: int, seed: int, console: Console) -> _DemoRows:
    """Run every method and show the table as it grows."""
    rows: _DemoRows = {}
    if not console.is_terminal:
        for label in _DEMO_METHODS:
            rows[label] = _run_demo_method(label, rounds, seed, log_plain_lines(RunProgress(label, rounds)))
        console.print(_demo_table(rows))
        return rows
    with Live(console=console, refresh_per_second=8) as live:
        for label in _DEMO_METHODS:
            progress = RunProgress(label, rounds)
            live.update(Group(_demo_table(rows), "", progress))
            rows[label] = _run_demo_method(label, rounds, seed, progress)
        live.update(_demo_table(rows))
    return rows


def run_demo_silently(rounds: int, seed: int) -> _DemoRows:
    """The same without a word."""
    return {label: _run_demo_method(label, rounds, seed) for label in _DEMO_METHODS}


def _run_demo_method(label: str, rounds: int, seed: int, *loggers: Logger) -> Result:
    study: dict[str, Any] = {"local": _DEMO_LOCAL, "sample": 0.5, "evaluate": {"every": max(1, rounds // 10)}}
    with intra_op(1):  # so small a model gains nothing by threads; clients still train side by side
        return run(_DEMO_TASK, _DEMO_METHODS[label], rounds=rounds, seed=seed, loggers=loggers, **study)


def _demo_table(rows: _DemoRows) -> Table:
    out = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))  # 80 columns
    out.add_column("\nmethod".ljust(1 + max(map(len, _DEMO_METHODS))), overflow="fold")
    for head in ("\naccuracy", "personal-\nized", "worst\ndecile", "MB\nup", "MB\ndown", "fewer\nMB up", "\ntime"):
        out.add_column(head, justify="right", no_wrap=True)
    for label, result in rows.items():
        out.add_row(label, *_demo_cells(result, _times_fewer_bytes(rows, result)))
    return out


def _demo_cells(result: Result, times: float) -> tuple[str, ...]:
    shares = (result.accuracy, result.personal_accuracy, result.worst_decile)
    return (
        *map(percent, shares),
        megabytes_text(result.up_bytes),
        megabytes_text(result.down_bytes),
        f"{times:.1f}x",
        f"{result.seconds:.1f} s",
    )


def _times_fewer_bytes(rows: _DemoRows, result: Result) -> float:
    """How many times fewer bytes went up than with FedAvg."""
    return rows["fedavg"].up_bytes / result.up_bytes


def print_demo_footer(rounds: int, console: Console) -> None:
    local = " ".join(f"local.{key}={value}" for key, value in _DEMO_LOCAL.items())
    console.print(f"\n{_HOW_TO_READ}\n\nTry next:", highlight=False)
    console.print(f"  sparing run method=topk+int8+memory rounds={2 * rounds} {local}", soft_wrap=True, highlight=False)


def demo_json(rows: _DemoRows) -> list[dict[str, Any]]:
    return [{"label": label, **r.summary, "fewer_up": _times_fewer_bytes(rows, r)} for label, r in rows.items()]
