"""Entropy-coded scalar quantiser: values as whole multiples of one step, most of them zero and next to free.

    code = round(v / D),  D a multiple of the root mean square of what is sent

One step for the whole model, since a byte then buys as much accuracy in one layer as in another; vectors too. Rounding
has a dead zone (`dead_zone`). D is never so long that all codes are zero, and longer where 127 steps would not
reach a tensor's largest value.
"""

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import ConfigError, check_range
from sparing.core.method import QUANTISES, Codec, View
from sparing.core.parcel import Leaf, Parcel, Schema, sent_mask
from sparing.core.reduce import Term, dots, peaks
from sparing.core.tree import Layout, Tree
from sparing.parts.code.dead_zone import codes_of, reaching, values_of_codes


def ecsq_codec(layout: Layout, step: float = 1.0, over: str = "model") -> Codec:
    """`step` in root mean squares, over the whole model or of each layer."""
    check_range("ecsq.step", step, 0, 100, open_low=True)
    if over not in ("layer", "model"):
        raise ConfigError(f"ecsq.over is {over!r}; use 'layer' or 'model'")
    params = frozenset(layout.floats)

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        leaves = dict(parcel.leaves)
        names = [name for name in leaves if name in params]
        for group in filter(None, [names] if over == "model" else [[name] for name in names]):
            chosen = _step_for([leaves[name] for name in group], step)
            for name in group:
                value = leaves[name].value.float()
                own = reaching(chosen, value)
                leaves[name] = leaves[name]._replace(value=codes_of(value, own), scale=own[:, None], bits=8, tight=True)
        return Parcel(leaves, parcel.notes), state

    def decode(parcel: Parcel, ctx: Ctx) -> Parcel:
        leaves = dict(parcel.leaves)
        for name in leaves.keys() & params:
            leaf = leaves[name]
            assert leaf.scale is not None
            value = values_of_codes(leaf.value, leaf.scale[:, 0]).to(layout.dtypes[name])
            leaves[name] = leaf._replace(value=value, scale=None, bits=32, tight=False)
        return Parcel(leaves, parcel.notes)

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        leaves = {
            name: spec._replace(dtype=torch.int8, scales=1, tight=True) if name in params else spec
            for name, spec in expected.leaves.items()
        }
        return expected._replace(leaves=leaves)

    return Codec(encode, decode, schema, name="ecsq", effect=QUANTISES)


def _step_for(leaves: list[Leaf], multiple: float) -> Tensor:
    """`multiple` root mean squares of what these leaves send, and no more than the largest value, `[K]` float64."""
    count = torch.as_tensor(sum(_entries_sent(leaf) for leaf in leaves))  # on the host, if it follows from shapes
    square = sum(dots([Term(leaf.value) for leaf in leaves], len(leaves[0].value))[0].unbind(1), torch.zeros(()))
    peak = torch.stack([peaks(leaf.value).double() for leaf in leaves]).amax(0)
    return torch.minimum(multiple * (square / count.clamp(min=1)).sqrt(), peak)


def _entries_sent(leaf: Leaf) -> Tensor | int:
    """How many values are sent, of everyone or of each `[1 or K]`."""
    mask = sent_mask(leaf)
    if mask is None:
        return leaf.value[0].numel()
    return mask.expand(-1, *leaf.value.shape[1:]).reshape(len(mask), -1).sum(1)
