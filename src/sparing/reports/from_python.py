"""Runs side by side, and their report, as one call each."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sparing.core.errors import ConfigError
from sparing.reports.arrangement import arrange_groups
from sparing.reports.comparison import Comparison, compare_groups
from sparing.reports.comparison_tables import comparison_csv, comparison_markdown, flat_row
from sparing.reports.figure import Figure
from sparing.reports.html_page import report_figures, report_page
from sparing.reports.latex_table import comparison_latex
from sparing.reports.run_folders import RunGroup, find_run_folders, group_runs, read_run_folder
from sparing.runs.tables import frame_of
from sparing.storage.atomic import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


class ComparedRuns(NamedTuple):
    """What runs came to, side by side."""

    comparison: Comparison
    groups: list[RunGroup]  # runs that differ only in the seed

    @property
    def notes(self) -> list[str]:
        """What to know before believing it: who was left out, at which round."""
        return self.comparison.notes

    def table(self) -> Any:
        """One row for each method, means and standard deviations over seeds: a pandas DataFrame where it is there."""
        return frame_of([flat_row(row) for row in self.comparison.rows])

    def latex(self) -> str:
        return comparison_latex(self.comparison)

    def markdown(self) -> str:
        return comparison_markdown(self.comparison)

    def csv(self) -> str:
        return comparison_csv(self.comparison)

    def figures(self) -> dict[str, "Canvas"]:
        """The report's figures by name, drawn by matplotlib; the first is accuracy against bytes."""
        from sparing.reports.figure_files import draw_figure

        return {figure.key: draw_figure(figure) for _, figure in report_figures(self.groups)}

    def figure(self) -> "Canvas":
        """Accuracy against bytes."""
        return next(iter(self.figures().values()))

    def _repr_markdown_(self) -> str:
        return self.markdown()


def compare(
    *runs: str | Path,
    baseline: str | None = None,
    target: float | None = None,
    tolerance: float = 0.01,
    warmup: int = 5,
    allow_incomplete: bool = False,
) -> ComparedRuns:
    """Compare runs: folders, folders of them, or patterns. The options are those of `sparing compare`."""
    groups, notes = _read_runs(runs)
    found = compare_groups(groups, baseline, target, tolerance, warmup, allow_incomplete)
    arranged, _ = arrange_groups(groups, baseline, allow_incomplete)
    return ComparedRuns(found._replace(notes=notes + found.notes), arranged)


def report(
    *runs: str | Path,
    out: str | Path = "report.html",
    baseline: str | None = None,
    target: float | None = None,
    allow_incomplete: bool = False,
) -> Path:
    """Write the results of runs as one HTML file with figures, which needs no network."""
    found = compare(*runs, baseline=baseline, target=target, allow_incomplete=allow_incomplete)
    write_report(found, Path(out))
    return Path(out)


def write_report(found: ComparedRuns, path: Path) -> list[Figure]:
    """The page as a file; its figures."""
    made = report_figures(found.groups)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, report_page(found.groups, found.comparison, made).encode())
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or path} ({error.strerror}); choose another place") from None
    return [figure for _, figure in made]


def _read_runs(runs: Sequence[str | Path]) -> tuple[list[RunGroup], list[str]]:
    return group_runs([read_run_folder(folder) for folder in find_run_folders(runs)])
