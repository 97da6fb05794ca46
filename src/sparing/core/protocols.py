"""The vocabulary of a method: what is shared, how it is written, how it is blended, what size, how it trains.

Every name here is a tuple of pure functions. State is a Tree, passed in and handed back; a part that remembers
nothing uses `{}`. All functions see the client axis: K is a whole chunk of the cohort in the simulator, 1 on a node.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sparing.core.keys import Ctx
from sparing.core.normal import Words, fresh
from sparing.core.parcel import Cuts, Parcel, Schema
from sparing.core.tree import Kept, Layout, Trained, Tree


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
    learn: Callable[[Tree, "Blended", Ctx], "tuple[Tree, Report]"] = lambda state, blended, ctx: (state, {})
    own: frozenset[str] = frozenset()  # tensors of which every client keeps its own copy
    private: frozenset[str] = frozenset()  # those of them that never cross the wire
    given: Callable[[Tree, Ctx], Tree] = lambda own, ctx: own  # own tensors that follow from ctx, filled in
    values: frozenset[str] = frozenset()  # tensors that go up as they are, not as updates: memory cannot add them up
    look: Callable[[Tree, Tree], Tree] = lambda state, gradient: state  # (state, gradient): see `Method.probe`
    within: bool = False  # what goes up of a tensor lies within what came down of it
    whole: bool = False  # every tensor travels whole or not at all, whatever its shape


class View(NamedTuple):
    """What an encoder may look at beside the parcel."""

    ctx: Ctx
    start: Tree  # the model before local training
    after: Trained  # and after it
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
    traits: frozenset[str] = frozenset()  # what `compose` looks at: sparse, codes, ranks, ...
    changes: frozenset[str] | None = None  # all others come out as the same tensors; None: any may be changed


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
    seen: dict[str, Tensor]  # what was watched, [n, ...] in id order
    plain: Tree | None = None  # the unweighted mean, where a step asks for it
    apart: frozenset[str] = frozenset()  # tensors in which clients voted on different coordinates


Report = dict[str, float]  # metrics of a round, by name


class Rows(Protocol):
    """Where one row of tensors per client lives: the clients' own state, or what the server keeps of each."""

    def read(self, ids: Tensor) -> Tree: ...

    def write(self, ids: Tensor, rows: Tree) -> None: ...

    def mix(self, ids: Tensor, weight: Tensor) -> Tree:
        """Weighted sums of the rows of clients `ids`: float64 `[K, m]` -> leaves `[K, ...]`, summed in that order."""
        ...


class Step(NamedTuple):
    """A part of the server: it watches arrivals, transforms the blended update, and may serve the next round.

    `serve` gives each client a model of its own, or sends a few numbers along (declared in `notes`). What the server
    must keep of every client, where that is too much for its state, goes into rows: `row` is the first one, `keep`
    gives those of the clients that arrived, `serve` may read them.
    """

    apply: Callable[[Tree, Blended, Ctx], tuple[Tree, Tree, Report]]  # -> (update, state, report)
    init: Callable[[Tree, int], Tree] = nothing  # (model, clients) -> state
    watch: Callable[[Tree, Arrival], dict[str, Tensor]] = nothing  # per client [K, ...], scalars but for `keep`
    name: str = ""
    needs_mean: bool = False  # makes no sense after a blend that collects
    plain: bool = False  # wants the unweighted mean too
    serve: Callable[[Tree, Tree, Ctx, Rows | None], tuple[Tree, dict[str, Tensor]]] | None = None
    notes: dict[str, int] = {}  # noqa: RUF012  what `serve` sends along: name -> numbers per client
    row: Callable[[Tree], Tree] = nothing  # model -> leaves [1, ...]
    keep: Callable[[Tree, Blended, Ctx], Tree] = nothing  # rows [n, ...] of blended.ids
    receive: Callable[[Tree, Arrival], Arrival] | None = None  # changes arrivals before they are weighed and blended
    reports: bool = False  # only reports: whatever it watched, it leaves the update as it is
    check: Callable[["Method"], None] = lambda method: None  # refuse a method in which this step makes no sense


class Weigh(NamedTuple):
    """How much every arrival counts, unnormalised; `seen` is kept by client id for `learn`."""

    of: Callable[[Tree, Arrival], tuple[Tensor, dict[str, Tensor]]]  # -> ([K] float64, seen)
    most: Callable[[Ctx], float]  # what the weights of a whole cohort add up to, at most
    init: Callable[[Tree, int], Tree] = nothing  # (model, clients) -> state
    learn: Callable[[Tree, Blended, Ctx], tuple[Tree, Report]] = lambda state, blended, ctx: (state, {})
    name: str = ""
    positive: bool = False  # nobody ever counts nothing


by_samples = Weigh(
    of=lambda state, arrival: (arrival.notes["n"].double(), {}),
    most=lambda ctx: float(ctx.here[1].sum()),
    name="samples",
    positive=True,
)
"""FedAvg's weights: how many samples each client reports."""

evenly = Weigh(
    of=lambda state, arrival: (torch.ones_like(arrival.notes["n"], dtype=torch.float64), {}),
    most=lambda ctx: float(ctx.cohort),
    name="uniform",
    positive=True,
)
"""Every client counts the same."""


class Blend(NamedTuple):
    """How arrivals become one update: weigh, reduce (a fold, or `collect` where everyone is needed), then steps.

    `collect(values, votes, weight)` sees everyone in id order: values `[n, *shape]`, votes bool `[n, *shape]`, weights
    `[n]` float64. It gives the update, float64 `[1, *shape]`, and where there is one, bool `[1, *shape]`.
    """

    weigh: Weigh = by_samples
    collect: Callable[[Tree, Tree, Tensor], tuple[Tree, Tree]] | None = None  # None: the weighted mean
    steps: tuple[Step, ...] = ()
    lenient: bool = False  # leave out arrivals that are not finite or far too large, instead of stopping the run


class Apart(NamedTuple):
    """Tensors whose parts are averaged apart, each over those who have it: `[K, parts, *shape]` until all have come."""

    names: frozenset[str]
    cut: Callable[[Tree, int, Ctx], tuple[Tree, dict[str, Tensor | None]]]  # (tensors of one size, size, ctx), as grow
    join: Callable[[Kept, Tree, Blended], Blended]  # (the fit's state, model, mean parts) -> differences from the model


class Fit(NamedTuple):
    """Client models of other sizes; the server keeps the full one.

    All K clients of a call have equal size, or sizes with one `room`: then their tensors have the shapes of that size,
    with zeros around those that are smaller, and training leaves these zeros as they are.
    """

    sizes: Callable[[Ctx], Tensor]  # [K]: which size each client has
    layouts: tuple[Layout, ...]  # of every size
    shrink: Callable[[Kept, Tree, int, Ctx], Tree]  # (state, full model, size, ctx) -> models of that size
    grow: Callable[[Tree, int, Ctx], tuple[Tree, dict[str, Tensor | None]]]  # -> (full shape, coverage)
    module: Callable[[nn.Module, int], nn.Module]  # the network of that size, from the full one
    names: tuple[str, ...] = ()  # what to call each size
    init: Callable[[Tree], Kept] = nothing  # model -> what the server remembers: a decomposition
    learn: Callable[[Kept, Tree, Ctx], tuple[Kept, Report]] = lambda state, model, ctx: (state, {})
    room: tuple[int, ...] = ()  # by size: which one has room for its tensors; (): none may stand in another's
    within: bool = False  # smaller tensors are parts of the full ones: clients keep private ones in full shape
    increments: bool = False  # a client counts by what it made of what it was sent, not by what the model is beside it
    apart: Apart | None = None  # in place of `grow`
    kept: "Fit | None" = None  # in its place where clients keep private tensors: each has the same parts in all rounds
    check: Callable[[nn.Module, Tensor], None] = lambda model, x: None  # refuse a network that cannot be resized so

    def joined(self, ctx: Ctx) -> bool:
        """Whether these K clients differ in size."""
        return len(set(self.sizes(ctx).tolist())) > 1

    def size(self, ctx: Ctx) -> int:
        """The one whose shapes the tensors of these K clients have."""
        first = int(self.sizes(ctx)[0])
        return self.room[first] if self.joined(ctx) else first


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
    correct: bool = False  # SCAFFOLD: add the server's control variate and take off the client's, NAME.control
    frobenius: float = 0.0  # frobenius / 2 * |A B|^2 of every factored layer, instead of weight decay there
    trains: frozenset[str] | None = None  # None: every parameter
    holds: frozenset[str] = frozenset()  # tensors in which a weight that is zero stays zero: pruned ones


class Local(NamedTuple):
    phases: tuple[Phase, ...] = (Phase(),)
    buffers: str = "shared"  # "shared" | "own" (they stay with the client) | "static" (batch statistics only)
    init: Callable[[Layout], Tree] = nothing  # what a client's training remembers between rounds, leaves [1, ...]
    reset: bool = False  # forget it where the server has just written
    second: tuple[Phase, ...] = ()  # of a second model, NAME.second, drawn to the first by `prox`; clients use it
    lost: Callable[[Parcel, Tree], Tree] = lambda decoded, memory: memory  # what is remembered of a lost upload
    tune: Callable[[tuple[Phase, ...]], tuple[Phase, ...]] | None = None  # for evaluation, if not as in a round


class Privacy(NamedTuple):
    """What a method promises its clients; `run/accountant.py` turns it into epsilon, `refuse_leaks` holds it up."""

    noise: float  # its standard deviation on a sum of updates, by the largest length that one of them can have
    mode: str = "central"  # the server adds it to the sum; or "local": every client to its own update
    epsilon: float | None = None  # the run ends before more than this is spent
    delta: float | None = None  # by default 1 / clients^1.1
    secret: bool = True  # noise and cohorts come from a secret; else from the seed, which protects nobody


class Broadcast(NamedTuple):
    """How the server writes its update, once a round for everyone, after all of its steps; see `core.versions`."""

    stages: tuple[Codec, ...]
    memory: bool = True  # error feedback: what an update could not say is added to the next
    seeded: bool = False  # clients build the first model from the seed, so a newcomer misses updates only


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
    sizes: tuple["Method", ...] = ()  # with a fit: share and codecs over the layout of each size
    size: int | None = None  # set in those
    extra: Callable[[Tree], Tree] = nothing  # model -> tensors that stand beside it, such as control variates
    privacy: Privacy | None = None
    probe: bool = False  # `Share.look` is shown the gradient on the server's probe set, at each new model
    broadcast: Broadcast | None = None  # None: clients are sent values, and the model moves by the update itself
    sure: bool = False  # no upload is ever lost
    words: Words = fresh  # where its parts take secret randomness from; who runs the method gives it
    secret: bool = False  # whether one of them does


Recipe = Callable[[Method], Method]


class Remade(NamedTuple):
    """A recipe for another network than the task's; `compose.remade` calls `model` before the layout is taken."""

    apply: Recipe
    model: Callable[[nn.Module, bool, int], nn.Module]  # (the task's network, whether buffers are static, seed)

    def __call__(self, method: Method) -> Method:
        return self.apply(method)


Train = Callable[[Tree, Tree, Ctx], tuple[Trained, Tree, dict[str, Tensor]]]
"""Local training of K clients: (start, memory, ctx) -> (after, memory, notes with at least 'loss')."""

Gradient = Callable[[Tree], Tree]
"""Of the loss on the server's probe set, at this model: leaves `[1, *shape]`."""
