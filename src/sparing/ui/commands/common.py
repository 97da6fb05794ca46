"""What several commands share."""

import json
import logging
from typing import Annotated, Any

import typer

from sparing.ui import completion

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
StudyItems = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="STUDY.yaml|key=value", help="A study file, and changes to it.", autocompletion=completion.study_items
    ),
]


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def complain(text: str) -> None:
    typer.echo(f"sparing: {text}", err=True)


def chatter(wanted: bool) -> None:
    """Debug lines on stderr from now on."""
    if not wanted:
        return
    log, handler = logging.getLogger("sparing"), logging.Handler()
    handler.emit = lambda record: typer.echo(record.getMessage(), err=True)
    handler.name = "chatter"
    log.handlers = [known for known in log.handlers if known.name != handler.name] + [handler]
    log.setLevel(logging.DEBUG)


Verbose = Annotated[bool, typer.Option("-v", "--verbose", callback=chatter, help="Say more, on stderr.")]
