"""`sparing data` and `sparing check`: what a dataset is, who holds what, and what a study will cost."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from sparing.cli.wording import lost_text, megabytes_text, size_text
from sparing.data.dataset import Dataset
from sparing.data.inputs import sample_tensors
from sparing.net.holdings import write_holdings
from sparing.reports.split_picture import draw_split
from sparing.runs.cost import StudyCost
from sparing.runs.study import TaskSection
from sparing.split import split_report, split_report_lines
from sparing.split.summary import SplitReport
from sparing.tasks.build import build_task, load_and_partition


def _load_split(task: TaskSection, seed: int) -> tuple[Dataset, SplitReport]:
    """The dataset, and who holds what of it."""
    split: Any = task.split or "iid"
    shares = (task.test, task.validation, task.held_out, task.probe)
    pool, parts = load_and_partition(task.data, task.clients, split, seed, *shares)
    return pool, split_report(parts, pool)


def write_nodes(task: TaskSection, seed: int, folder: Path) -> list[Path]:
    """Every client's samples as a file of its own, and the server's test set."""
    pool, _ = _load_split(task, seed)
    return write_holdings(folder, build_task(**task.model_dump(), seed=seed), pool.classes)


def split_json(task: TaskSection, seed: int) -> dict[str, Any]:
    told = _load_split(task, seed)[1]._asdict()
    return {name: x.tolist() if isinstance(x, np.ndarray) else x for name, x in told.items()}


def show_split(task: TaskSection, seed: int, picture: Path, console: Console) -> None:
    """Say what the dataset is and who holds what, and draw it."""
    pool, told = _load_split(task, seed)
    kind = " and ".join(f"{'x'.join(str(side) for side in x.shape[1:])} ({x.dtype})" for _, x in sample_tensors(pool.x))
    groups = f", natural ids: {', '.join(sorted(pool.groups))}" if pool.groups else ""
    console.print(f"{pool.name}: {len(pool):,} samples of {kind}, {pool.classes} classes{groups}")
    for line in split_report_lines(told):
        console.print(line, highlight=False)
    console.print(f"figure written to {draw_split(told, picture)}")


_PLAN_ORIGINS = {
    "given": "set in the study",
    "rule": "chosen by rule",
    "measured": "measured now, and cached",
    "remembered": "measured earlier",
}


def show_cost(cost: StudyCost, rounds: int, looks: int, console: Console) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2))
    ways = {(path, chunk, threads): speed for path, chunk, threads, speed in cost.speeds}
    chosen = tuple(cost.plan[key] for key in ("path", "chunk", "threads"))
    table.add_row("clients", f"{cost.clients:,} with {cost.samples:,} samples; up to {cost.cohort:,} per round")
    table.add_row("model", f"{cost.parameters:,} parameters")
    table.add_row("plan", f"{_layout_text(*chosen)}, bank {cost.plan['bank']}")
    if cost.plan["precision"] != "float32" or cost.plan["graph"]:
        table.add_row("", f"{cost.plan['precision']}{', as a CUDA graph' if cost.plan['graph'] else ''}")
    table.add_row("", _PLAN_ORIGINS[cost.how] + (f": {cost.why}" if cost.why else ""))
    for way, speed in sorted(ways.items(), key=lambda item: -item[1]):
        table.add_row("", f"{speed:9,.1f} clients/s  {_layout_text(*way)}" + (", chosen" if way == chosen else ""))
    flight = f"{size_text(cost.flight_bytes)} of {size_text(cost.memory_bytes)} allowed (plan.memory)"
    table.add_row("working set", f"{min(cost.plan['chunk'], cost.cohort):,} clients at a time: {flight}")
    table.add_row(
        "download", f"{megabytes_text(cost.down_bytes)} MB per round ({megabytes_text(cost.first_bytes)} in the first)"
    )
    table.add_row("upload", f"{megabytes_text(cost.up_bytes)} MB per round")
    for i, line in enumerate(_secure_lines(cost)):
        table.add_row("" if i else "secure", line)
    table.add_row(
        "memory", f"{cost.peak_mb:,.0f} MB peak; state of all clients {cost.state_mb:,.1f} MB ({cost.plan['bank']})"
    )
    if cost.clock is not None:
        table.add_row("simulated time", f"{cost.clock:.1f} s for the first round")
    table.add_row("time", f"{cost.seconds:.2f} s per round and {cost.evaluation_seconds:.2f} s per evaluation")
    if cost.fedavg_seconds is not None:
        table.add_row("", f"FedAvg would take {cost.fedavg_seconds:.2f} s; the rest is finding what fits the budget")
    table.add_row("", f"{_duration_text(cost.seconds * rounds + cost.evaluation_seconds * looks)} in total")
    console.print(table)


def _secure_lines(cost: StudyCost) -> list[str]:
    """What secure aggregation adds, to one client and to all."""
    price = cost.secure
    if price is None:
        return []
    ups, downs = (
        ", ".join(f"{kind} {size_text(getattr(price, f'{way}_{kind}'))}" for kind in ("keys", "shares", "unmask"))
        for way in ("up", "down")
    )
    times = [cost.up_bytes / max(1, cost.open_up_bytes), cost.down_bytes / max(1, cost.open_down_bytes)]
    return [
        f"a client sends {price.words:,} masked words of {price.bits} bits, {size_text(price.up_values)}; {ups}",
        f"and gets {downs}",
        f"{times[0]:.2f} times the upload and {times[1]:.2f} times the download without it",
        lost_text(price),
        *([f"about {price.futile:.0%} of the rounds will count for nobody"] if price.futile >= 0.005 else []),
    ]


def _layout_text(path: str, chunk: int, threads: int) -> str:
    """
    >>> _layout_text("loop", 16, 2), _layout_text("stacked", 8, 1)
    ('loop, chunk 16, 2 threads', 'stacked, chunk 8, 1 thread')
    """
    return f"{path}, chunk {chunk}, {threads} thread{'s' if threads > 1 else ''}"


def _duration_text(seconds: float) -> str:
    """
    >>> _duration_text(42), _duration_text(600), _duration_text(9000)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
