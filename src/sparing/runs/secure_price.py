"""What secure aggregation costs a client of a round, beside what it sends and gets without: counted, nothing is masked.

The words of a sum have as many bits as the largest sum needs, so they depend on the cohort and its weights.
"""

import math
from typing import NamedTuple

from sparing.core.context import Ctx
from sparing.core.method import Method
from sparing.core.round import Server, outgoing
from sparing.secure.sum_terms import RUN_BYTES, SumTerms
from sparing.secure_round.planned_sum import plan_sum
from sparing.secure_round.settings import SecureSettings
from sparing.secure_round.sum_layout import sum_layout
from sparing.secure_round.sum_notice import notice_bytes


class SecurePrice(NamedTuple):
    """Bytes of one client in a round from which nobody drops out."""

    cohort: int
    bits: int  # of a word
    words: int  # of a client's vector
    up_values: int  # the masked vector, in place of a parcel
    up_keys: int
    up_shares: int
    up_unmask: int
    down_keys: int  # beside the download
    down_shares: int
    down_unmask: int
    honest: int  # clients that are in every sum, at least
    neighbours: int  # of each client
    lost: int  # clients that may drop out; with more, the round counts for nobody
    lost_near: int  # of one client's neighbours
    futile: float = 0.0  # share of rounds that count for nobody, where clients drop out; beyond all pairs, at least

    @property
    def up(self) -> int:
        return self.up_values + self.up_keys + self.up_shares + self.up_unmask

    @property
    def down(self) -> int:
        return self.down_keys + self.down_shares + self.down_unmask

    @property
    def all_pairs(self) -> bool:
        return self.neighbours == self.cohort - 1


def secure_price(
    method: Method, server: Server, settings: SecureSettings, cohort: Ctx, dropout: float = 0.0
) -> SecurePrice:
    """`dropout`: how likely a client is to drop out before its upload."""
    total, first = method.blend.weigh.most(cohort), cohort.at(slice(0, 1))
    layout = sum_layout(method, outgoing(method, server, first), total, first)
    ids = cohort.ids.tolist()
    terms = settings.terms(bytes(RUN_BYTES), cohort.round, 1, ids, layout.size, layout.bits)
    plan = plan_sum(terms, notice_bytes(len(ids), len(layout.leaves)), ids, [])
    up, down = ({kind: int(x[0]) for kind, x in sizes.items()} for sizes in (plan.up(ids[:1]), plan.down(ids[:1])))
    return SecurePrice(
        cohort=len(ids),
        bits=layout.bits,
        words=layout.size,
        up_values=up["value"] + up["header"],
        up_keys=up["keys"],
        up_shares=up["shares"],
        up_unmask=up["unmask"],
        down_keys=down["keys"],
        down_shares=down["shares"],
        down_unmask=down["unmask"],
        honest=settings.honest(len(ids)),
        neighbours=terms.degree,
        lost=_most_lost(terms),
        lost_near=terms.degree - terms.threshold,
        futile=_chance_of_more(len(ids), _most_lost(terms), dropout),
    )


def _chance_of_more(clients: int, lost: int, dropout: float) -> float:
    """That more than so many of all clients drop out.

    >>> round(_chance_of_more(10, 2, 0.3), 3)
    0.617
    """
    chances = (math.comb(clients, k) * dropout**k * (1 - dropout) ** (clients - k) for k in range(lost + 1))
    return max(0.0, 1.0 - math.fsum(chances))


def _most_lost(terms: SumTerms) -> int:
    """Nobody holds shares of its own secrets: with all pairs, one client more than the threshold must be there."""
    needed = max(terms.least, terms.threshold + 1) if terms.all_pairs else terms.least
    return len(terms.cohort) - needed
