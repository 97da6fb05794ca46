"""`sparing report`: runs as one HTML file with figures."""

from pathlib import Path
from typing import Annotated

import typer

from sparing.cli.commands.shared import mention_secrets
from sparing.core.errors import ConfigError


def report_command(
    runs: Annotated[list[str], typer.Argument(metavar="RUNS...", help="Run folders, folders of them, or patterns.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="HTML file to write.")] = Path("report.html"),
    folder: Annotated[Path | None, typer.Option("--figures", help="Also write each figure to this folder.")] = None,
    formats: Annotated[str, typer.Option("--format", help="Figure formats: png, svg, pdf.")] = "png",
    baseline: Annotated[str | None, typer.Option(help="The method to compare with. [default: fedavg]")] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Target accuracy, such as 0.9, or value of the task's metric: rounds and MB to reach it."),
    ] = None,
    allow_incomplete: Annotated[
        bool,
        typer.Option(
            "--allow-incomplete", help="Also show unfinished runs, all up to the last round that every run has."
        ),
    ] = False,
) -> None:
    """Write the results of runs as one self-contained HTML file with figures.

    It opens with accuracy against bytes and one sentence: the best method, what it sends, and its difference vs the
    baseline. Unfinished and diverged runs are left out, and a note says why.

    \b
    sparing report runs
    sparing report 'runs/digits-*' -o digits.html --figures figures --format png,pdf
    """
    from sparing.reports.figure_formats import read_figure_formats

    kinds = read_figure_formats(formats)
    from sparing.reports import figure_files
    from sparing.reports.from_python import compare, write_report

    found = compare(*runs, baseline=baseline, target=target, allow_incomplete=allow_incomplete)
    made = write_report(found, out)
    try:
        paths = [] if folder is None else figure_files.write_figures(made, folder, kinds)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename} ({error.strerror}); choose another place") from None
    groups = found.groups
    mention_secrets(run.folder for group in groups for run in group.runs)
    typer.echo(f"wrote {out}: {len(made)} figures of {sum(len(group.runs) for group in groups)} runs")
    if folder is not None:
        typer.echo(f"wrote {len(paths)} files to {folder}")
