"""Where the ranks of a run meet before anything else, and learn that one of them is gone.

A rank that ends by an error leaves its sentence here, and the first rank says it. Each rank watches the one after it: a
heart that stops beating is a rank that died, or whose machine did.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from sparing.core.errors import ConfigError
from sparing.ranks.rank_place import RankPlace

_MEETING_TIME = timedelta(minutes=10)
_LAST_WORDS, _PRESENT, _BEAT, _LEFT = (f"sparing/{name}" for name in ("last words", "present", "beat", "left"))
_LOOK_SECONDS, _BEAT_SECONDS, _ROLL_CALL_SECONDS, _FAREWELL_SECONDS, _SILENT_SECONDS = 0.05, 1.0, 10.0, 15.0, 60.0


class Meeting:
    def __init__(self, place: RankPlace):
        self.place, self.leaving = place, False
        self.missing: list[int] = []  # ranks that are known to have died
        try:
            self.store = open_store(place)
        except RuntimeError as error:
            if "in use" in str(error):
                raise ConfigError(
                    f"port {place.port}, where the ranks would meet, is taken; choose another: torchrun --standalone, "
                    "or MASTER_PORT"
                ) from None
            raise ConfigError(
                f"rank {place.rank} cannot meet the others at {place.address}:{place.port} ({first_line(error)}); "
                f"start all {place.world} ranks, and let them reach each other"
            ) from None

    def say_last_words(self, sentence: str) -> None:
        """To the others, who are about to lose this rank; who was first to say any is heard."""
        with suppress(RuntimeError):
            if not self.store.check([_LAST_WORDS]):
                self.store.set(_LAST_WORDS, sentence)

    def last_words(self) -> str:
        with suppress(RuntimeError):
            if self.store.check([_LAST_WORDS]):
                return self.store.get(_LAST_WORDS).decode()
        return ""

    def why_lost(self) -> str:
        """What a rank said before it ended; else, which of them does not answer a call by name."""
        return self.last_words() or _died(self.absent(), self.place.world)

    def absent(self) -> list[int]:
        with suppress(RuntimeError):
            self.store.set(f"{_PRESENT}/{self.place.rank}", "yes")
            self.missing, until = list(range(self.place.world)), time.monotonic() + _ROLL_CALL_SECONDS
            while len(self.missing) > 1 and time.monotonic() < until:
                time.sleep(_LOOK_SECONDS)
                self.missing = [rank for rank in self.missing if not self.store.check([f"{_PRESENT}/{rank}"])]
            return self.missing
        return [0]  # which holds what they meet at

    def leave(self) -> None:
        """This rank is about to end. The first, which others may still ask, waits a while for them to leave too."""
        self.leaving = True
        with suppress(RuntimeError):
            left, until = self.store.add(_LEFT, 1), time.monotonic() + _FAREWELL_SECONDS
            all_of_them = self.place.world - len(self.missing)
            while self.place.rank == 0 and left < all_of_them and time.monotonic() < until:
                time.sleep(_LOOK_SECONDS)
                left = self.store.add(_LEFT, 0)

    def watch(self, end: Callable[[str], None]) -> None:
        """From now on, `end` is called with a sentence, on a thread of its own, when another rank is gone."""
        threading.Thread(target=self._watch, args=(end,), daemon=True, name="ranks").start()

    def _watch(self, end: Callable[[str], None]) -> None:
        place, after = self.place, (self.place.rank + 1) % self.place.world
        beat, heard = 0, time.monotonic()
        try:
            store = TCPStore(place.address, place.port, place.world, False, _MEETING_TIME, wait_for_workers=False)
            while not self.leaving and not store.check([_LAST_WORDS]):
                store.add(f"{_BEAT}/{place.rank}", 1)
                found = store.add(f"{_BEAT}/{after}", 0)
                if found != beat or not found:
                    beat, heard = found, time.monotonic()
                if time.monotonic() - heard > _SILENT_SECONDS:
                    self.say_last_words(_died([after], place.world))
                time.sleep(_BEAT_SECONDS)
            words = "" if self.leaving else store.get(_LAST_WORDS).decode()
        except RuntimeError:
            words = _died([0], place.world)
        if not self.leaving:
            end(words)


def open_store(place: RankPlace) -> TCPStore:
    """At the first rank, or where torchrun has started them, at its own process."""
    master = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return TCPStore(place.address, place.port, place.world, master, _MEETING_TIME, wait_for_workers=False)


def first_line(error: Exception) -> str:
    """Of what another library says, short enough to be quoted."""
    return " ".join(str(error).split("\n")[0].split())[:200]


def _died(ranks: list[int], world: int) -> str:
    who = f"rank {ranks[0]} has" if len(ranks) == 1 else "one of the ranks has"
    return f"{who} died, so this run of {world} ranks ends; go on with `sparing resume`, with any number of ranks"
