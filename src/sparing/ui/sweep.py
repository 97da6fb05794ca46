"""A sweep as a person sees it: how far it is, and what its trials came to."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sparing.run.compare import Stat
from sparing.run.folder import ROUNDS
from sparing.run.sweep import Settings, Sweep
from sparing.run.sweeping import Course
from sparing.run.trials import Trial, pareto, winner
from sparing.run.workers import Work
from sparing.ui.compare import tidy
from sparing.ui.text import megabytes

MARK = "*"


class Overview:
    """Draws a course: how many trials are over, what the best is, which runs go on."""

    def __init__(self) -> None:
        self.course: Course | None = None

    def __rich__(self) -> RenderableType:
        if self.course is None:
            return Text("starting")
        line = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self.course.count, completed=self.course.done, width=20)
        best = winner(self.course.trials)
        said = f"best {spread(best.over_seeds('accuracy'), 100)} %: {settings_text(best.settings)}" if best else ""
        line.add_row("[bold]sweep[/]", bar, f"{self.course.done}/{self.course.count} trials", Text(said))
        return Group(line, *(Text(f"  {going(work)}", style="dim") for work in self.course.running))


def going(work: Work) -> str:
    try:
        done = (work.folder / ROUNDS).read_bytes().count(b"\n") - 1
    except OSError:
        done = 0
    return f"{work.folder.name}  round {max(done, 0)}/{work.study.rounds}"


@contextmanager
def overview(console: Console, quiet: bool) -> Iterator[Callable[[Course], None]]:
    """What to hand to a sweep: a live view on a terminal, elsewhere a line for every trial that is over."""
    if quiet:
        yield lambda course: None
    elif not console.is_terminal:
        yield plain_lines()
    else:
        view = Overview()
        with Live(view, console=console, transient=True, refresh_per_second=4):
            yield lambda course: setattr(view, "course", course)


def plain_lines() -> Callable[[Course], None]:
    said: set[int] = set()

    def tell(course: Course) -> None:
        for one in course.trials:
            if one.number not in said and (one.complete or one.failed):
                said.add(one.number)
                print(f"trial {one.number}  {settings_text(one.settings)}  {outcome(one)}", flush=True)

    return tell


def outcome(one: Trial) -> str:
    if one.complete:
        sent = megabytes(round(one.over_seeds("bytes").mean))
        return f"accuracy {spread(one.over_seeds('accuracy'), 100)} %  {sent} MB"
    return missing(one)


def missing(one: Trial) -> str:
    """Why there is no mean."""
    have = f"{len(one.scores)} of {len(one.seeds)} seeds"
    return f"{have}; {next(iter(one.failed.values()))}" if one.failed else have


def settings_text(settings: Settings) -> str:
    """
    >>> settings_text({"local.lr": 0.0123456, "method": "topk+int8"})
    'local.lr=0.01235 method=topk+int8'
    """
    return " ".join(f"{brief(key)}={short(value)}" for key, value in settings.items())


def brief(key: str) -> str:
    """
    >>> brief("method.topk.ratio")
    'topk.ratio'
    """
    return key.removeprefix("method.")


def short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def spread(s: Stat, scale: float) -> str:
    """Mean ± std over seeds."""
    return f"{scale * s.mean:.2f}" + (f" ± {scale * s.std:.2f}" if s.std == s.std else "")


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """The best first, those without a mean last."""
    return sorted(trials, key=lambda one: one.over_seeds("accuracy").mean if one.complete else -math.inf, reverse=True)


def show(plan: Sweep, trials: Sequence[Trial], final: Trial | None, console: Console) -> None:
    front = {one.number for one in pareto(trials)}
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("trial", justify="right", no_wrap=True)
    for key in plan.spaces:
        table.add_column(brief(key).replace(".", ".\n"), overflow="fold")
    for head in (plan.judge.replace("_", "\n") + " %", "MB\nup", "MB\ndown", ""):
        table.add_column(head, justify="right", no_wrap=True)
    for one in ranked(trials):
        chosen = [short(one.settings[key]) if key in one.settings else "" for key in plan.spaces]
        cells = ["-"] * 3
        if one.complete:
            sent = [megabytes(round(one.over_seeds(name).mean)) for name in ("up_bytes", "down_bytes")]
            cells = [spread(one.over_seeds("accuracy"), 100), *sent]
        table.add_row(str(one.number), *chosen, *cells, MARK if one.number in front else "")
    console.print(table, highlight=False)
    seeds = ", ".join(map(str, plan.seeds))
    lines = [f"\nOn validation samples, seeds {seeds}. {MARK}: no other trial is as accurate and sends less."]
    lines += [f"trial {one.number} has no mean: {missing(one)}" for one in ranked(trials) if not one.complete]
    if final is not None:
        test = spread(final.over_seeds("accuracy"), 100) + " %" if final.complete else missing(final)
        over = ", ".join(map(str, final.seeds))
        lines.append(f"Trial {final.number} on test samples, seeds {over}: {plan.judge} {test}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def as_json(plan: Sweep, trials: Sequence[Trial], final: Trial | None, folder: str) -> dict[str, Any]:
    best = winner(trials)
    return {
        "folder": folder,
        "judge": plan.judge,
        "seeds": plan.seeds,
        "trials": [plain(one) for one in trials],
        "pareto": [one.number for one in pareto(trials)],
        "winner": best.number if best else None,
        "final": plain(final) if final else None,
    }


def plain(one: Trial) -> dict[str, Any]:
    stats = {name: tidy(one.over_seeds(name)._asdict()) for name in ("accuracy", "up_bytes", "down_bytes", "bytes")}
    return {"number": one.number, "settings": one.settings, "complete": one.complete, "failed": one.failed, **stats}
