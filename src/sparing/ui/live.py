"""Progress while a run goes on: a live display on a terminal, a few plain lines elsewhere."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sparing.run.loop import Logger
from sparing.run.results import Record
from sparing.ui.text import megabytes, percent

LINES = 10  # where there is no terminal


class Progress:
    """What a run has come to so far: a logger `(Record) -> None` that draws itself.

    `earlier` are the rounds trained before this process, when a run is resumed.
    """

    def __init__(self, label: str, rounds: int, earlier: Sequence[Record] = ()):
        self.label, self.rounds = label, rounds
        self.done = self.up = self.down = 0
        self.accuracy = self.worst = float("nan")
        for record in earlier:
            self(record)
        self.skipped, self.began = self.done, time.monotonic()

    def __call__(self, record: Record) -> None:
        self.done = record.round
        self.up += record.up_bytes
        self.down += record.down_bytes
        if record.accuracy == record.accuracy:
            self.accuracy = record.accuracy
        if record.worst_decile == record.worst_decile:
            self.worst = record.worst_decile

    @property
    def rate(self) -> float:
        """Rounds per second in this process."""
        return (self.done - self.skipped) / max(time.monotonic() - self.began, 1e-9)

    @property
    def pace(self) -> str:
        if self.done == self.skipped:
            return ""
        left = round((self.rounds - self.done) / self.rate)
        return f"{self.rate:.1f} rounds/s  {left // 60}:{left % 60:02} left"

    @property
    def numbers(self) -> str:
        sent = f"up {megabytes(self.up)} MB  down {megabytes(self.down)} MB"
        return f"accuracy {percent(self.accuracy)}  worst decile {percent(self.worst)}  {sent}"

    def __str__(self) -> str:
        return f"{self.label}  round {self.done}/{self.rounds}  {self.numbers}  {self.pace}"

    def __rich__(self) -> RenderableType:
        line = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self.rounds, completed=self.done, width=20)
        line.add_row(f"[bold]{self.label}[/]", bar, f"{self.done}/{self.rounds}", self.pace)
        return Group(line, Text(f"  {self.numbers}", style="dim"))


@contextmanager
def watching(progress: Progress, console: Console) -> Iterator[Logger]:
    """The logger to hand to a run; what it draws is gone when the run is over, plain lines stay."""
    if not console.is_terminal:
        yield plain_lines(progress)
        return
    with Live(progress, console=console, transient=True, refresh_per_second=8):
        yield progress


def plain_lines(progress: Progress) -> Logger:
    """A line for every tenth of the rounds."""

    def log(record: Record) -> None:
        before = progress.done * LINES // progress.rounds
        progress(record)
        if record.round * LINES // progress.rounds > before:
            print(progress, flush=True)

    return log
