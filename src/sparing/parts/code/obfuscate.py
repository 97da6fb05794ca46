"""Updates made hard to read before they leave: noise, or a random change of basis. Neither is a guarantee.

noise     every shared layer gets normal noise, `scale` times the root mean square of its entries
rotate    the shared entries of a layer are shuffled, given random signs, and mixed by Hadamard matrices. The key is the
          run's: whoever has it turns them back, as the server does on arrival. Others see the length of the layer's
          update and little else.

A vector of n entries needs no filling up: it is cut into blocks of 2^k entries, one for every bit of n, the largest
first, and each block is mixed for itself.
"""

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.gaussian import Words, keyed_words
from sparing.core.gaussian import gaussian_noise as drawn_noise
from sparing.core.method import FIXED, Codec, Effect, Form, Trait, View
from sparing.core.parcel import Parcel, sent_mask
from sparing.core.reduce import total
from sparing.core.tree import Layout, Tree, cleared, flat

NAME = "obfuscate"


def noise_codec(layout: Layout, scale: float, words: Words = keyed_words) -> Codec:
    """v + scale * rms(v) * N(0, 1) wherever something is sent, layer by layer."""
    params = frozenset(layout.params)

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        leaves = dict(parcel.leaves)
        for name in params & leaves.keys():
            leaf = leaves[name]
            x, mask = leaf.value.double(), sent_mask(leaf)
            rms_K = (total(x.square()) / _mask_rows(mask, x).sum(dim=1).clamp(min=1)).sqrt()
            value = (x + drawn_noise(words, view.ctx, f"{NAME}/{name}", x, scale * rms_K)).to(leaf.value.dtype)
            leaves[name] = leaf._replace(value=cleared(value, mask))
        return Parcel(leaves, parcel.notes), state

    noisy = Trait.NOISY if scale >= 1 else Trait.NONE
    return Codec(encode, name=NAME, effect=Effect(refuses=FIXED | Form.CODES, traits=noisy))


def basis_change_codec(layout: Layout, words: Words = keyed_words) -> Codec:
    """The same entries in a basis that only those with the key know."""
    params = frozenset(layout.params)

    def each(parcel: Parcel, ctx: Ctx, back: bool) -> Parcel:
        leaves = dict(parcel.leaves)
        for name in params & leaves.keys():
            leaf = leaves[name]
            mask = _mask_rows(leaf.scope, leaf.value)
            drawn = words(ctx, f"{NAME}/{name}", mask.shape[1], None)
            rows = zip(flat(leaf.value), drawn, mask.expand(len(leaf.value), -1), strict=True)
            value = torch.stack([_turned_row(x, word, here, back) for x, word, here in rows]).reshape(leaf.value.shape)
            leaves[name] = leaf._replace(value=value)
        return Parcel(leaves, parcel.notes)

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        return each(parcel, view.ctx, back=False), state

    def decode(parcel: Parcel, ctx: Ctx) -> Parcel:
        return each(parcel, ctx, back=True)

    return Codec(encode, decode, name=NAME, effect=Effect(refuses=FIXED | Form.CODES | Form.SPARSE, lossy=False))


def _mask_rows(mask: Tensor | None, value: Tensor) -> Tensor:
    """The mask as bool `[K or 1, n]`."""
    if mask is None:
        return torch.ones(1, value[0].numel(), dtype=torch.bool, device=value.device)
    return flat(mask.expand(-1, *value.shape[1:]))


def _turned_row(x: Tensor, words: Tensor, mask: Tensor, back: bool) -> Tensor:
    """One row, `[n]`: its entries in scope in another basis, or back in their own."""
    places = mask.nonzero()[:, 0]
    order, sign = words[places].argsort(), torch.where(words[places] & 1 == 1, 1.0, -1.0).double()
    v = x[places].double()
    if back:
        v = torch.empty_like(v).index_copy_(0, order, _hadamard_blocks(v)) * sign
    else:
        v = _hadamard_blocks((v * sign)[order])
    return torch.zeros_like(x).index_copy_(0, places, v.to(x.dtype))


def _hadamard_blocks(x: Tensor) -> Tensor:
    """Hadamard's matrix, of length one, on blocks of powers of two: its own inverse."""
    parts, start = [], 0
    for k in reversed(range(len(x).bit_length())):
        if len(x) >> k & 1:
            parts.append(hadamard_vector(x[start : start + (1 << k)]) * 2.0 ** (-k / 2))
            start += 1 << k
    return torch.cat(parts) if parts else x


def hadamard_vector(x: Tensor) -> Tensor:
    """H x for `[2^k]`, by sums and differences in a fixed order.

    >>> hadamard_vector(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([10., -2., -4.,  0.])
    """
    step = 1
    while step < len(x):
        x = x.view(-1, 2, step)
        x = torch.stack([x[:, 0] + x[:, 1], x[:, 0] - x[:, 1]], dim=1).reshape(-1)
        step *= 2
    return x
