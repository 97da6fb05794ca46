"""`sparing compare`: what runs came to, side by side."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparing.cli.commands.shared import AsJson, complain, mention_secrets, print_json
from sparing.core.errors import ConfigError

if TYPE_CHECKING:
    from sparing.reports.from_python import ComparedRuns


def compare_command(
    runs: Annotated[list[str], typer.Argument(metavar="RUNS...", help="Run folders, folders of them, or patterns.")],
    baseline: Annotated[str | None, typer.Option(help="The method to compare with. [default: fedavg]")] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Target accuracy, such as 0.9, or value of the task's metric: rounds and MB to reach it."),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0,
            help="A run has converged once its accuracy is within this of its best; another metric, within this share.",
        ),
    ] = 0.01,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds left out of the stability columns.")] = 5,
    allow_incomplete: Annotated[
        bool,
        typer.Option(
            "--allow-incomplete", help="Also compare unfinished runs, all at the last round that every run has."
        ),
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV with four decimals.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="Print one LaTeX table (booktabs).")] = False,
    as_json: AsJson = False,
    h5: Annotated[Path | None, typer.Option(help="Also write DATASET_METHOD_GOAL_RUN.h5 files to this folder.")] = None,
    goal: Annotated[str, typer.Option(help="Label in the names of those files.")] = "test",
) -> None:
    """Compare runs: accuracy, loss, bytes and stability, mean and standard deviation over seeds.

    Runs that differ only in the seed are one row. The baseline comes first, then the methods by accuracy, or by the
    first metric of their task. Differences are paired by seed. Runs of different length are compared at the last round
    that all have; unfinished and diverged runs are left out, and a note says why.

    \b
    sparing compare runs
    sparing compare 'runs/digits-*' --target 0.9 --baseline psfed
    sparing compare runs --csv > table.csv
    sparing compare runs --h5 results --goal mine
    """
    if csv + markdown + latex + as_json > 1:
        raise ConfigError("--csv, --markdown, --latex and --json are different answers; choose one")
    from sparing.reports.from_python import compare

    found = compare(
        *runs, baseline=baseline, target=target, tolerance=tolerance, warmup=warmup, allow_incomplete=allow_incomplete
    )
    files = [] if h5 is None else _write_h5(found, h5, goal)
    _print_comparison(found, csv, markdown, latex, as_json, files)


def _write_h5(found: "ComparedRuns", folder: Path, goal: str) -> list[str]:
    from sparing.reports.h5_files import write_h5_files

    mention_secrets(run.folder for group in found.groups for run in group.runs)
    files = []
    for group in found.groups:
        files += map(str, write_h5_files(folder, group.task, group.method, goal, [run.table for run in group.runs]))
    return files


def _print_comparison(
    found: "ComparedRuns", csv: bool, markdown: bool, latex: bool, as_json: bool, files: list[str]
) -> None:
    from rich.console import Console

    from sparing.reports.comparison_tables import comparison_json, print_comparison

    if as_json:
        print_json(comparison_json(found.comparison) | ({"files": files} if files else {}))
        return
    to_paste = csv or markdown or latex
    if to_paste:
        typer.echo((found.csv if csv else found.markdown if markdown else found.latex)(), nl=False)
    else:
        print_comparison(found.comparison, Console())
    for note in found.notes if csv else ():
        complain(f"note: {note}")
    for path in files:
        typer.echo(f"wrote {path}", err=to_paste)
