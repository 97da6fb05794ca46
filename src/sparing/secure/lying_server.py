"""Whose sum a lying server can get at worst, by sending different lists to different nodes.

Of n clients in all pairs, c collude with it, and t shares rebuild a secret. Say it gets the sum of V honest clients.
Whoever they masked towards is in V, colludes, or is one of D whose fresh keys were rebuilt. So each of D was called a
survivor by at most n - 1 - t of the honest others. But each honest node wants `least` survivors in its list, and where
V, those who collude and the L others are fewer, the rest of them are of D:

    D (n - 1 - t)  >=  V max(0, least - V - c) + L max(0, least - V - L - c) + D max(0, least - V - L - c - 1)
"""

from sparing.secure.sum_terms import SumTerms


def fewest_summed(terms: SumTerms, colluding: int = 0) -> int:
    """Honest clients whose values are in any sum that a lying server can unmask, at least. For all pairs only.

    >>> from sparing.secure.sum_terms import make_sum_terms
    >>> [fewest_summed(make_sum_terms(bytes(16), 1, 1, range(30), 1, 16, least=least)) for least in (20, 25, 30)]
    [13, 23, 30]
    """
    honest = len(terms.cohort) - colluding
    return next(
        summed
        for summed in range(1, honest + 1)
        if any(_votes_suffice(terms, colluding, summed, dropped) for dropped in range(honest - summed + 1))
    )


def _votes_suffice(terms: SumTerms, colluding: int, summed: int, dropped: int) -> bool:
    n, least = len(terms.cohort), terms.least
    others = n - colluding - summed - dropped
    if summed + dropped + colluding < least:
        return False
    lacking = least - summed - others - colluding
    called = summed * max(0, least - summed - colluding)
    called += others * max(0, lacking) + dropped * max(0, lacking - 1)
    return dropped * (n - 1 - terms.threshold) >= called
