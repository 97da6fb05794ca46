"""log.txt of a run folder: what the run said, a line each. It only grows; a resumed run goes on in the same file.

Every round has a line. Warnings are there, and what the logger `sparing` lets through: its debug lines too, where
somebody asked for them (`-v`).
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from sparing.core.errors import SparingError
from sparing.runs.results import Record
from sparing.storage.atomic import os_errors_as_checkpoint_error

_LOGGER = logging.getLogger("sparing")


@contextmanager
def log_to_file(path: Path, opening: str) -> Iterator[Callable[[str], None]]:
    """Takes lines; whatever is said meanwhile is written to `path` too, as long as there is room for it."""
    with _open_forgiving(path) as file:
        handler, shown = logging.StreamHandler(file), warnings.showwarning
        handler.handleError = lambda record: None  # a full disk: the next table that grows says so
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))

        def say(text: str) -> None:
            handler.handle(logging.makeLogRecord({"msg": " ".join(text.split())}))

        def show(message: Warning | str, *where: Any) -> None:
            say(f"warning: {message}")
            shown(message, *where)

        _LOGGER.addHandler(handler)
        warnings.showwarning = show
        say(opening)
        try:
            yield say
            say("finished")
        except BaseException as error:
            say(f"stopped: {error}" if isinstance(error, SparingError) else f"stopped: {type(error).__name__}")
            raise
        finally:
            _LOGGER.removeHandler(handler)
            warnings.showwarning = shown


@contextmanager
def _open_forgiving(path: Path) -> Iterator[IO[str]]:
    """A file to append to; what it could not take is dropped when it is closed."""
    with os_errors_as_checkpoint_error(path):
        file = open(path, "a", encoding="utf-8")  # noqa: SIM115
    try:
        yield file
    finally:
        with suppress(OSError):
            file.close()


def round_line(record: Record) -> str:
    """A round in one line; what was not measured is left out."""
    shares = {"accuracy": record.accuracy, "personal": record.personal_accuracy, "train_loss": record.train_loss}
    measured = "".join(f" {name}={value:.4f}" for name, value in shares.items() if value == value)
    sent = f" clients={record.clients} up={record.up_bytes} down={record.down_bytes}"
    return f"round {record.round}{measured}{sent} seconds={record.seconds:.2f}"
