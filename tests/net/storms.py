"""A carrier that loses, doubles, reorders and delays letters, and in which either side may die at any moment."""

import random
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from net.federation import Federated
from sparing.runs.files import checkpoint


class ServerDied(BaseException):
    pass


class NodeDied(BaseException):
    pass


class Storm:
    """Also a Post. `chance` of each mishap, drawn from a seed."""

    def __init__(self, federated: Federated, seed: int, chance: float = 0.08):
        self.federated, self.dice, self.chance = federated, random.Random(seed), chance
        self.late: list[tuple[int, bytes]] = []  # answers still under way
        self.happened = dict.fromkeys(("server", "node", "lost", "double", "stale"), 0)

    def happens(self, what: str, factor: float = 1.0) -> bool:
        if self.dice.random() >= factor * self.chance:
            return False
        self.happened[what] += 1
        return True

    def exchange(
        self, letters: Iterator[tuple[int, bytes]], seconds: float, most: Callable[[int], int]
    ) -> Generator[tuple[int, bytes], None, None]:
        some = list(letters)
        self.dice.shuffle(some)
        answers, self.late = self.late, []
        for who, data in some:
            for _ in range(2 if self.happens("double") else 1):
                if self.happens("lost"):
                    continue
                answer = self.deliver(who, data)
                if answer is None or self.happens("lost"):
                    continue
                if self.happens("stale"):
                    self.late.append((who, answer))
                else:
                    answers.append((who, answer))
        self.dice.shuffle(answers)
        for answer in answers:
            if self.happens("server", 0.3):
                raise ServerDied
            yield answer

    def deliver(self, who: int, data: bytes) -> bytes | None:
        try:
            return self.federated.nodes[who].handle(data)
        except NodeDied:
            self.federated.start_node(who)
            return None

    @contextmanager
    def over_files(self) -> Iterator[None]:
        """Deaths before and after a checkpoint or a node's file is in its place."""
        plain = checkpoint.replace_file

        @contextmanager
        def deadly(path: Any) -> Iterator[Any]:
            ours = any(name in str(path) for name in ("checkpoint", "secure-sum"))
            what, death = ("server", ServerDied) if ours else ("node", NodeDied)
            with plain(path) as file:
                yield file
                if self.happens(what):
                    raise death
            if self.happens(what):
                raise death

        checkpoint.replace_file = deadly
        try:
            yield
        finally:
            checkpoint.replace_file = plain


def play(storm: Storm, most: int = 400) -> Any:
    """Until the run has ended, however often it must be begun or resumed."""
    federated, out = storm.federated, storm.federated.folder / "run"
    with storm.over_files():
        for _ in range(most):
            try:
                begun = (out / "config.yaml").exists()
                return federated.resume(storm) if begun else federated.run(storm)
            except ServerDied:
                continue
    raise AssertionError("the run never ended")
