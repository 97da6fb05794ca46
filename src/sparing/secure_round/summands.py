"""A client's vector of a round, and what the server makes of the sum of all of them."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import SecureError
from sparing.core.fold import Fold, terms_on_grid
from sparing.core.grid import GRID_STEP, WEIGHT_GRID, Grid
from sparing.core.method import Arrival, Method
from sparing.core.parcel import Parcel
from sparing.core.round import decoded_arrival, voting_masks, weighed_arrival
from sparing.core.tree import Tree
from sparing.parts.code.common_steps import steps_in
from sparing.secure.masks import word_type
from sparing.secure_round.fixed_point import (
    mean_of_sum,
    mean_over_samples,
    sample_weighed,
    weighed_fixed,
    weighed_mean,
    whole_of_sum,
    whole_share,
)
from sparing.secure_round.sum_layout import (
    LOSS,
    WEIGHT,
    SumLayout,
    join_codes,
    join_number,
    join_terms,
    split_codes,
    split_number,
    split_terms,
    weight_unit,
)


class RoundSum(NamedTuple):
    """What both ends know of a round's sum."""

    layout: SumLayout
    grid: Grid
    total: float  # what the cohort's weights add up to at most

    def steps(self, method: Method, sent: Parcel) -> dict[str, float]:
        """One step of each tensor's integers in its sum."""
        coded, unit = steps_in(sent.notes, method.layout), weight_unit(method, self.total)
        return {
            leaf.name: coded[leaf.name] * unit if leaf.coded else float(self.grid.limit(leaf.name)) * GRID_STEP
            for leaf in self.layout.leaves
        }


def client_vector(method: Method, sums: RoundSum, got: Parcel, up: Parcel, ctx: Ctx) -> np.ndarray:
    """What one client (K = 1) adds, having got this and written that."""
    model = {name: leaf.value for name, leaf in got.leaves.items()}
    loss = float(up.notes[LOSS][0])
    arrival, weight_K, seen = weighed_arrival(method, {}, decoded_arrival(method, model, got, up, ctx))
    share_K, layout = sums.grid.shares(weight_K, ctx).cpu(), sums.layout
    sums.grid.require_within(arrival.update, ctx)
    steps, parts = sums.steps(method, got), list[np.ndarray]()
    for leaf in layout.leaves:
        terms = terms_on_grid(arrival.update[leaf.name].cpu(), share_K, sums.grid.limit(leaf.name).cpu())[0]
        whole = (terms if leaf.mask is None else terms[leaf.mask]).flatten() / steps[leaf.name]
        values = _as_integers(whole, leaf.name)
        parts.append(split_codes(values, layout.codes) if leaf.coded else split_terms(values, layout))
    share = float(share_K[0])
    said = {LOSS: [sample_weighed(int(ctx.n[0]), loss, LOSS)], WEIGHT: [weighed_fixed(share, 1.0, WEIGHT)]}
    said |= {name: [weighed_fixed(share, x, name) for x in row.reshape(-1).tolist()] for name, row in seen.items()}
    for name, count in layout.numbers:
        numbers = said[name]
        if len(numbers) != count:
            raise SecureError(f"{name!r} is {len(numbers)} numbers of a client, where {count} are declared")
        parts.append(np.array([split_number(x, layout) for x in numbers], np.uint64).T)
    vector = np.concatenate([part.reshape(-1) for part in parts])
    return (vector & np.uint64((1 << layout.bits) - 1)).astype(word_type(layout.bits))


def fold_sum(method: Method, sums: RoundSum, fold: Fold, words: np.ndarray, sent: Parcel, ctx: Ctx) -> float:
    """Fold in the sum over these clients, to all of whom the same part of the model was sent; gives their mean loss."""
    layout, steps, device = sums.layout, sums.steps(method, sent), ctx.device
    pieces, tensors = layout.pieces(words), dict[str, Tensor]()
    for leaf in layout.leaves:
        piece = next(pieces)
        whole = join_codes(piece[0], leaf.size, layout) if leaf.coded else join_terms(piece, layout)
        _refuse_beyond(whole, leaf.name, float(sums.grid.limit(leaf.name)) / steps[leaf.name], len(ctx.ids))
        values = torch.from_numpy(whole.astype(np.float64)) * steps[leaf.name]
        full = torch.zeros(leaf.shape, dtype=torch.float64)
        full[... if leaf.mask is None else leaf.mask] = values.view(leaf.shape) if leaf.mask is None else values
        tensors[leaf.name] = full[None].to(device)
    found = {
        name: [join_number([int(word) for word in column], layout) for column in piece.T]
        for (name, _), piece in zip(layout.numbers, pieces, strict=True)
    }
    shares = known_shares(method, sums.grid, ctx)
    whole = sum(map(whole_share, shares)) if shares else whole_of_sum(found[WEIGHT][0])
    _refuse_other_weights(whole, sums, len(ctx.ids))
    asked = {name: some for name, some in found.items() if name not in (LOSS, WEIGHT)}
    means = {name: [mean_of_sum(x, whole) for x in some] for name, some in asked.items()}
    share_K, seen = pooled_rows(shares, whole, means, ctx)
    total = torch.tensor(whole * WEIGHT_GRID, dtype=torch.float64)
    fold.add_sum(tensors, voting_masks(method, sent, ctx.at(slice(0, 1))), share_K, total, seen, ctx)
    return mean_over_samples(found[LOSS][0], int(ctx.n.sum()))


def known_shares(method: Method, grid: Grid, ctx: Ctx) -> list[float]:
    """The weights of these clients, where they are known without a look at their updates; else nothing."""
    weigh = method.blend.weigh
    if weigh.looks:
        return []
    return grid.shares(weigh.of({}, Arrival({}, {}, {}, {}, ctx))[0], ctx).tolist()


def pooled_rows(shares: list[float], whole: int, means: dict[str, list[float]], ctx: Ctx) -> tuple[Tensor, Tree]:
    """Weights `[n]` and what was seen, `[n, numbers]`, of n clients of whom sums alone are known: the same of each."""
    n = len(ctx.ids)
    equal = [whole * WEIGHT_GRID / n] * n
    rows = {name: torch.tensor([x], dtype=torch.float64).expand(n, -1) for name, x in means.items()}
    return torch.tensor(shares or equal, dtype=torch.float64), {name: ctx.placed(x) for name, x in rows.items()}


def pool_fold(method: Method, fold: Fold, ctx: Ctx) -> None:
    """Make of a fold of single arrivals what it would be had only their sums been known."""
    blend, roster = method.blend, fold.roster
    if not blend.weigh.looks and blend.weigh.pooled is None and all(step.pooled is None for step in blend.steps):
        return
    shares = [x for share_K, _ in roster.parts for x in share_K.tolist()]
    means = {
        name: [
            weighed_mean(shares, [row[i] for _, seen in roster.parts for row in _as_rows(seen[name])], name)
            for i in range(len(_as_rows(first)[0]))
        ]
        for name, first in roster.parts[0][1].items()
    }
    whole = sum(map(whole_share, shares))
    here = ctx.at(torch.tensor([ctx.ids.tolist().index(i) for i in roster.ids]))
    roster.parts = [pooled_rows([] if blend.weigh.looks else shares, whole, means, here)]


def pooled_loss(losses: dict[int, float], ctx: Ctx) -> float:
    """The mean loss over the samples of these clients, from each one's."""
    total = sum(sample_weighed(n, losses[who], LOSS) for who, n in zip(ctx.ids.tolist(), ctx.n.tolist(), strict=True))
    return mean_over_samples(total, int(ctx.n.sum()))


def write_vector(vector: np.ndarray) -> bytes:
    """For a client's own disk."""
    return bytes([vector.itemsize]) + vector.tobytes()


def read_vector(data: bytes) -> np.ndarray:
    return np.frombuffer(data, f"<u{data[0]}", offset=1)


def _as_rows(seen: Tensor) -> list[list[float]]:
    return seen.reshape(len(seen), -1).double().tolist()


def _as_integers(whole: Tensor, name: str) -> np.ndarray:
    if not torch.equal(whole, whole.round()):
        raise SecureError(f"terms of {name!r} lie beside the grid of their sum; this is a bug, please report it")
    return whole.to(torch.int64).numpy()


def _refuse_other_weights(whole: int, sums: RoundSum, clients: int) -> None:
    """Weights that clients compute themselves add up to no more than was said, and to no less than nothing."""
    most = whole_share(sums.total / sums.grid.scale)
    if not 0 <= whole <= most + clients:
        raise SecureError(
            f"the weights of a sum add up to {whole / most:.3g} times the most that honest clients can come to: one of "
            "them lied, and nobody can tell which"
        )


def _refuse_beyond(whole: np.ndarray, name: str, most: float, clients: int) -> None:
    """No sum of honest clients is larger than the largest update of one."""
    largest = int(np.abs(whole).max(initial=0))
    if largest > most + clients:
        raise SecureError(
            f"the sum of {name!r} is {largest / most:.3g} times the most that honest clients can come to: one of them "
            "lied, and nobody can tell which"
        )
