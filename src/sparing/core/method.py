"""The vocabulary of a method: what is shared, how it is written, how it is blended, what size, how it trains.

Every name here is a tuple of pure functions. State is a Tree, passed in and handed back; a part that remembers
nothing uses `{}`. All functions see the client axis: K is a whole chunk of the cohort in the simulator, 1 on a node.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Flag, auto
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sparing.core.context import Ctx
from sparing.core.gaussian import Words, fresh_words
from sparing.core.optimiser import Optimiser
from sparing.core.parcel import Cuts, Parcel, Schema
from sparing.core.tree import Layout, Masks, Models, Tree

Report = Mapping[str, float | Tensor]
"""Metrics of a round, by name: numbers, or tensors of one number each, read once the round is over."""


class Summary(Mapping[str, float]):
    """A report that the host works out from tensors, once they are there.

    >>> dict(Summary([torch.tensor([1.0, 2.0])], lambda x: {"most": max(x.tolist())}))
    {'most': 2.0}
    """

    def __init__(self, tensors: Sequence[Tensor], numbers: Callable[..., dict[str, float]]):
        self.tensors, self.numbers, self.found = tensors, numbers, dict[str, float]()

    def read(self, tensors: Sequence[Tensor]) -> dict[str, float]:
        """The numbers, from the tensors on the host."""
        self.found = self.found or self.numbers(*tensors)
        return self.found

    def __getitem__(self, name: str) -> float:
        return self.read([x.cpu() for x in self.tensors])[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.read([x.cpu() for x in self.tensors]))

    def __len__(self) -> int:
        return len(self.read([x.cpu() for x in self.tensors]))


Remembered = Mapping[str, Tensor]
"""What the server keeps of a part from round to round: a Tree, or what will be one."""


def nothing(*_: object) -> Tree:
    """The state of a part that remembers nothing."""
    return {}


class Share(NamedTuple):
    """Which part of the model travels each way. State lives on the server.

    A mask that is not `told` may depend on the layout, ctx and config only: the receiver calls `down` with the
    initial state and the initial model to learn what to expect.
    Of a tensor that comes down, only what came down may go up, unless it goes up as it is (`values`).
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
    most: int | None = None  # parameters that travel in an ordinary round, at most; None: maybe all
    syncs: bool = False  # whether there are rounds in which all of them do


class View(NamedTuple):
    """What an encoder may look at beside the parcel."""

    ctx: Ctx
    start: Tree  # the model before local training
    after: Mapping[str, Tensor]  # and after it
    notes: dict[str, Tensor]  # what came down with the parcel


class Form(Flag):
    """What has been done to the values of a parcel: what a codec gives, and what it cannot take."""

    VALUES = 0
    SPARSE = auto()  # positions were chosen from the data
    CODES = auto()  # values became the codes of a quantiser
    BASIS = auto()  # values are coordinates in another basis
    SUMS = auto()  # values are corrections that both ends add up over the rounds
    WRITTEN = auto()  # nothing may be changed any more


class Trait(Flag):
    """What else `core.rules` must know of a codec."""

    NONE = 0
    WHOLE = auto()  # needs whole matrices
    COUNTS = auto()  # counts the bytes of all that is in the parcel
    DEADLINE = auto()  # takes its bytes from the round's deadline
    REMEMBERS = auto()  # keeps a memory of its own
    AMPLIFIES = auto()  # scales values up, so that their mean is right
    NOISY = auto()  # its error can be larger than what it was given
    SUMMABLE = auto()  # positions and steps are the same for all clients, so that what they write adds up under masks


FIXED = Form.BASIS | Form.SUMS | Form.WRITTEN
"""What hardly anything can follow."""


class Effect(NamedTuple):
    """What a codec does to values, so that what may follow is decided by rule."""

    gives: Form = Form.VALUES
    refuses: Form = FIXED
    lossy: bool = True
    traits: Trait = Trait.NONE


LOSSLESS = Effect(lossy=False)
SPARSIFIES = Effect(Form.SPARSE)
QUANTISES = Effect(Form.CODES, FIXED | Form.CODES)
TURNS = Effect(Form.BASIS | Form.CODES, FIXED | Form.CODES | Form.SPARSE)
"""What changes the basis writes codes of its own."""


class Codec(NamedTuple):
    """How values are written: both ends of one transform, and the schema a receiver expects after it.

    A parcel has the tensors that are shared: those that stay home are not in it.
    """

    encode: Callable[[Parcel, Tree, View], tuple[Parcel, Tree]]
    decode: Callable[[Parcel, Ctx], Parcel] = lambda parcel, ctx: parcel  # codes become values again, in float
    schema: Callable[[Schema, Ctx], Schema] = lambda schema, ctx: schema  # of what `encode` gives; see `Spec`
    init: Callable[[Layout], Tree] = nothing  # one client's memory, leaves [1, ...]
    lost: Callable[[Parcel, Tree, Ctx], Tree] = lambda parcel, state, ctx: state  # the parcel never arrived
    name: str = ""  # what errors call it
    effect: Effect = LOSSLESS  # what may follow it, and whether `memory` may stand around it, is decided by this
    over: frozenset[str] | None = None  # the only tensors it sees (`codec.only`); None: all


class Arrival(NamedTuple):
    """K decoded updates at the server, as differences from its model."""

    update: Tree  # [K, *shape], zero outside scope; of what is shared, buffers too
    scope: dict[str, Tensor | None]  # who has a vote where
    notes: dict[str, Tensor]  # what clients said beside: their samples "n" and their "loss", [K] each
    model: Tree
    ctx: Ctx


class Blended(NamedTuple):
    """What the cohort's updates came to, in float64, and what was learned on the way."""

    update: Tree  # [1, *shape] float64, zero where nobody voted
    covered: dict[str, Tensor | None]  # bool [1, *shape]; None: everywhere
    ids: Tensor  # [n] sorted, on the host
    weight: Tensor  # [n] float64, unnormalised, in id order; on the host where it was known beforehand
    seen: dict[str, Tensor]  # what was watched, [n, ...] in id order
    uniform: Tree | None = None  # the unweighted mean, where a step asks for it
    apart: frozenset[str] = frozenset()  # tensors in which clients voted on different coordinates
    report: Report = {}  # noqa: RUF012  of the blend itself


class Rows(Protocol):
    """Where one row of tensors per client lives: the clients' own state, or what the server keeps of each."""

    def read(self, ids: Tensor) -> Tree: ...

    def write(self, ids: Tensor, rows: Tree) -> None: ...

    def mix(self, ids: Tensor, weight: Tensor) -> Tree:
        """Weighted sums of the rows of clients `ids`: float64 `[K, m]` -> leaves `[K, ...]`, summed in that order."""
        ...


class Serving(NamedTuple):
    """What a step of the server hands to every client of the next round: a model of its own, or a few numbers.

    What the server must keep of every client, where that is too much for its state, goes into rows: `row` is the first
    one, `keep` says which part of what the step watches is the new row of a client that arrived, `serve` may read them.
    """

    serve: Callable[[Tree, Tree, Ctx, Rows | None], tuple[Tree, dict[str, Tensor]]]  # -> (model, notes)
    notes: dict[str, int] = {}  # noqa: RUF012  the numbers that go along: name -> how many per client
    row: Callable[[Tree], Tree] = nothing  # model -> leaves [1, ...]
    keep: str = ""  # prefix of what is watched for rows alone, which `apply` does not look at


class Step(NamedTuple):
    """A part of the server: it watches arrivals and transforms the blended update."""

    apply: Callable[[Tree, Blended, Ctx], tuple[Tree, Tree, Report]]  # -> (update, state, report)
    init: Callable[[Tree, int], Tree] = nothing  # (model, clients) -> state
    watch: Callable[[Tree, Arrival], dict[str, Tensor]] = nothing  # per client [K, ...], scalars but for `keep`
    name: str = ""
    needs_mean: bool = False  # makes no sense after a blend that collects
    uniform: bool = False  # wants the unweighted mean too
    receive: Callable[[Tree, Arrival], Arrival] | None = None  # changes arrivals before they are weighed and blended
    serving: Serving | None = None
    pooled: Mapping[str, int] | None = None  # clients watch so many numbers of each name; their weighted means suffice

    @property
    def looks(self) -> bool:
        """Whether it looks at single updates, not at their mean alone."""
        keeps = self.serving is not None and bool(self.serving.keep)
        return keeps or self.watch is not nothing or self.uniform or self.receive is not None


class Meter(NamedTuple):
    """Measures uploads as they come, and changes nothing."""

    watch: Callable[[Parcel, Ctx], dict[str, Tensor]]  # per client [K, ...]
    report: Callable[[dict[str, Tensor]], Report]  # of all that was seen, in id order


class Weigh(NamedTuple):
    """How much every arrival counts, unnormalised; `seen` is kept by client id for `learn`.

    A recipe puts it in with `compose.weighed_by`. Weights are rounded to about 2^-29 of `most`, so keep it near.
    """

    of: Callable[[Tree, Arrival], tuple[Tensor, dict[str, Tensor]]]  # -> ([K] float64, seen)
    most: Callable[[Ctx], float]  # what the weights of a whole cohort add up to, at most
    init: Callable[[Tree, int], Tree] = nothing  # (model, clients) -> state
    learn: Callable[[Tree, Blended, Ctx], tuple[Tree, Report]] = lambda state, blended, ctx: (state, {})
    name: str = ""  # what errors call it
    looks: bool = True  # at updates; else weights are known beforehand, and stand on the host
    pooled: Mapping[str, int] | None = None  # clients weigh themselves; weighted means of so many numbers seen suffice


by_samples = Weigh(
    of=lambda state, arrival: (arrival.ctx.n.double(), {}),
    most=lambda ctx: float(ctx.n.sum()),
    name="samples",
    looks=False,
)
"""FedAvg's weights: how many samples each client has."""

evenly = Weigh(
    of=lambda state, arrival: (torch.ones(len(arrival.ctx.ids), dtype=torch.float64), {}),
    most=lambda ctx: float(ctx.cohort),
    name="uniform",
    looks=False,
)
"""Every client counts the same."""


Collector = Callable[[Models, Models, Tensor], tuple[Tree, Tree]]
"""(values, votes, weight) -> (update, where there is one); see `Blend`."""


class Blend(NamedTuple):
    """How arrivals become one update: weigh, reduce (a fold, or `collect` where everyone is needed), then steps.

    `collect(values, votes, weight)` sees everyone in id order: values `[n, *shape]`, votes bool `[n, *shape]`, weights
    `[n]` float64. It gives the update, float64 `[1, *shape]`, and where there is one, bool `[1, *shape]`. A recipe puts
    it in with `compose.collected_by`.
    """

    weigh: Weigh = by_samples
    collect: Collector | None = None  # None: the weighted mean
    steps: tuple[Step, ...] = ()
    meters: tuple[Meter, ...] = ()
    lenient: bool = False  # leave out arrivals that are not finite or far too large, instead of stopping the run


Grow = Callable[[Tree, int, Ctx], tuple[Tree, Masks]]
"""(tensors of one size, the size, ctx) -> tensors of full shape, and which part of each is covered."""


class Partition(NamedTuple):
    """Tensors whose parts are averaged apart, each over those who have it: `[K, parts, *shape]` until all have come."""

    names: frozenset[str]
    cut: Grow
    join: Callable[[Remembered, Tree, Blended], Blended]  # (the fit's state, model, mean parts) -> differences


class Gathering(NamedTuple):
    """Tensors blended from what every client made of its own, of whatever size, once all have come.

    The server writes them in another basis each round, so nothing can go on in their coordinates.
    """

    names: frozenset[str]
    blend: Callable[[Tree, list[Tree], Tensor, Ctx], tuple[Tree, Report]]  # (model, each client's values in id order,
    # weights `[n]`, ctx) -> (new values, float64 `[1, *shape]`, report); of what the model does not have, the update
    instead: str  # how to blend where coordinates must last


class Resize(NamedTuple):
    """How the server makes a client's model out of its own, and its own out of the clients'."""

    shrink: Callable[[Remembered, Tree, int, Ctx], Tree]  # (state, full model, size, ctx) -> models of that size
    grow: Grow
    init: Callable[[Tree], Remembered] = nothing  # model -> what the server remembers: a decomposition
    learn: Callable[[Remembered, Tree, Ctx], tuple[Remembered, Report]] = lambda state, model, ctx: (state, {})
    increments: bool = False  # a client counts by what it made of what it was sent, not by what the model is beside it
    partition: Partition | None = None  # in place of `grow`
    gathering: Gathering | None = None  # in place of `grow`, under a blend that collects


class Fit(NamedTuple):
    """Client models of other sizes; the server keeps the full one. All K clients of a call have equal size."""

    sizes: Callable[[Ctx], Tensor]  # [K], on the host: which size each client has
    layouts: tuple[Layout, ...]  # of every size
    resize: Resize
    module: Callable[[nn.Module, int], nn.Module]  # the network of that size, from the full one
    names: tuple[str, ...] = ()  # what to call each size
    within: bool = False  # smaller tensors are parts of the full ones: clients keep private ones in full shape
    kept: "Fit | None" = None  # in its place where clients keep private tensors: each has the same parts in all rounds
    check: Callable[[nn.Module, Any], None] = lambda model, x: None  # refuse a network that cannot be resized so

    def size(self, ctx: Ctx) -> int:
        """That of these K clients."""
        return int(self.sizes(ctx)[0])


class Phase(NamedTuple):
    """One stretch of local training."""

    epochs: int = 5
    steps: int | None = None  # exactly so many batches instead of epochs
    batch: int = 10
    optimiser: Optimiser = Optimiser()
    prox: float = 0.0  # FedProx: prox / 2 * |w - w_start|^2 joins the loss
    correct: bool = False  # add the lesson's `pull` to every gradient: SCAFFOLD
    frobenius: float = 0.0  # frobenius / 2 * |A B|^2 of every factored layer, instead of weight decay there
    trains: frozenset[str] | None = None  # None: every parameter
    holds: frozenset[str] = frozenset()  # tensors in which a weight that is zero stays zero: pruned ones

    def at(self, ctx: Ctx) -> "Phase":
        """As it is in this round, with the learning rate that its schedule gives."""
        if self.optimiser.schedule is None:
            return self
        return self._replace(optimiser=self.optimiser.at(ctx.round, ctx.rounds))

    def steps_with(self, n: int) -> int:
        """How many steps a client with n samples takes."""
        return self.epochs * -(-n // self.batch) if self.steps is None else self.steps


class Lesson(NamedTuple):
    """What K clients are to do: leaves `[K, *shape]`, or `[1, *shape]` where all start alike."""

    start: Tree
    memory: Tree  # what their training remembers from earlier rounds
    phases: tuple[Phase, ...]
    anchor: Tree | None = None  # what FedProx's term draws to, where it is not the start
    pull: Tree = {}  # noqa: RUF012  what is added to the gradients of phases that `correct`


class Trained(NamedTuple):
    """What came of it."""

    after: Mapping[str, Tensor]
    memory: Tree
    notes: dict[str, Tensor]  # at least "loss", [K]


Train = Callable[[Lesson, Ctx], Trained]


class Wrap(NamedTuple):
    """Something around local training: it changes the lesson, trains, perhaps twice, and adds to what came of it."""

    around: Callable[[Train, tuple[Phase, ...]], Train]
    phases: tuple[Phase, ...] = ()  # of its own training, if it has one


class Local(NamedTuple):
    """How a client trains."""

    phases: tuple[Phase, ...] = (Phase(),)
    buffers: str = "shared"  # "shared" | "own" (they stay with the client) | "static" (batch statistics only)
    init: Callable[[Layout], Tree] = nothing  # what a client's training remembers between rounds, leaves [1, ...]
    reset: bool = False  # forget it where the server has just written
    wraps: tuple[Wrap, ...] = ()  # the last one is outermost
    lost: Callable[[Parcel, Tree], Tree] = lambda decoded, memory: memory  # what is remembered of a lost upload
    tune: Callable[[tuple[Phase, ...]], tuple[Phase, ...]] | None = None  # for evaluation, if not as in a round
    used: Callable[[Tree], Tree] = lambda tree: tree  # which model a client uses, of the tensors that it has

    @property
    def wrapped_phases(self) -> tuple[Phase, ...]:
        """Of what is put around local training."""
        return tuple(phase for wrap in self.wraps for phase in wrap.phases)

    def each_phase(self, change: Callable[[Phase], Phase]) -> "Local":
        """The same with every phase changed, those of its wraps too."""
        wraps = tuple(wrap._replace(phases=tuple(map(change, wrap.phases))) for wrap in self.wraps)
        return self._replace(phases=tuple(map(change, self.phases)), wraps=wraps)


class Privacy(NamedTuple):
    """What a method promises its clients; an accountant turns it into epsilon, rules of its part hold it up."""

    noise: float  # its standard deviation on a sum of updates, by the largest length that one of them can have
    mode: str = "central"  # the server adds it to the sum; or "local": every client to its own update; or "summed":
    # every client a part of it, so that a secure sum of them has it
    epsilon: float | None = None  # the run ends before more than this is spent
    delta: float | None = None  # by default 1 / clients^1.1
    secret: bool = True  # noise and cohorts come from a secret; else from the seed, which protects nobody


class Broadcast(NamedTuple):
    """How the server writes its update, once a round for everyone, after all of its steps; see `core.versions`."""

    stages: tuple[Codec, ...]
    memory: bool = True  # error feedback: what an update could not say is added to the next
    seeded: bool = False  # clients build the first model from the seed, so a newcomer misses updates only
    over: frozenset[str] | None = None  # the only tensors it is of: clients do not send them, and the others go down
    # as where nothing is broadcast; what the blended update has beside the model is written. None: it is of all


class Summed(NamedTuple):
    """The server sees sums of arrivals only, by secure aggregation."""

    honest: Callable[[int], int]  # how many honest clients, of a cohort of this size, are in every sum at least


class Method(NamedTuple):
    """A complete method over one model layout. `compose` builds it, `core.round` runs it."""

    layout: Layout
    share: Share
    up: tuple[Codec, ...] = ()
    memory: bool = False  # error feedback over the whole uplink
    blend: Blend = Blend()
    fit: Fit | None = None
    local: Local = Local()
    broadcast: Broadcast | None = None  # None: clients are sent values, and the model moves by the update itself
    extra: Callable[[Tree], Tree] = nothing  # model -> tensors that stand beside it, such as control variates
    privacy: Privacy | None = None
    probe: bool = False  # `Share.look` is shown the gradient on the server's probe set, at each new model
    arrives: bool = False  # no upload is ever lost
    summed: Summed | None = None  # None: the server sees every arrival
    words: Words = fresh_words  # where its parts take secret randomness from; who runs the method gives it
    secret: bool = False  # whether one of them does
    rules: tuple["Rule", ...] = ()  # what its parts refuse beside them; see `core.rules`
    size: int | None = None  # set where this is the method as clients of one size see it
    sizes: tuple["Method", ...] = ()  # with a fit: share and codecs over the layout of each size


Rule = Callable[[Method], None]
"""Raises a MethodError where a part makes no sense in this method."""
Recipe = Callable[[Method], Method]


class Remade(NamedTuple):
    """A recipe for another network than the task's; `compose.remake_model` calls `model` before the layout is taken."""

    apply: Recipe
    model: Callable[[nn.Module, bool, int], nn.Module]  # (the task's network, whether buffers are static, seed)

    def __call__(self, method: Method) -> Method:
        return self.apply(method)


Gradient = Callable[[Tree], Tree]
"""Of the loss on the server's probe set, at this model: leaves `[1, *shape]`."""
