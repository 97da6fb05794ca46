"""What several commands share."""

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from sparing.cli import completion
from sparing.core.errors import ConfigError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
StudyItems = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="STUDY.yaml|key=value",
        help="A study file, and overrides of its keys.",
        autocompletion=completion.complete_study_items,
    ),
]


Trust = Annotated[bool, typer.Option("--trust", help="Trust the code that the study names, and run it.")]


def parse_shape(text: str) -> tuple[int, ...]:
    """As --shape says it."""
    sides = text.lower().replace(",", "x").split("x")
    if not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise ConfigError(f"--shape is {text!r}; write it as 3x32x32")
    return tuple(int(side) for side in sides)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def mention_secrets(folders: Iterable[Path]) -> None:
    """Whoever has the secret of a run can take its noise off, so whatever leaves a folder leaves it behind."""
    from sparing.runs.privacy.secret import SECRET_FILE as SECRET

    for folder in folders:
        if (folder / SECRET).exists():
            complain(f"note: {folder / SECRET} is left out; whoever has it can remove the noise of this run")


def complain(text: str) -> None:
    """A line on stderr; what would steer a terminal is shown instead of done."""
    plain = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    typer.echo(f"sparing: {plain}", err=True)


def _turn_on_debug_lines(wanted: bool) -> None:
    """Debug lines on stderr from now on."""
    if not wanted:
        return
    log, handler = logging.getLogger("sparing"), logging.Handler()
    handler.emit = lambda record: typer.echo(record.getMessage(), err=True)
    handler.name = "chatter"
    log.handlers = [known for known in log.handlers if known.name != handler.name] + [handler]
    log.setLevel(logging.DEBUG)


Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", callback=_turn_on_debug_lines, help="Print debug messages to stderr.")
]
