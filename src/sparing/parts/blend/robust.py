"""Blends that a minority of attackers cannot steer. Each needs everyone at once, and sees them in id order.

Where clients vote on different coordinates, every rule looks at those who voted: a median or mean is over the voters of
a coordinate, a distance is over the coordinates that both voted on, scaled up to all of them. Distances are over all
floating tensors that are shared, buffers too: an attacker may use those as well.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from sparing.core.errors import ConfigError, check_range
from sparing.core.fold import mean_of_voters
from sparing.core.method import Collector
from sparing.core.reduce import total
from sparing.core.tree import Models, Tree, flat


def coordinate_median(values: Models, votes: Models, weight: Tensor) -> tuple[Tree, Tree]:
    """Of every coordinate, over those who voted on it; the mean of the middle two where they are even."""
    update, covered = {}, {}
    for name in values:
        ranked, count = _ordered_values(values[name], votes[name])
        low = ranked.gather(0, (count - 1).clamp(min=0) // 2)
        high = ranked.gather(0, (count // 2).clamp(max=len(ranked) - 1))
        covered[name] = count > 0
        update[name] = torch.where(covered[name], (low + high) / 2, 0.0)
    return update, covered


def trimmed_mean_rule(share: float) -> Collector:
    """Of every coordinate, without floor(share c) of its c voters at each end."""
    check_share("trimmed-mean.share", share)

    def rule(values: Models, votes: Models, weight: Tensor) -> tuple[Tree, Tree]:
        update, covered = {}, {}
        cuts = torch.tensor([_floor_share(share, c) for c in range(len(weight) + 1)], device=weight.device)
        for name in values:
            ranked, count = _ordered_values(values[name], votes[name])
            cut = cuts[count]
            kept = torch.zeros_like(ranked[:1])
            for i in range(len(ranked)):
                kept += torch.where((i >= cut) & (i < count - cut), ranked[i : i + 1], 0.0)
            covered[name] = count > 0
            update[name] = kept / (count - 2 * cut).clamp(min=1)
        return update, covered

    return rule


def krum_rule(share: float, m: int | Literal["most"]) -> Collector:
    """The mean of the m clients with the lowest score: the sum of the n - f - 2 smallest squared distances to others.

    f = floor(share n), or the most that n > 2f + 2 allows; "most": m = n - f - 2. Ties go to the lowest id.
    """
    check_share("krum.share", share)
    if m != "most" and m < 1:
        raise ConfigError(f'krum.m is {m}; it must be 1 or more, or "most" for n - f - 2')

    def rule(values: Models, votes: Models, weight: Tensor) -> tuple[Tree, Tree]:
        n = len(weight)
        f = min(_floor_share(share, n), max((n - 3) // 2, 0))
        near = max(n - f - 2, 1)
        score = total(_distances_apart(values, votes, weight).sort(dim=1).values[:, :near])
        chosen = torch.zeros_like(weight)
        chosen[score.argsort(stable=True)[: near if m == "most" else m]] = 1.0
        return mean_of_voters(values, votes, chosen)

    return rule


def geometric_median_rule(nu: float, steps: int) -> Collector:
    """The point of least weighted distance to all, by the smoothed Weiszfeld iteration from the weighted mean."""
    check_range("geomed.nu", nu, 0, float("inf"), open_low=True)
    check_range("geomed.steps", steps, 1, float("inf"))

    def rule(values: Models, votes: Models, weight: Tensor) -> tuple[Tree, Tree]:
        centre, covered = mean_of_voters(values, votes, weight)
        voted = torch.zeros_like(weight)
        for name in _float_names(values):
            voted += flat(votes[name]).sum(dim=1)
        for _ in range(steps):
            square = torch.zeros_like(weight)
            for name in _float_names(values):
                away = torch.where(votes[name], values[name].double() - centre[name], 0.0)
                square += total(away.square())
            distance = _scaled_distances(square, voted, _voted_places(values, votes)).sqrt()
            centre, _ = mean_of_voters(values, votes, weight / distance.clamp(min=nu))
        return centre, covered

    return rule


def _ordered_values(x: Tensor, votes: Tensor) -> tuple[Tensor, Tensor]:
    """Every coordinate's values in ascending order, voters first, and how many they are, `[1, *shape]`."""
    ranked = torch.where(votes, x.double(), torch.inf).sort(dim=0, stable=True).values
    return ranked, votes.sum(dim=0, keepdim=True)


def _distances_apart(values: Models, votes: Models, weight: Tensor) -> Tensor:
    """Squared distances between clients, `[n, n]`; infinite to themselves and where they have nothing in common."""
    n = len(weight)
    square, common = weight.new_zeros(n, n), weight.new_zeros(n, n)
    for name in _float_names(values):
        x, voted = flat(values[name]).double(), flat(votes[name])
        for i in range(n - 1):
            both = voted[i + 1 :] & voted[i]
            square[i, i + 1 :] += total(torch.where(both, x[i + 1 :] - x[i], 0.0).square())
            common[i, i + 1 :] += both.sum(dim=1)
    return _scaled_distances(square + square.T, common + common.T, _voted_places(values, votes))


def _scaled_distances(square: Tensor, count: Tensor, places: int) -> Tensor:
    """Squared distances over so many coordinates, as if they were over all places; infinite where there were none."""
    return torch.where(count > 0, square * (places / count.clamp(min=1).double()), torch.inf)


def _voted_places(values: Models, votes: Models) -> int:
    """Coordinates that somebody voted on."""
    return sum(int(votes[name].any(dim=0).sum()) for name in _float_names(values))


def _float_names(values: Models) -> list[str]:
    return [name for name in sorted(values) if values[name].is_floating_point()]


def _floor_share(share: float, n: int) -> int:
    """floor(share n), where a product such as 0.29 * 100 means 29."""
    return math.floor(share * n + 1e-9)


def check_share(what: str, share: float) -> None:
    if not 0 <= share < 0.5:
        raise ConfigError(f"{what} is {share}; it must be 0 or more and below 0.5: honest clients are the majority")
