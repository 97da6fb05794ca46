"""`sparing report`: runs as one HTML file with figures."""

from pathlib import Path
from typing import Annotated

import typer

from sparing.core.errors import ConfigError
from sparing.run.compare import compare, complete
from sparing.run.files import write_atomic
from sparing.run.gather import find, grouped, read
from sparing.ui.commands.common import mention_secrets
from sparing.ui.report import files
from sparing.ui.report.page import figures, page


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUNS...", help="Run folders, folders of them, or patterns.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to write.")] = Path("report.html"),
    folder: Annotated[Path | None, typer.Option("--figures", help="Also write each figure to this folder.")] = None,
    formats: Annotated[str, typer.Option("--format", help="Of those: png, svg, pdf.")] = "png",
    baseline: Annotated[str | None, typer.Option(help="The method to compare with. [default: fedavg]")] = None,
    target: Annotated[
        float | None, typer.Option(min=0, max=1, help="An accuracy, such as 0.9: rounds and MB until it is reached.")
    ] = None,
    allow_incomplete: Annotated[
        bool, typer.Option("--allow-incomplete", help="Show unfinished runs up to the last round all have.")
    ] = False,
) -> None:
    """Write what runs came to as one HTML file with figures, which needs no network.

    \b
    sparing report runs
    sparing report 'runs/digits-*' -o digits.html --figures figures --format png,pdf
    """
    kinds = [word.strip() for word in formats.split(",")]
    strange = [word for word in kinds if word not in files.FORMATS]
    if strange:
        raise ConfigError(f"--format has {strange[0]!r}; use {', '.join(files.FORMATS)}, with commas between several")
    groups, notes = grouped([read(path) for path in find(runs)])
    found = compare(groups, baseline, target, incomplete=allow_incomplete)
    groups, _ = complete(groups, allow_incomplete)
    made = figures(groups)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, page(groups, found._replace(notes=notes + found.notes), made).encode())
        paths = files.write([figure for _, figure in made], folder, kinds) if folder is not None else []
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or out} ({error.strerror}); choose another place") from None
    mention_secrets(run.folder for group in groups for run in group.runs)
    typer.echo(f"wrote {out}: {len(made)} figures of {sum(len(group.runs) for group in groups)} runs")
    if folder is not None:
        typer.echo(f"wrote {len(paths)} files to {folder}")
