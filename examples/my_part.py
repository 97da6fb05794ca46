"""Three parts of your own, from outside the package: what is shared, how it is written, how it is weighed.

Each is a few lines; the decorator gives it a name, and from then on it combines with everything else. Run it:

    python examples/my_part.py
"""

import torch

import sparing
from sparing.core.compose import narrow_share, weighed_by
from sparing.core.context import Ctx
from sparing.core.method import SPARSIFIES, Arrival, Codec, Method, Recipe, Share, View, Weigh
from sparing.core.parcel import Cut, Cuts, Parcel, Schema
from sparing.core.reduce import total
from sparing.core.registry import recipe
from sparing.core.tree import Tree, cleared


@recipe("alternate", paper="this file")
def alternate(every: int = 2) -> Recipe:
    """A share: weights travel every round, biases only now and then; in between they are the client's own."""

    def apply(method: Method) -> Method:
        layout = method.layout
        biases = frozenset(name for name in layout.params if name.endswith("bias"))

        def cuts(ctx: Ctx) -> Cuts:
            """The same for all clients of a call; where clients differ, a mask `[K, ...]` would say so."""
            home = biases if ctx.round % every else ()
            return {name: Cut() for name in layout.shapes if name not in home}

        share = Share(down=lambda state, model, ctx: cuts(ctx), up=lambda got, ctx: cuts(ctx), own=biases)
        return method._replace(share=narrow_share(method.share, share))

    return apply


@recipe("above", paper="this file")
def above(share: float = 0.3) -> Recipe:
    """A sparsifier: send the entries that come near the largest of their layer."""

    def apply(method: Method) -> Method:
        params = frozenset(method.layout.params)

        def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
            leaves = dict(parcel.leaves)
            for name in params & leaves.keys():
                size = leaves[name].value.abs().flatten(1)
                mask = ((size >= share * size.amax(1, keepdim=True)) & (size > 0)).reshape(leaves[name].value.shape)
                keep = (*leaves[name].keep, mask)
                leaves[name] = leaves[name]._replace(value=cleared(leaves[name].value, mask), keep=keep)
            return Parcel(leaves, parcel.notes), state

        def schema(expected: Schema, ctx: Ctx) -> Schema:
            leaves = dict(expected.leaves)
            for name in params & leaves.keys():
                leaves[name] = leaves[name]._replace(grains=(*leaves[name].grains, leaves[name].shape))
            return expected._replace(leaves=leaves)

        codec = Codec(encode, schema=schema, name="above", effect=SPARSIFIES)
        return method._replace(up=(*method.up, codec))

    return apply


@recipe("calm", paper="this file")
def calm() -> Recipe:
    """A weighting: the further a client moved, the less it counts.

    Weights need not add up to one; `most` is what those of a whole cohort add up to at most.
    """

    def of(state: Tree, arrival: Arrival) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        moved_K = sum(total(update.square()) for update in arrival.update.values())
        return arrival.notes["n"].double() / (1 + moved_K), {}

    def apply(method: Method) -> Method:
        return weighed_by(method, Weigh(of, most=lambda ctx: float(ctx.n.sum()), name="calm"))

    return apply


def main() -> None:
    methods = ["fedavg", "alternate", "above", "calm", "alternate+above+int8+memory+calm+stein"]
    print(f"{'method':42}{'accuracy':>10}{'kB up':>10}   engines agree")
    for method in methods:
        runs = [
            sparing.run("digits", method, rounds=6, sample=5, seed=1, engine=engine, plan={"path": "loop"})
            for engine in ("vector", "debug")
        ]
        same = runs[0].model_sha256 == runs[1].model_sha256 and runs[0].up_bytes == runs[1].up_bytes
        print(f"{method:42}{runs[0].accuracy:10.1%}{runs[0].up_bytes / 1000:10.1f}   {'yes' if same else 'NO'}")


if __name__ == "__main__":
    main()
