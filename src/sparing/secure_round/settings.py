"""What a study says of secure aggregation, and the terms of a round's sum that follow."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from sparing.core.errors import ConfigError, SecureError
from sparing.core.method import Summed
from sparing.secure.lying_server import fewest_summed
from sparing.secure.node_rules import NodePolicy
from sparing.secure.sum_terms import ABOUT_BYTES, FEWEST_CLIENTS, RUN_BYTES, SumTerms, make_sum_terms


class SecureSettings(NamedTuple):
    """The section `secure` of a study."""

    clients: int = FEWEST_CLIENTS  # honest ones in any sum, at least
    colluding: int = 0  # clients that may tell the server all they know
    least: float | int | None = None  # uploads below which nothing is unmasked: a count, or a share of the cohort
    degree: int | None = None  # neighbours of each client; None: all others up to 50 clients, beyond that 20

    @property
    def policy(self) -> NodePolicy:
        """What a node with these settings insists on."""
        usual = NodePolicy()
        return NodePolicy(self.clients, self.colluding, usual.degree if self.degree is None else self.degree)

    @property
    def summed(self) -> Summed:
        """What the parts of a method must know."""
        return Summed(self.honest)

    def honest(self, cohort: int) -> int:
        """How many honest clients, of a cohort of this size, are in every sum at least."""
        terms = self.terms(bytes(RUN_BYTES), 1, 1, range(cohort), size=1, bits=8)
        honest = terms.least - self.colluding
        if terms.all_pairs:
            honest = min(honest, fewest_summed(cohort, terms.threshold, terms.least, self.colluding))
        return honest

    def terms(
        self,
        run: bytes,
        t: int,
        attempt: int,
        cohort: Iterable[int],
        size: int,
        bits: int,
        about: bytes = bytes(ABOUT_BYTES),
    ) -> SumTerms:
        cohort = tuple(cohort)
        least = self.least
        if isinstance(least, float):
            least = math.ceil(least * len(cohort) - 1e-9)
        return make_sum_terms(
            run, t, attempt, cohort, size, bits,
            degree=self.degree, least=least, clients=self.clients, colluding=self.colluding, about=about,
        )  # fmt: skip

    def check(self, cohort: int) -> None:
        """Refuse cohorts of this size that no sum can be of."""
        if why := self.why_too_few(cohort):
            raise ConfigError(f"{why}; raise sample, or change secure")

    def why_too_few(self, cohort: int) -> str:
        """Why no sum can be of so many clients; empty: one can."""
        try:
            honest = self.honest(cohort)
        except SecureError as error:
            return f"secure, with {cohort} clients a round: {error}"
        if honest >= self.clients:
            return ""
        return (
            f"secure, with {cohort} clients a round: {honest} honest ones might be all that a sum is of, where "
            f"secure.clients wants {self.clients}"
        )
