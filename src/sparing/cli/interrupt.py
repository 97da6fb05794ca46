"""Ctrl-C: the first stops a command in order, a second one ends the process at once.

Stopping in order waits for the clients under way, which may take long. Ending at once is what a power cut would do, so
a run goes on from its last checkpoint either way.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from sparing.cli.commands.shared import complain

_EXIT_CODE = 130
_SHOW_CURSOR = "\x1b[?25h"


class _Interrupt:
    """What the process does about Ctrl-C, once it listens."""

    def __init__(self) -> None:
        self.listening = False
        self.asked = False  # to stop
        self.advice: Callable[[], str] = str  # how to go on
        self.also: Callable[[], None] = lambda: None  # what else is done once the user has been told

    def listen(self) -> None:
        """Unless whoever started the process told it to ignore Ctrl-C."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self.listening = True
            signal.signal(signal.SIGINT, self.first)

    def first(self, *_: Any) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, self.second)
        raise KeyboardInterrupt

    def stop_if_asked(self, *_: Any) -> None:
        """Between rounds: the exception is lost where it meets a finaliser, or C code that looks for a name."""
        if self.asked:
            raise KeyboardInterrupt

    def second(self, *_: Any) -> None:
        """Nothing is cleaned up: threads may be at work that cannot be stopped."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:  # whatever the state of the process, it ends
            if sys.stdout.isatty():
                sys.stdout.write(_SHOW_CURSOR)
            sys.stdout.flush()
            complain("; ".join(filter(None, ("stopped at once", self.advice()))))
        finally:
            os._exit(_EXIT_CODE)

    @contextmanager
    def advising(self, advice: Callable[[], str]) -> Iterator[None]:
        """Whoever stops the command meanwhile is told how to go on."""
        self.advice = advice
        try:
            yield
        except KeyboardInterrupt:
            raise self.stopped() from None
        finally:
            self.advice = str

    def stopped(self) -> typer.Exit:
        """Says so, in the one line there is; what is left of the process cannot be interrupted any more."""
        words = "; ".join(filter(None, ("stopped", self.advice())))
        if self.listening:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        complain(words)
        self.also()
        return typer.Exit(_EXIT_CODE)


INTERRUPT = _Interrupt()
