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

from sparing.cli.wording import megabytes_text
from sparing.reports.comparison_tables import finite_or_none, star_legend
from sparing.runs.files.run_folder import ROUNDS_FILE
from sparing.sweeps.execute import SweepProgress
from sparing.sweeps.folder import Trial, pareto_trials, starred_trials, winning_trial
from sparing.sweeps.judge import Judge
from sparing.sweeps.processes import SweepRun
from sparing.sweeps.spec import SweepSpec, TrialSettings

_PARETO_MARK = "*"


class _SweepOverview:
    """Draws a course: how many trials are over, what the best is, which runs go on."""

    def __init__(self) -> None:
        self.course: SweepProgress | None = None

    def __rich__(self) -> RenderableType:
        if self.course is None:
            return Text("starting")
        line = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self.course.count, completed=self.course.done, width=20)
        best = winning_trial(self.course.trials)
        said = f"best {_trial_text(best)}{best.judge.unit}: {_settings_text(best.settings)}" if best else ""
        line.add_row("[bold]sweep[/]", bar, f"{self.course.done}/{self.course.count} trials", Text(said))
        return Group(line, *(Text(f"  {_run_progress_text(work)}", style="dim") for work in self.course.running))


def _run_progress_text(work: SweepRun) -> str:
    try:
        done = (work.folder / ROUNDS_FILE).read_bytes().count(b"\n") - 1
    except OSError:
        done = 0
    return f"{work.folder.name}  round {max(done, 0)}/{work.study.rounds}"


@contextmanager
def watch_sweep(console: Console, quiet: bool) -> Iterator[Callable[[SweepProgress], None]]:
    """What to hand to a sweep: a live view on a terminal, elsewhere a line for every trial that is over."""
    if quiet:
        yield lambda course: None
    elif not console.is_terminal:
        yield _log_trial_lines()
    else:
        view = _SweepOverview()
        with Live(view, console=console, transient=True, refresh_per_second=4):
            yield lambda course: setattr(view, "course", course)


def _log_trial_lines() -> Callable[[SweepProgress], None]:
    said: set[int] = set()

    def tell(course: SweepProgress) -> None:
        for one in course.trials:
            if one.number not in said and (one.complete or one.failed):
                said.add(one.number)
                print(f"trial {one.number}  {_settings_text(one.settings)}  {_trial_outcome(one)}", flush=True)

    return tell


def _trial_outcome(one: Trial) -> str:
    if one.complete:
        sent = megabytes_text(round(one.over_seeds("bytes").mean))
        name = "accuracy" if one.judge.by_accuracy else one.judge.column
        return f"{name} {_trial_text(one)}{one.judge.unit}  {sent} MB"
    return _missing_seeds_text(one)


def _missing_seeds_text(one: Trial) -> str:
    """Why there is no mean."""
    have = f"{len(one.scores)} of {len(one.seeds)} seeds"
    return f"{have}; {next(iter(one.failed.values()))}" if one.failed else have


def _settings_text(settings: TrialSettings) -> str:
    """
    >>> _settings_text({"local.lr": 0.0123456, "method": "topk+int8"})
    'local.lr=0.01235 method=topk+int8'
    """
    return " ".join(f"{_brief_key(key)}={_short_value(value)}" for key, value in settings.items())


def _brief_key(key: str) -> str:
    """
    >>> _brief_key("method.topk.ratio")
    'topk.ratio'
    """
    return key.removeprefix("method.")


def _short_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _trial_text(one: Trial) -> str:
    """Mean ± std over seeds of what trials are judged by."""
    s, judge = one.over_seeds("value"), one.judge
    spread = judge.number(s.std) if judge.by_accuracy else f"{s.std:.2g}"
    return judge.number(s.mean) + (f" ± {spread}" if s.std == s.std else "")


def _ranked_trials(trials: Sequence[Trial]) -> list[Trial]:
    """The best first, those without a mean last."""
    return sorted(trials, key=lambda one: one.merit if one.complete else -math.inf, reverse=True)


def print_sweep(plan: SweepSpec, trials: Sequence[Trial], final: Trial | None, console: Console) -> None:
    stars, judge = {one.number for one in starred_trials(trials)}, trials[0].judge
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("trial", justify="right", no_wrap=True)
    for key in plan.spaces:
        table.add_column(_brief_key(key).replace(".", ".\n"), overflow="fold")
    for head in (judge.column.replace("_", "\n") + judge.unit, "MB\nup", "MB\ndown", ""):
        table.add_column(head, justify="right", no_wrap=True)
    for one in _ranked_trials(trials):
        chosen = [_short_value(one.settings[key]) if key in one.settings else "" for key in plan.spaces]
        cells = ["-"] * 3
        if one.complete:
            sent = [megabytes_text(round(one.over_seeds(name).mean)) for name in ("up_bytes", "down_bytes")]
            cells = [_trial_text(one), *sent]
        table.add_row(str(one.number), *chosen, *cells, _PARETO_MARK if one.number in stars else "")
    console.print(table, highlight=False)
    seeds = ", ".join(map(str, plan.seeds))
    way = "" if judge.by_accuracy else f" {'Higher' if judge.higher_is_better else 'Lower'} {judge.column} is better."
    lines = [f"\nOn validation samples, seeds {seeds}.{way} {_star_legend(plan, judge)}"]
    lines += [
        f"trial {one.number} has no mean: {_missing_seeds_text(one)}"
        for one in _ranked_trials(trials)
        if not one.complete
    ]
    if final is not None:
        test = f"{_trial_text(final)}{judge.unit}" if final.complete else _missing_seeds_text(final)
        over = ", ".join(map(str, final.seeds))
        lines.append(f"Trial {final.number} on test samples, seeds {over}: {judge.column} {test}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _star_legend(plan: SweepSpec, judge: Judge) -> str:
    if len(plan.seeds) == 1:
        return "No trial gets a Pareto star: with one seed a lead cannot be told from noise."
    return star_legend("trial", "more accurate" if judge.by_accuracy else "better")


def sweep_json(plan: SweepSpec, trials: Sequence[Trial], final: Trial | None, folder: str) -> dict[str, Any]:
    best = winning_trial(trials)
    return {
        "folder": folder,
        "judge": trials[0].judge.column,
        "seeds": plan.seeds,
        "trials": [_trial_json(one) for one in trials],
        "pareto": [one.number for one in pareto_trials(trials)],
        "stars": [one.number for one in starred_trials(trials)],
        "winner": best.number if best else None,
        "final": _trial_json(final) if final else None,
    }


def _trial_json(one: Trial) -> dict[str, Any]:
    judged = "accuracy" if one.judge.by_accuracy else "value"
    names = {judged: "value", "up_bytes": "up_bytes", "down_bytes": "down_bytes", "bytes": "bytes"}
    stats = {shown: finite_or_none(one.over_seeds(name)._asdict()) for shown, name in names.items()}
    return {"number": one.number, "settings": one.settings, "complete": one.complete, "failed": one.failed, **stats}
