"""Asking clients until enough have answered: letters go again, deadlines pass, nobody is waited for in vain."""

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Protocol

from sparing.core.errors import FederationError
from sparing.net.audit import AuditLog
from sparing.runs.study import NetworkSection

LONGEST_PAUSE = 3600.0
CARRIER_PAUSE = 1.0


class Clock:
    """The time, in seconds, and a way to let some pass."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Post(Protocol):
    """Carries letters to clients and their answers back."""

    def exchange(
        self, letters: Iterator[tuple[int, bytes]], seconds: float, most: Callable[[int], int]
    ) -> Generator[tuple[int, bytes], None, None]:
        """Answers as they come, until everybody has answered, this time is over, or the carrier has broken down;
        `most` bytes of each at most.

        From whom an answer is, the carrier knows; what the answer itself says is not asked.
        """
        ...


class Question(Protocol):
    """Something that some clients are asked."""

    def missing(self) -> list[int]:
        """Who has not answered yet."""
        ...

    def letters(self, clients: list[int]) -> Iterator[tuple[int, bytes]]: ...

    def most(self, who: int) -> int:
        """Bytes of an answer worth reading."""
        ...

    def take(self, who: int, data: bytes) -> bool:
        """Count an answer, or write down why not. True: this client needs everything first."""
        ...

    def greet(self, clients: list[int], seconds: float) -> None:
        """Tell these clients everything."""
        ...

    def is_answered(self) -> bool:
        """By everybody who is waited for."""
        ...

    def suffices(self) -> bool:
        """Whether it may end at a deadline."""
        ...

    def too_few(self) -> str:
        """What is said when all deadlines have passed."""
        ...


class Waiting:
    """How long clients are waited for, and who carries letters meanwhile."""

    def __init__(self, post: Post, section: NetworkSection, audit: AuditLog, clock: Clock):
        self.post, self.section, self.audit, self.clock = post, section, audit, clock

    def ask(self, question: Question) -> None:
        """Until it is answered, a deadline has passed and what came suffices, or deadlines have passed too often."""
        section, clock, began, tries = self.section, self.clock, self.clock.now(), 0
        pause = section.resend
        while not question.is_answered():
            left = math.inf
            if section.deadline is not None:
                left = began + (tries + 1) * section.deadline - clock.now()
                if left <= 0 and question.suffices():
                    return
                if left <= 0 and tries >= section.retries:
                    raise FederationError(question.too_few())
                if left <= 0:
                    tries, pause = tries + 1, section.resend
                    continue
            pause, again = min(pause, left), clock.now() + min(pause, left)
            refused = self.audit.refusals
            self.ask_once(question, pause)
            rest = again - clock.now()
            if not question.is_answered() and rest > 0:  # who refused is not asked at once; a carrier comes back
                clock.sleep(rest if self.audit.refusals > refused else min(rest, CARRIER_PAUSE))
            pause = min(2 * pause, LONGEST_PAUSE)

    def ask_once(self, question: Question, seconds: float) -> None:
        """One exchange with everybody who has not answered; who needs everything is greeted and asked once more."""
        needy = self._collect(question, question.missing(), seconds)
        if needy:
            question.greet(needy, seconds)
            self._collect(question, needy, seconds)

    def _collect(self, question: Question, clients: list[int], seconds: float) -> list[int]:
        """Count what these clients answer; gives those of them who need everything first."""
        needy: list[int] = []
        with closing(self.post.exchange(question.letters(clients), seconds, question.most)) as answers:
            for who, data in answers:
                if who in question.missing() and question.take(who, data):
                    needy.append(who)
                if question.is_answered():
                    return []
        return needy
