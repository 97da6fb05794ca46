"""Bodies of row-exact reductions and keyed draws: long rows on a CPU, kernels on a GPU."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sparing.accel.compiled.row_bodies import (
    dots_of_rows,
    kept_structures,
    largest_of_host_rows,
    peaks_of_rows,
    structure_sums,
    total_of_rows,
)
from sparing.accel.cuda import takes_kernels
from sparing.accel.lazy_product import Product, formed
from sparing.accel.rows import in_one_row
from sparing.core import gaussian, keys, reduce
from sparing.core.keys import WORD, hashes
from sparing.core.ops import constants
from sparing.core.reduce import Term, row_blocks
from sparing.core.tree import flat
from sparing.parts.code import fedscr

LONG = 1 << 18
"""Rows of so many numbers are worth a look at which of them matter, on a CPU."""
SAMPLED = 1 << 16
"""Rows of so many numbers are sampled to find their largest, on a CPU."""
SAMPLE = 1 << 14
LEAST = 1 << 9
"""Booleans of a row from which on it is counted alone."""
BLOCK = 1 << 16
"""Numbers that stay in the cache together."""
DRAWN = 1 << 17
"""Words of a long row that are drawn at once."""


# --------------------------------------------------------------------------------------------------------------- draws


def fast_choose(of: Tensor, d: int, k: int) -> Tensor:
    """`keys.choose`. Beyond one block only a narrow band around the cut is sorted."""
    if not 0 < k < d:
        return keys.choose.plain(of, d, k)
    if takes_kernels(of):
        from sparing.accel.cuda import select

        return select.choose_positions(of, d, k)
    if d > DRAWN:
        return torch.stack([_choose_in_band(key, d, k) for key in of.split(1)])
    return keys.choose.plain(of, d, k)


def _choose_in_band(key: Tensor, d: int, k: int) -> Tensor:
    share = k / d
    spread = 8 * math.sqrt(max(share * (1 - share) / d, 1e-30))  # eight standard deviations of the k-th word
    low, high = (_word_at(share + side) for side in (-spread, spread))
    out = torch.empty(d, dtype=torch.bool, device=key.device)
    places, words = [], []
    for start in range(0, d, DRAWN):
        block = hashes(key, min(DRAWN, d - start), start)[0]
        torch.lt(block, low, out=out[start : start + len(block)])
        near = ((block >= low) & (block <= high)).nonzero()[:, 0]
        places.append(near + start)
        words.append(block[near])
    at, word = torch.cat(places), torch.cat(words)
    missing = k - int(out.sum())
    if not 0 <= missing <= len(at):  # beyond eight deviations: sort everything instead
        word, at = hashes(key, d)[0], torch.arange(d, device=key.device)
        out.zero_()
        missing = k
    out[at[word.argsort()[:missing]]] = True
    return out


def _word_at(u: float) -> int:
    """The signed word below which a share u of all words lies."""
    return min(max(int(u * 2.0**64), 0), WORD) - (1 << 63)


def fast_exact_root(x: Tensor) -> Tensor:
    """`gaussian.exact_root`: a GPU's own is correctly rounded."""
    return x.sqrt() if x.is_cuda else gaussian.exact_root.plain(x)


# ---------------------------------------------------------------------------------------------------------------- sums


def fast_total(x: Tensor) -> Tensor:
    """`reduce.total` in kernels, or in one pass."""
    found = total_of_rows(x)
    if found is not None:
        return found
    if not takes_kernels(x) or not x.numel():
        return reduce.total.plain(x)
    from sparing.accel.cuda import sums

    x = x.reshape(x.shape[0], -1)
    x = sums.sum_blocks(x, row_blocks(x.shape[1]))
    while x.shape[1] > 1:
        x = sums.sum_blocks(x, row_blocks(x.shape[1]))
    return x[:, 0]


def fast_peaks(x: Tensor) -> Tensor:
    """`reduce.peaks`, in one pass."""
    found = peaks_of_rows(x)
    return reduce.peaks.plain(x) if found is None else found


def fast_count_true(x: Tensor) -> Tensor:
    """`reduce.count_true`, which NumPy finds several times as fast."""
    if x.device.type != "cpu" or not x.numel() or x.numel() < LEAST * len(x):
        return reduce.count_true.plain(x)
    return torch.tensor([np.count_nonzero(row) for row in flat(x).numpy()])


def fast_structure_strengths(u: Tensor) -> tuple[Tensor, Tensor]:
    """`fedscr.structure_strengths`, of dense layers in one pass."""
    if u.device.type != "cpu" or not u.numel():
        return fedscr.structure_strengths.plain(u)
    found = structure_sums(u if u.ndim == 3 else fedscr.block_strengths(u))
    return fedscr.structure_strengths.plain(u) if found is None else found


def fast_keep_structures(value: Tensor, filters: Tensor, channels: Tensor) -> Tensor:
    """`fedscr.keep_structures`, in one pass, in which what is not sent is not looked at."""
    found = kept_structures(value, filters, channels)
    return fedscr.keep_structures.plain(value, filters, channels) if found is None else found


def fast_dots(terms: list[Term], k: int) -> Tensor:
    """`reduce.dots` of all terms side by side, in one launch, then all of their blocks together."""
    if not terms[0].x.is_cuda:
        formed_terms = [_with_rows(term, k) for term in terms]
        found = dots_of_rows(formed_terms, k)
        return reduce.dots.plain(formed_terms, k) if found is None else found
    both = any(term.plus is not None for term in terms) and any(term.minus is not None for term in terms)
    if both or not takes_kernels(terms[0].x):
        return reduce.dots.plain([_with_rows(term, k) for term in terms], k)
    from sparing.accel.cuda.sums import block_products

    planes, shapes = 1 if terms[0].other is None else 3, [term.x.shape[1:] for term in terms]
    xs, pluses, minuses, others, masks = zip(*terms, strict=True)
    x, shift, minus = _joined(xs, shapes, 0.0), _joined(pluses, shapes, 0.0), _joined(minuses, shapes, 0.0)
    shift = shift if minus is None else -minus
    other = x if all(a is b for a, b in zip(xs, others, strict=True)) else _joined(others, shapes, 0.0)
    given = [x, shift, other, _joined(masks, shapes, True)]
    found = block_products(given, k, tuple(map(math.prod, shapes)))
    return fast_total(found.flatten(0, 2)).view(planes, k, len(terms))


def _with_rows(term: Term, k: int) -> Term:
    """A product is formed for this once, since a mean is quicker without."""
    if not isinstance(term.x, Product):
        return term
    x = term.x
    whole = formed(Product(x.left, x.right, None, x.base)) if x.whole is None else x.whole
    return term._replace(x=whole)


def _joined(parts: Sequence[Tensor | None], shapes: list[torch.Size], gap: float) -> Tensor | None:
    """Tensors side by side in a row for each client, or in one for all; `gap` stands for a missing one."""
    some = [_once(x) for x in parts if x is not None]
    if not some:
        return None
    most = max(x.shape[0] for x in some)
    if len(some) < len(parts):
        fill, there = torch.full((1,), gap, dtype=some[0].dtype, device=some[0].device), iter(some)
        some = [fill.view(1, *[1] * len(n)) if x is None else next(there) for x, n in zip(parts, shapes, strict=True)]
    whole = [(most, *shape) for shape in shapes]
    return in_one_row([x if x.shape == n else x.expand(n) for x, n in zip(some, whole, strict=True)])


def _once(x: Tensor) -> Tensor:
    if isinstance(x, Product):
        return formed(Product(x.left, x.right, None, x.base)) if x.whole is None else x.whole
    return x


# ------------------------------------------------------------------------------------------------------------- largest


def fast_largest_in_rows(x: Tensor, k: int | Tensor) -> Tensor:
    """`reduce.largest_in_rows`."""
    if takes_kernels(x) and x.dtype == torch.float32:
        from sparing.accel.cuda import select

        k = k if isinstance(k, Tensor) else constants((k,), x.device)
        return select.largest_stretches(x, (x.shape[1],), k.expand(x.shape[0])[:, None])[0]
    found = largest_of_host_rows(x, k)
    if found is not None:
        return found[0]
    if x.device.type != "cpu" or x.shape[1] < SAMPLED:
        return reduce.largest_in_rows.plain(x, k)
    k_K = torch.as_tensor(k).expand(x.shape[0]).clamp(0, x.shape[1]).tolist()
    long = torch.zeros_like(x, dtype=torch.bool)
    for row, out, count in zip(x, long, k_K, strict=True):
        out[places_of_largest(row, int(count))] = True
    return long


def fast_keep_largest(values: list[Tensor], counts: list[int | Tensor]) -> list[tuple[Tensor, Tensor]]:
    """`reduce.keep_largest`, all tensors of a GPU in one go, each tensor of the host in one pass."""
    values = formed(values)
    if all(x.device.type == "cpu" for x in values):
        return [_kept_on_host(x, k) for x, k in zip(values, counts, strict=True)]
    alike = len({(x.dtype, x.shape[0]) for x in values}) == 1
    if not alike or not all(takes_kernels(x) and x.dtype == torch.float32 for x in values):
        return reduce.keep_largest.plain(values, counts)
    from sparing.accel.cuda import select

    lengths, k, device = tuple(math.prod(x.shape[1:]) for x in values), len(values[0]), values[0].device
    numbers = tuple(n for n in counts if isinstance(n, int))
    if len(numbers) == len(counts):
        count_KS = constants(numbers, device).expand(k, -1)
    else:
        each = [constants((n,), device) if isinstance(n, int) else n for n in counts]
        count_KS = torch.stack([n.expand(k) for n in each], dim=1)
    masks, kept = select.largest_stretches(in_one_row(values), lengths, count_KS)
    parts = zip(masks.split(lengths, dim=1), kept.split(lengths, dim=1), values, strict=True)
    return [(mask.view(x.shape), value.view(x.shape)) for mask, value, x in parts]


def _kept_on_host(x: Tensor, k: int | Tensor) -> tuple[Tensor, Tensor]:
    found = largest_of_host_rows(x, k, keep=True)
    return reduce.keep_largest.plain([x], [k])[0] if found is None else found


def places_of_largest(row: Tensor, k: int) -> Tensor:
    """The same of one long row, as positions: looked for among the few above a bound that a sample suggests.

    >>> places_of_largest(torch.tensor([4.0, -1.0, -3.0]), 2)
    tensor([0, 2])
    """
    if k == 0:
        return torch.zeros(0, dtype=torch.int64)
    sample = row[:: len(row) // SAMPLE | 1].abs()  # an odd step, lest it keep to a few columns of a matrix
    hoped = int(1.3 * k * len(sample) / len(row)) + 30
    places = _places_from(row, sample.topk(hoped).values[-1]) if hoped < len(sample) else None
    if places is None or len(places) < k or bool((cut := _kth(row[places].abs(), k)).isnan()):
        places, cut = torch.arange(len(row)), _kth(row.abs(), k)
    size = row[places].abs()
    chosen = ~(size < cut) & (size != 0)
    tied = (size == cut).nonzero()[:, 0]
    spare = int(chosen.sum()) - k
    if spare > 0 and len(tied):
        chosen[tied[-spare:]] = False
    return places[chosen]


def _kth(size: Tensor, k: int) -> Tensor:
    """The k-th largest, NaN above all."""
    return size.kthvalue(len(size) - k + 1).values


def _places_from(row: Tensor, bound: Tensor) -> Tensor:
    """Where a magnitude is not below the bound; a block at a time."""
    found = [true_at(~(some.abs() < bound)) + i * BLOCK for i, some in enumerate(row.split(BLOCK))]
    return torch.from_numpy(np.concatenate(found))


def scarce(mask: Tensor) -> Tensor | None:
    """Where a long row of booleans is true, if that is so seldom that going there alone is faster.

    >>> scarce(torch.tensor([True, False])) is None
    True
    """
    if mask.device.type != "cpu" or len(mask) < LONG or 8 * np.count_nonzero(mask.numpy()) > len(mask):
        return None
    return torch.from_numpy(true_at(mask))


def true_at(mask: Tensor) -> np.ndarray:
    """`nonzero` of a row on the CPU, which NumPy finds several times as fast."""
    return np.flatnonzero(mask.numpy())


def fast_kth_largest(score: Tensor, k: int) -> Tensor:
    """`selectors.kth_largest`: on a GPU `kthvalue` would leave a long row to one block of threads."""
    if score.is_cuda:
        return score.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    return score.kthvalue(score.shape[1] - k + 1, dim=1, keepdim=True).values
