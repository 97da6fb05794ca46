"""The plain engine: one client at a time, every parcel really encoded and decoded, errors that name the place.

It is what the fast engine is checked against, and the one to read first.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.download import download_kinds, read_download, write_download
from sparing.core.errors import MethodError, SparingError, TrainingError
from sparing.core.method import Rows
from sparing.core.parcel import Parcel, Schema, map_tensors
from sparing.core.round import (
    Server,
    begin,
    client_claiming,
    incoming,
    mark_met,
    outgoing,
    parcel_about,
    put_back,
    schema_down,
    schema_up,
    settle,
)
from sparing.core.tree import Tree, tree_sha256
from sparing.core.versions import NEVER, copy_of
from sparing.engines.divergence import Divergence
from sparing.engines.engine import (
    TRAIN_LOSS,
    Evaluation,
    Job,
    Outcome,
    Post,
    Sizes,
    Tally,
    cohort_context,
    sizes_of_arrived,
    without_absent,
)
from sparing.engines.evaluation import Wanted, evaluate
from sparing.engines.masked_round import cohort_of_sum, hidden_losses, open_masked_round
from sparing.engines.outcome import read_later
from sparing.secure_round.one_process import SimulatedNodes
from sparing.wire import from_bytes, parcel_sizes, schema_of, to_bytes


class Reference:
    def __init__(self, job: Job, bank: Rows, post: Post = lambda ctx, way, data, schema: None):
        self.job, self.bank, self.post = job, bank, post
        self.nodes = SimulatedNodes(job.secure.policy, job.seed) if job.secure else None

    def start(self, server: Server, ids: Tensor, t: int) -> tuple[Server, Callable[[], Outcome]]:
        server, outcome = self.round(server, ids, t)
        return server, lambda: outcome

    def round(self, server: Server, ids: Tensor, t: int) -> tuple[Server, Outcome]:
        method = self.job.method
        cohort = cohort_of_sum(self.job, cohort_context(self.job, server, ids, t))
        fold, tally, stale = begin(method, server, cohort), Tally(), Divergence(method, server.model)
        watched = stale.watching(method)
        copies: dict[int, Tree] = {}
        with torch.no_grad():
            taking_part = without_absent(self.job, server, cohort, tally)
            masked = open_masked_round(self.job, self.nodes, server, cohort, taking_part, tally, whole=True)
            for k in range(len(taking_part.ids)):
                ctx = taking_part.at(slice(k, k + 1))
                with _stage("writing the download", ctx):
                    down = outgoing(method, server, ctx)
                    posted = write_download(method, server.past, down, ctx)
                    behind_K, kinds = download_kinds(method, server.past, down, ctx)
                    sent = partial(_counted_bytes, kinds, posted)
                    sent()
                with _stage("reading the download", ctx):
                    expected = schema_down(method, self.job.initial, ctx)
                    got, parts = read_download(method, posted, expected, *self.held(server, ctx, copies), ctx)
                    if bool(behind_K[0]):
                        refuse_other(got, down)
                    self.post(ctx, "down", posted, parts)
                    ctx = self.job.timed(ctx, sent)
                with _stage("local training and writing the upload", ctx):
                    fleet, before = self.job.fleet, self.bank.read(ctx.ids)
                    up, honest, state = client_claiming(watched, before, got, self.job.train, ctx, fleet.claim)
                    if not method.blend.lenient:
                        refuse_infinite(honest, ctx)
                    returned = to_bytes(up, 0, f"{parcel_about(ctx)}/up")
                    back = partial(_counted_bytes, parcel_sizes(up), returned)
                    back()
                gone_K = masked.gone(ctx) if masked else self.job.gone(ctx, back)
                if bool(gone_K.all()):
                    state = put_back(method, state, honest, gone_K, ctx)
                elif masked:
                    with _stage("adding to the secure sum", ctx):
                        masked.take(got, up, ctx)
                else:
                    with _stage("reading the upload", ctx):
                        expected = schema_up(method, down, ctx)
                        refuse_unannounced(up, expected)
                        arrived = self.here(from_bytes(returned, expected))
                        self.post(ctx, "up", returned, [expected])
                    with _stage("blending", ctx), fleet.blamed():
                        if not method.blend.lenient:
                            fleet.refuse_nan(arrived, gone_K, ctx)
                        incoming(method, server, fold, down, arrived, ctx)
                self.bank.write(ctx.ids, state)
                if masked:
                    tally.add(ctx, masked.down(sent, ctx), partial(masked.up, ctx), hidden_losses(ctx), gone_K)
                else:
                    tally.add(ctx, sent, sizes_of_arrived(back, gone_K), up.notes["loss"], gone_K)
            said = {TRAIN_LOSS: masked.unmask(fold, taking_part)} if tally.arrivals and masked else {}
            if tally.arrivals:
                server, report = settle(method, server, fold, taking_part, self.job.gradient)
            else:
                server, report = mark_met(server, taking_part), {}
        return server, tally.outcome(*read_later([], tally.losses, report, stale.report(), said)())

    def held(self, server: Server, ctx: Ctx, copies: dict[int, Tree]) -> tuple[Tree, int]:
        """What this client keeps of its last download, replayed here once a round, and the round of it."""
        served = int(server.past["held"][int(ctx.ids[0])]) if "held" in server.past else NEVER
        if served not in copies:
            copies[served] = copy_of(self.job.method, server.model, server.past, served, ctx)
        return copies[served], served

    def here(self, parcel: Parcel) -> Parcel:
        """Bytes arrive on the CPU; training may happen elsewhere."""
        device = next(iter(self.job.initial.values())).device
        return map_tensors(parcel, lambda x: x.to(device))

    def evaluate(self, server: Server, t: int, wanted: Wanted) -> Evaluation:
        return evaluate(self.job, self.bank, server, t, wanted)


@contextmanager
def _stage(what: str, ctx: Ctx) -> Iterator[None]:
    """Whatever goes wrong inside says in which round, for which client and while doing what."""
    where = f"round {ctx.round}, client {int(ctx.ids[0])}, {what}"
    try:
        yield
    except SparingError as error:
        raise type(error)(f"{where}: {error}") from error
    except Exception as error:
        raise SparingError(f"{where}: {type(error).__name__}: {error}") from error


def _counted_bytes(kinds: Sizes, posted: bytes) -> Sizes:
    """The sizes by kind, which must add up to the bytes really written."""
    total = sum(int(x[0]) for x in kinds.values())
    if total != len(posted):
        raise SparingError(f"counted {total} bytes but wrote {len(posted)}; this is a bug, please report it")
    return kinds


def refuse_other(got: Parcel, meant: Parcel) -> None:
    """What a client makes of the updates it was sent must be the server's model, in every bit."""
    one, other = (tree_sha256({name: leaf.value for name, leaf in parcel.leaves.items()}) for parcel in (got, meant))
    if one != other:
        raise SparingError("a client's model differs from the server's; this is a bug, please report it")


def refuse_unannounced(parcel: Parcel, expected: Schema) -> None:
    """What the codecs wrote must be what their schemas told the server, who would not know what to read else."""
    written = schema_of(parcel, expected.about)
    if written.leaves.keys() != expected.leaves.keys():
        return  # the share's business: see `core.round`
    for name, spec in expected.leaves.items():
        for field in ("shape", "dtype", "told", "grains", "scales", "tight"):
            there, told = getattr(written.leaves[name], field), getattr(spec, field)
            if there != told:
                raise MethodError(
                    f"of {name!r} the codecs write {field} {there}, and their schema says {told}; make the `schema` of "
                    "the codec that you wrote last say what its `encode` gives"
                )


def refuse_infinite(parcel: Parcel, ctx: Ctx) -> None:
    for name, leaf in parcel.leaves.items():
        if not bool(torch.isfinite(leaf.value).all()):
            raise TrainingError(f"the update of layer {name!r} is not finite; lower local.lr or set local.clip")
