"""The server's update through a codec, with error feedback: the model moves by what a compressed broadcast says."""

import torch

from sparing.core.codec import feedback
from sparing.core.keys import Ctx
from sparing.core.parcel import Leaf, Parcel
from sparing.core.protocols import Blended, Codec, Report, Step, View
from sparing.core.tree import Layout, Tree
from sparing.core.wire import nbytes


def broadcast(layout: Layout, codec: Codec, name: str, skip: frozenset[str] = frozenset()) -> Step:
    """The update of the parameters encoded and decoded; what that leaves out is added to the next one.

    Reports `broadcast_bytes`, what the encoded update takes. Buffers, and tensors in `skip`, move as they are.
    """
    codec = feedback(codec, skip)
    params = [name for name in layout.floats if name not in skip]

    def init(model: Tree, clients: int) -> Tree:
        return {name: x.to(next(iter(model.values())).device) for name, x in codec.init(layout).items()}

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        here = [name for name in params if name in blended.update]
        leaves = {n: Leaf(blended.update[n].to(layout.dtypes[n]), scope=blended.covered[n]) for n in here}
        parcel, state = codec.encode(Parcel(leaves, {}), state, View(ctx.common, {}, {}, {}))
        decoded = codec.decode(parcel, ctx.common).leaves
        update = blended.update | {name: decoded[name].value.to(torch.float64) for name in here}
        return update, state, {"broadcast_bytes": float(nbytes(parcel)[0])}

    return Step(apply, init, name=name)
