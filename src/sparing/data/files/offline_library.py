"""The library transformers, without a network and without a word."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sparing.core.errors import SparingError

_SWITCH = "HF_HUB_OFFLINE"


@contextmanager
def offline_transformers(who: str, error: type[SparingError]) -> Iterator[Any]:
    """The library for the time being. It is imported only here: that takes seconds. `who` needs it."""
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "1"
    try:
        library, logging = _imported(who, error)
        level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield library
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()
    finally:
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before


def _imported(who: str, error: type[SparingError]) -> tuple[Any, Any]:
    try:
        return importlib.import_module("transformers"), importlib.import_module("transformers.utils.logging")
    except ImportError:
        raise error(f"{who} needs the library `transformers`: pip install 'sparing[hf]'") from None
