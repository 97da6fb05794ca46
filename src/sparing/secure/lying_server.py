"""Whose sum a lying server can get at worst, by telling different nodes different things.

Of n clients in all pairs, c collude with it, and t shares rebuild a secret. Say it gets the sum of V honest clients.
Whoever they masked towards is in V, colludes, or is one of D whose fresh keys were rebuilt. So each of D was called a
survivor by at most n - 1 - t of the honest others. But each honest node wants `least` survivors in its list, and where
V, those who collude and the L others are fewer, the rest of them are of D:

    D (n - 1 - t)  >=  V max(0, least - V - c) + L max(0, least - V - L - c) + D max(0, least - V - L - c - 1)

A node that is never asked to unmask has no list, but it does not mask towards fewer than `least` with itself
(`sum_client`): then D with V and those who collude are as many, and its list would cost the server no more than the D
answers that it goes without.

Where this can be so with a small V, `least` is too low: of 50 clients with t = 33 and `least` 33, 5 who collude suffice
for the sum of two. With `least` at 40 it is of 29 or more.
"""

from functools import lru_cache


@lru_cache(maxsize=64)
def fewest_summed(clients: int, threshold: int, least: int, colluding: int = 0) -> int:
    """Honest clients whose values are in any sum that a lying server can unmask, at least. For all pairs only.

    >>> [fewest_summed(30, 20, least) for least in (20, 25, 30)]
    [13, 23, 30]
    >>> [fewest_summed(50, 33, least, colluding=5) for least in (33, 40)]
    [2, 29]
    """
    honest = clients - colluding
    return next(
        (
            summed
            for summed in range(1, honest + 1)
            if any(
                _votes_suffice(clients, threshold, least, colluding, summed, dropped)
                for dropped in range(honest - summed + 1)
            )
        ),
        0,
    )


def _votes_suffice(clients: int, threshold: int, least: int, colluding: int, summed: int, dropped: int) -> bool:
    others = clients - colluding - summed - dropped
    if summed + dropped + colluding < least:
        return False
    lacking = least - summed - others - colluding
    called = summed * max(0, least - summed - colluding)
    called += others * max(0, lacking) + dropped * max(0, lacking - 1)
    return dropped * (clients - 1 - threshold) >= called
