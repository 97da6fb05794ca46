"""What `sparing bench` found, as a table."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from sparing.runs.speed import StudySpeed

_SPEED_HEADS = (
    "s per\nround",
    "fastest to\nslowest",
    "rounds\nper s",
    "clients\nper s",
    "training\nshare",
    "s per\nevaluation",
)


def show_speeds(speeds: Sequence[StudySpeed], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("\nmethod", overflow="fold")
    for head in (*_SPEED_HEADS, "peak\nMB"):
        table.add_column(head, justify="right", no_wrap=True)
    for one in speeds:
        table.add_row(one.method, *_speed_cells(one))
    console.print(table, highlight=False)
    first = speeds[0]
    plan = ", ".join(f"{key} {first.plan[key]}" for key in ("path", "chunk", "threads", "bank"))
    said = f"Medians of {first.rounds} rounds after one warm-up round, {first.clients} clients per round"
    console.print(f"\n{said}, on {first.device} ({plan}).", highlight=False)
    if any(one.gpu_mb for one in speeds):
        console.print("GPU memory: " + ", ".join(f"{one.method} {one.gpu_mb:,.0f} MB" for one in speeds))


def _speed_cells(one: StudySpeed) -> tuple[str, ...]:
    return (
        f"{one.seconds:.3f}",
        f"{one.fastest:.3f} to {one.slowest:.3f}",
        f"{1 / one.seconds:.2f}",
        f"{one.clients_per_second:.1f}",
        f"{100 * min(one.training_seconds / one.seconds, 1):.0f} %",
        f"{one.evaluation_seconds:.3f}",
        f"{one.peak_mb:,.0f}",
    )
