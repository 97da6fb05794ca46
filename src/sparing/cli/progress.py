"""Progress while a run goes on: a live display on a terminal, a few plain lines elsewhere."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sparing.cli.wording import megabytes_text, percent
from sparing.reports.ranking import Ranking, ranking_of_run
from sparing.runs.loop import Logger
from sparing.runs.results import Record, record_value

_PLAIN_LINES = 10  # where there is no terminal
_SPARK_BARS = "▁▂▃▄▅▆▇█"
_BARS_SHOWN = 16  # bars
_LEAST_RANGE = 0.05  # of accuracy, from the lowest bar to the highest: what changes less looks flat


class RunProgress:
    """What a run has come to so far: a logger `(Record) -> None` that draws itself.

    `earlier` are the rounds trained before this process, when a run is resumed.
    """

    def __init__(self, label: str, rounds: int, earlier: Sequence[Record] = (), metrics: Sequence[str] = ()):
        self.label, self.rounds, self.metrics, self.ranking = label, rounds, metrics, Ranking()
        self.done = self.up = self.down = 0
        self.seconds = 0.0
        self.worst = float("nan")
        self.course: list[float] = []  # accuracy, or what the task ranks by, whenever it was measured
        for record in earlier:
            self(record)
        self.skipped = self.done, self.seconds

    def __call__(self, record: Record) -> None:
        self.done, self.seconds = record.round, record.seconds
        self.up += record.up_bytes
        self.down += record.down_bytes
        ranking = ranking_of_run({}, self.metrics, [record])
        if (value := record_value(record, ranking.metric)) == value:
            self.course.append(value)
            self.ranking = ranking
        if record.worst_decile == record.worst_decile:
            self.worst = record.worst_decile

    @property
    def pace(self) -> str:
        """Of the rounds of this process."""
        rounds, seconds = self.done - self.skipped[0], self.seconds - self.skipped[1]
        if not rounds or seconds <= 0:
            return ""
        speed = f"{rounds / seconds:.1f} rounds/s" if rounds >= seconds else f"{seconds / rounds:.1f} s/round"
        return f"{speed}  {_clock_text((self.rounds - self.done) * seconds / rounds)} left"

    @property
    def numbers(self) -> str:
        accuracy = self.course[-1] if self.course else float("nan")
        sent = f"up {megabytes_text(self.up)} MB  down {megabytes_text(self.down)} MB"
        if not self.ranking.by_accuracy:
            return f"{self.ranking.metric} {self.ranking.shown(accuracy)}  {sent}"
        return f"accuracy {percent(accuracy)}  worst decile {percent(self.worst)}  {sent}"

    def __str__(self) -> str:
        return f"{self.label}  round {self.done}/{self.rounds}  {self.numbers}  {self.pace}".rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Table.grid(padding=(0, 2))
        for _ in range(4):
            line.add_column(no_wrap=True)
        bar = ProgressBar(total=self.rounds, completed=self.done, width=20)
        line.add_row(Text(self.label, style="bold"), bar, f"{self.done}/{self.rounds}", self.pace)
        yield line
        drawn = (
            ""
            if options.ascii_only
            else f"  {_sparkline(self.course[-_BARS_SHOWN:], _LEAST_RANGE if self.ranking.by_accuracy else 0)}"
        )
        yield Text(f"  {self.numbers}{drawn}", style="dim", no_wrap=True, overflow="crop")


def _sparkline(values: Sequence[float], least: float = _LEAST_RANGE) -> str:
    """From the least of them up.

    >>> _sparkline([0.1, 0.5, 0.9]), _sparkline([0.5]), _sparkline([])
    ('▁▅█', '▁', '')
    """
    if not values:
        return ""
    low, high = min(values), max(values)
    step = (max(high - low, least) or 1) / (len(_SPARK_BARS) - 1)
    return "".join(_SPARK_BARS[round((value - low) / step)] for value in values)


def _clock_text(seconds: float) -> str:
    """
    >>> _clock_text(75.2), _clock_text(3725)
    ('1:15', '1:02:05')
    """
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{left:02}" if minutes >= 60 else f"{minutes}:{left:02}"


@contextmanager
def watch_progress(progress: RunProgress, console: Console) -> Iterator[Logger]:
    """The logger to hand to a run; what it draws is gone when the run is over, plain lines stay."""
    if not console.is_terminal:
        yield log_plain_lines(progress)
        return
    with Live(progress, console=console, transient=True, refresh_per_second=8):
        yield progress


def log_plain_lines(progress: RunProgress) -> Logger:
    """A line for every tenth of the rounds."""

    def log(record: Record) -> None:
        before = progress.done * _PLAIN_LINES // progress.rounds
        progress(record)
        if record.round * _PLAIN_LINES // progress.rounds > before:
            print(progress, flush=True)

    return log
