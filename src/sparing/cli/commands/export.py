"""`sparing export`: trained adapters as files that other libraries load."""

from pathlib import Path
from typing import Annotated

import typer

from sparing.cli.commands.shared import Trust
from sparing.core.errors import ConfigError


def export_command(
    folder: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    peft: Annotated[Path | None, typer.Option(help="Write the adapter to this folder, as peft loads it.")] = None,
    merged: Annotated[
        Path | None, typer.Option(help="Write the network with the adapter merged in to this folder, as safetensors.")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=1, help="As clients of this rank get it. [default: the global model]")
    ] = None,
    trust: Trust = False,
) -> None:
    """Write the adapters that a run with lora has trained, for peft or merged into their network.

    \b
    sparing export runs/digits-lora-0 --peft adapter
    sparing export runs/digits-lora-0 --peft adapter-4 --rank 4
    sparing export runs/digits-lora-0 --merged network
    """
    if peft is None and merged is None:
        raise ConfigError("export has nowhere to write; add --peft FOLDER, --merged FOLDER, or both")
    from sparing.cli.study_files import admit_code
    from sparing.cli.watched_runs import study_in_folder
    from sparing.runs.export import export
    from sparing.runs.own_code import CODE_FOLDER

    admit_code(study_in_folder(folder), trust, copies=folder / CODE_FOLDER)
    for path in export(folder, peft=peft, merged=merged, rank=rank):
        typer.echo(f"wrote {path}")
