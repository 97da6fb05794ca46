"""The command line as one of several ranks, started by torchrun or srun: the first rank talks, and all end together.

Whatever ends one rank ends the others, and the user is told once: by the first rank, or where that one is gone, by the
next.
"""

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparing.cli.commands.shared import complain
from sparing.cli.interrupt import INTERRUPT
from sparing.core.errors import ConfigError
from sparing.ranks.rank_place import RankPlace, rank_place

if TYPE_CHECKING:
    from sparing.ranks.meeting import Meeting

_TOGETHER = ("run", "resume", "sweep")
"""Commands that several ranks may play."""
_FAILED, _STOPPED = 2, 130
_STOPPED_WORDS = "stopped"
_TELLING = threading.Lock()


def meet_other_ranks() -> None:
    """Where this process is one of several, meet the others before anything else."""
    try:
        place = rank_place(os.environ)
        if place is None:
            return
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # of torch, which reports every lost connection at length
        if len(sys.argv) > 1 and sys.argv[1] not in _TOGETHER and not sys.argv[1].startswith("-"):
            if place.rank:
                raise SystemExit(_FAILED)
            said = f"`sparing {sys.argv[1]}` is one process, and here are {place.world} ranks"
            raise ConfigError(f"{said}; start it alone")
        meeting = _meet(place)
    except ConfigError as error:
        complain(str(error))
        raise SystemExit(_FAILED) from None
    INTERRUPT.also = stop_ranks
    if place.rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank answers Ctrl-C for all
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    signal.signal(signal.SIGTERM, lambda *_: _end_process(place, meeting.why_lost()))
    meeting.watch(lambda words: _end_process(place, words))


def _meet(place: RankPlace) -> "Meeting":
    from sparing.runs.rank_runs import process_meeting

    meeting = process_meeting()
    assert meeting is not None, place
    return meeting


def meeting_for_sweep(jobs: int | None) -> "Meeting | None":
    """Where ranks are the workers of a sweep; None: this process is alone."""
    if (place := rank_place(os.environ)) is None:
        return None
    if jobs is not None:
        raise ConfigError(f"--jobs is {jobs}, but here are {place.world} ranks, each of which does one run; drop it")
    return _meet(place)


def end_rank(words: str) -> None:
    """Say why this process ends; where it is one of several, once for all of them."""
    place = rank_place(os.environ)
    if place is None:
        complain(words)
        return
    meeting = _meet(place)
    meeting.say_last_words(words)
    _end_process(place, words if place.rank == 0 else meeting.last_words() or words)


def stop_ranks() -> None:
    """Ctrl-C: the first rank has said how to go on."""
    if (place := rank_place(os.environ)) is not None:
        _meet(place).say_last_words(_STOPPED_WORDS)
        _end_process(place, _STOPPED_WORDS)


def leave_ranks() -> None:
    """This process has done its part."""
    if (place := rank_place(os.environ)) is not None:
        _meet(place).leave()


def _tell_torchrun(words: str) -> None:
    """In the file that torchrun quotes in its own report, if it has named one."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"py_callstack": words, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": words, "extraInfo": about}}))


def _end_process(place: RankPlace, words: str) -> Any:
    """At once, whatever it is doing: what it has saved is whole."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):  # whose answer would wait here for this one
            signal.signal(number, signal.SIG_IGN)
    with _TELLING:
        gone = f"rank {place.rank - 1} has died" in words and place.rank == 1
        if words != _STOPPED_WORDS and (place.rank == 0 or gone):
            complain(words)
            _tell_torchrun(words)
        sys.stdout.flush()
        _meet(place).leave()
        os._exit(_STOPPED if words == _STOPPED_WORDS else _FAILED)
