"""The vocabulary of a method: what is shared, how it is written, how it is blended, what size, how it trains.

Every name here is a tuple of pure functions. State is a Tree, passed in and handed back; a part that remembers
nothing uses `{}`. All functions see the client axis: K is a whole chunk of the cohort in the simulator, 1 on a node.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from sparing.core.keys import Ctx
from sparing.core.parcel import Cuts, Parcel, Schema
from sparing.core.tree import Layout, Tree


def nothing(*_: object) -> Tree:
    """The state of a part that remembers nothing."""
    return {}


class Share(NamedTuple):
    """Which part of the model travels each way. State lives on the server.

    A mask that is not `told` may depend on the layout, ctx and config only: the receiver calls `down` with the
    initial state and the initial model to learn what to expect.
    """

    down: Callable[[Tree, Tree, Ctx], Cuts]  # (state, model, ctx)
    up: Callable[[Cuts, Ctx], Cuts]  # (what came down, ctx)
    init: Callable[[Tree], Tree] = nothing  # model -> state
    learn: Callable[[Tree, "Blended", Ctx], Tree] = lambda state, blended, ctx: state
    own: frozenset[str] = frozenset()  # tensors of which every client keeps its own copy
    private: frozenset[str] = frozenset()  # those of them that never cross the wire


class View(NamedTuple):
    """What an encoder may look at beside the parcel."""

    ctx: Ctx
    start: Tree  # the model before local training
    after: Tree  # and after it
    notes: dict[str, Tensor]  # what came down with the parcel


class Codec(NamedTuple):
    """How values are written: both ends of one transform, and the schema a receiver expects after it."""

    encode: Callable[[Parcel, Tree, View], tuple[Parcel, Tree]]
    decode: Callable[[Parcel, Ctx], Parcel] = lambda parcel, ctx: parcel
    schema: Callable[[Schema, Ctx], Schema] = lambda schema, ctx: schema
    init: Callable[[Layout], Tree] = nothing  # one client's memory, leaves [1, ...]
    lost: Callable[[Parcel, Tree, Ctx], Tree] = lambda parcel, state, ctx: state  # the parcel never arrived
    name: str = ""
    lossy: bool = False
    traits: frozenset[str] = frozenset()  # sparse, codes, ranks, unbiased, basis, rotates, remembers: see compose


class Arrival(NamedTuple):
    """K decoded updates at the server, as differences from its model."""

    update: Tree  # [K, *shape], zero outside scope
    scope: dict[str, Tensor | None]  # who has a vote where
    notes: dict[str, Tensor]
    model: Tree
    ctx: Ctx


class Blended(NamedTuple):
    """What the cohort's updates came to, in float64, and what was learned on the way."""

    update: Tree  # [1, *shape] float64, zero where nobody voted
    covered: dict[str, Tensor | None]  # bool [1, *shape]; None: everywhere
    ids: Tensor  # [n] sorted
    weight: Tensor  # [n] float64, unnormalised, in id order
    seen: dict[str, Tensor]  # what the steps watched, [n, ...] in id order


Report = dict[str, float]


class Step(NamedTuple):
    """A server transform of the blended update (momentum, shrinkage, noise)."""

    apply: Callable[[Tree, Blended, Ctx], tuple[Tree, Tree, Report]]  # -> (update, state, report)
    init: Callable[[Tree], Tree] = nothing
    watch: Callable[[Tree, Arrival], dict[str, Tensor]] = nothing  # scalars per client, keyed by id
    name: str = ""
    needs_mean: bool = False


def by_samples(arrival: Arrival) -> Tensor:
    """FedAvg's weights: how many samples each client reports."""
    return arrival.notes["n"].double()


def all_samples(ctx: Ctx) -> float:
    return float(ctx.n.sum())


class Blend(NamedTuple):
    """How arrivals become one update: weigh, reduce (a fold, or `collect` where everyone is needed), then steps."""

    weigh: Callable[[Arrival], Tensor] = by_samples  # [K], unnormalised
    most: Callable[[Ctx], float] = all_samples  # what the weights of a whole cohort add up to, at most
    collect: Callable[[Tree, dict[str, Tensor | None], Tensor], Tree] | None = None  # None: the weighted mean
    steps: tuple[Step, ...] = ()
    serve: Callable[[Tree, Tree, Ctx], tuple[Tree, dict[str, Tensor]]] | None = (
        None  # (state, model) -> (models, notes)
    )
    notes: dict[str, int] = {}  # noqa: RUF012  what `serve` sends along: name -> numbers per client


class Fit(NamedTuple):
    """Client models of another size. All K clients of a call have equal size."""

    sizes: Callable[[Ctx], Tensor]  # [K]: which size each client has
    shrink: Callable[[Tree, int], Tree]
    grow: Callable[[Tree, int], tuple[Tree, dict[str, Tensor | None]]]  # -> (full shape, coverage)
    layout: Callable[[int], Layout]


class Phase(NamedTuple):
    """One stretch of local training."""

    epochs: int = 5
    steps: int | None = None  # exactly so many batches instead of epochs
    batch: int = 10
    optimiser: str = "sgd"  # or "adam"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None  # largest gradient norm
    prox: float = 0.0  # FedProx: prox / 2 * |w - w_start|^2 joins the loss
    trains: frozenset[str] | None = None  # None: every parameter


class Local(NamedTuple):
    phases: tuple[Phase, ...] = (Phase(),)
    buffers: str = "shared"  # "shared" | "own" (they stay with the client) | "static" (batch statistics only)
    init: Callable[[Layout], Tree] = nothing  # what a client's training remembers between rounds, leaves [1, ...]


class Method(NamedTuple):
    """A complete method over one model layout. `compose` builds it, `core.round` runs it."""

    layout: Layout
    share: Share
    down: tuple[Codec, ...] = ()
    up: tuple[Codec, ...] = ()
    memory: bool = False  # error feedback over the whole uplink
    blend: Blend = Blend()
    fit: Fit | None = None
    local: Local = Local()


Recipe = Callable[[Method], Method]

Train = Callable[[Tree, Tree, Ctx], tuple[Tree, Tree, dict[str, Tensor]]]
"""Local training of K clients: (start, memory, ctx) -> (after, memory, notes with at least 'loss')."""
