"""The desk: the engine of a server whose clients are elsewhere. It writes letters, and counts the answers.

Whatever one answer is like, the worst that it can do is that this client is absent in this round: it is as if the round
had never happened to it. Nothing of a round leaves before the checkpoint of the round before is on disk, which is the
caller's business (`runs.loop`).
"""

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.download import download_kinds, write_download
from sparing.core.errors import FederationError, SparingError, WireError
from sparing.core.fold import Collect, Fold
from sparing.core.parcel import Parcel, map_tensors
from sparing.core.round import Server, begin, incoming, outgoing, schema_up, settle
from sparing.core.versions import commonly_held, first_held
from sparing.engines.engine import Evaluation, Job, Marks, Outcome, Sizes, Tally, cohort_context
from sparing.engines.evaluation import Wanted, evaluate
from sparing.engines.outcome import read_later
from sparing.net.audit import AuditLog
from sparing.net.client_scores import ClientScores, Whose, read_scores, write_model
from sparing.net.letter import (
    CAPACITIES,
    HEAD_BYTES,
    MOST_SENTENCE,
    Kind,
    Letter,
    read_letter,
    read_sentence,
    write_letter,
)
from sparing.net.node import SHARED_KEY_BYTES, model_digest
from sparing.net.roster import ClientRoster
from sparing.net.terms import digest_of
from sparing.runs.privacy.secret import Secret
from sparing.runs.study import NetworkSection
from sparing.storage.bank import MemoryBank
from sparing.train.named_metrics import ACCURACY
from sparing.wire import from_bytes, parcel_sizes
from sparing.wire.bound import most_bytes

LONGEST_PAUSE = 3600.0
CARRIER_PAUSE = 1.0
WHOSE = {"global": Whose.GLOBAL, "before": Whose.BEFORE, "after": Whose.AFTER}


class Clock:
    """The time, in seconds, and a way to let some pass."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Post(Protocol):
    """Carries letters to clients and their answers back."""

    def exchange(
        self, letters: Iterator[tuple[int, bytes]], seconds: float, most: Callable[[int], int]
    ) -> Generator[tuple[int, bytes], None, None]:
        """Answers as they come, until everybody has answered, this time is over, or the carrier has broken down;
        `most` bytes of each at most.

        From whom an answer is, the carrier knows; what the answer itself says is not asked.
        """
        ...


class Progress(NamedTuple):
    """Where a round stands, for whoever watches."""

    round: int
    asked: int
    counted: int
    waiting: tuple[int, ...]  # clients
    bytes: int  # up, so far
    refused: int


class _Asked(NamedTuple):
    """One client of a round."""

    ctx: Ctx
    server: Server  # as this client is to see it
    sizes: Sizes  # of its download
    most: int  # bytes of its answer


class Desk:
    """Plays rounds with clients that `post` reaches; `watch` is told how a round goes."""

    def __init__(
        self,
        job: Job,
        post: Post,
        roster: ClientRoster,
        section: NetworkSection,
        run: bytes,
        terms: bytes,
        secret: Secret | None = None,
        audit: AuditLog | None = None,
        watch: Callable[[Progress], None] = lambda progress: None,
        clock: Clock | None = None,
    ):
        self.job, self.post, self.roster, self.section = job, post, roster, section
        self.run, self.terms, self.audit = run, terms, audit or AuditLog()
        self.secret, self.joined = secret, set[int]()
        self.watch, self.clock = watch, clock or Clock()

    def start(self, server: Server, ids: Tensor, t: int) -> tuple[Server, Callable[[], Outcome]]:
        server, outcome = self.round(server, ids, t)
        return server, lambda: outcome

    def round(self, server: Server, ids: Tensor, t: int) -> tuple[Server, Outcome]:
        job, method = self.job, self.job.method
        cohort = cohort_context(job, server, ids, t)
        table = RoundTable(self, server, cohort, begin(method, server, cohort))
        with torch.no_grad():
            table.play()
            counted = torch.tensor([k for k, who in enumerate(ids.tolist()) if who in table.counted], dtype=torch.int64)
            taking_part = cohort.at(counted)
            server, report = settle(method, server, table.fold, taking_part, job.gradient)
        tally = table.tally()
        return server, tally.outcome(*read_later([], tally.losses, report)())

    def greet(self, clients: list[int], seconds: float, t: int = 0) -> None:
        """Tell these clients the terms; the number of samples of those who join is written into the roster."""
        n, digest = len(self.roster), digest_of(self.terms)

        def hello() -> Iterator[tuple[int, bytes]]:
            for who in clients:
                key = self.secret.of_client(who).shared if self.secret else bytes(SHARED_KEY_BYTES)
                yield who, write_letter(Letter(Kind.HELLO, self.run, digest, who, t, clients=n, body=key + self.terms))

        with closing(self.post.exchange(hello(), seconds, lambda who: HEAD_BYTES + 4 * MOST_SENTENCE)) as answers:
            for who, data in answers:
                try:
                    letter = read_letter(data, 4 * MOST_SENTENCE)
                    if letter.kind == Kind.REFUSED:
                        raise WireError(f"refused by the node: {read_sentence(letter.body)}")
                    if letter.kind != Kind.JOINED or (letter.run, letter.client) != (self.run, who):
                        raise WireError("an answer to something else than this greeting")
                    self.roster.joined(who, letter.n, self.section.most_samples)
                    self.joined.add(who)
                except SparingError as error:
                    self.audit.refuse(t, who, str(error))

    def letter(self, kind: Kind, server: Server, ctx: Ctx, body: bytes = b"", model: bytes = bytes(16)) -> Letter:
        """To one client (K = 1)."""
        client = int(ctx.ids[0])
        capacity = ctx.capacity or {}
        return Letter(
            kind,
            self.run,
            digest_of(self.terms),
            client,
            round=ctx.round,
            settled=int(server.met[client]),
            first=bool(ctx.first is not None and ctx.first[0]),
            cohort=ctx.cohort,
            rounds=ctx.rounds,
            clients=ctx.clients,
            held=ctx.held,
            samples=ctx.samples,
            n=int(ctx.n[0]),
            capacity=tuple(float(capacity[name][0]) if name in capacity else math.nan for name in CAPACITIES),
            model=model,
            body=body,
        )

    def evaluate(self, server: Server, t: int, wanted: Wanted) -> Evaluation:
        """The global model on the server's own test samples; clients' models on theirs, if they are to be asked."""
        nobody = MemoryBank({}, len(self.roster))
        found = evaluate(self.job, nobody, server, t, wanted._replace(ids=wanted.ids[:0], who=()))
        if self.section.evaluate == "server":
            return found
        marks, sent = {}, {"evaluation_down_bytes": 0.0, "evaluation_up_bytes": 0.0}
        for who in wanted.who:
            if who in WHOSE:
                marks[who] = self.ask_scores(
                    server, cohort_context(self.job, server, wanted.ids, t + 1), WHOSE[who], sent
                )
        return found._replace(marks=marks, asked=found.asked | sent)

    def ask_scores(self, server: Server, cohort: Ctx, whose: Whose, sent: dict[str, float]) -> Marks:
        """One exchange, twice where somebody does not answer: an evaluation waits for nobody."""
        scores: dict[int, ClientScores] = {}
        rows = {who: cohort.at(slice(k, k + 1)) for k, who in enumerate(cohort.ids.tolist())}

        def letters() -> Iterator[tuple[int, bytes]]:
            for who, ctx in rows.items():
                if who not in scores:
                    body = write_model(self.job, server, whose, ctx)
                    sent["evaluation_down_bytes"] += len(body)
                    yield who, write_letter(self.letter(Kind.EVALUATE, server, ctx, body))

        for _ in range(2):
            if len(scores) == len(rows):
                break
            with torch.no_grad(), closing(self.post.exchange(letters(), self.patience, _longest_scores)) as answers:
                for who, data in answers:
                    try:
                        letter = self.checked(data, _longest_scores(who), self.letter(Kind.EVALUATE, server, rows[who]))
                        if letter.kind != Kind.SCORES:
                            raise WireError(f"an answer of kind {letter.kind.name} to a letter that asks for scores")
                        scores[who] = read_scores(letter.body, ACCURACY in self.job.task.metrics)
                        sent["evaluation_up_bytes"] += len(letter.body)
                    except Exception as error:  # as in a round: it is the stranger who is left out
                        self.audit.refuse(cohort.round - 1, who, str(error))
        return _marks_of_scores(scores, server)

    @property
    def patience(self) -> float:
        """Seconds that an evaluation waits."""
        return self.section.deadline or self.section.resend

    def checked(self, data: bytes, most: int, asked: Letter) -> Letter:
        """The answer to this letter, if it is one."""
        letter = read_letter(data, most)
        if letter.kind == Kind.REFUSED:
            raise WireError(f"refused by the node: {read_sentence(letter.body)}")
        for name in ("run", "terms", "client", "round", "n", "first"):
            if getattr(letter, name) != getattr(asked, name):
                raise WireError(f"an answer to another letter (its {name} differs); late, or somebody else's")
        return letter


def _longest_scores(who: int) -> int:
    return HEAD_BYTES + 4 * MOST_SENTENCE


def _marks_of_scores(scores: dict[int, ClientScores], server: Server) -> Marks:
    ids = torch.tensor(sorted(scores), dtype=torch.int64)
    table = [scores[who] for who in ids.tolist()]
    samples = torch.tensor([one.samples for one in table])
    hits, loss = (
        torch.tensor([x / max(one.samples, 1) for x, one in pairs], dtype=torch.float64)
        for pairs in ([(one.hits, one) for one in table], [(one.loss, one) for one in table])
    )
    return Marks(ids, samples, hits, loss, torch.full_like(hits, math.nan), server.seen[ids])


class RoundTable:
    """One round at the desk: who was asked, who has answered, and what it comes to so far."""

    def __init__(self, desk: Desk, server: Server, cohort: Ctx, fold: Fold | Collect):
        self.desk, self.fold, self.job = desk, fold, desk.job
        ids = cohort.ids.tolist()
        self.server, self.t = server, cohort.round
        self.rows = {who: cohort.at(slice(k, k + 1)) for k, who in enumerate(ids)}
        self.counted: dict[int, tuple[Sizes, Tensor]] = {}  # client -> bytes of its upload, its loss
        self.lost: set[int] = set()  # clients that have lost their state
        self.asked: dict[int, _Asked] = {}
        self.enough = min(len(ids), math.ceil(len(ids) / (1 + desk.section.over) - 1e-9))
        self.bytes = 0

    def play(self) -> None:
        """Ask until enough have answered, the deadline has passed with a quorum, or it has passed too often."""
        section, clock, began, tries = self.desk.section, self.desk.clock, self.desk.clock.now(), 0
        pause = section.resend
        while len(self.counted) < self.enough:
            left = math.inf
            if section.deadline is not None:
                left = began + (tries + 1) * section.deadline - clock.now()
                if left <= 0 and len(self.counted) >= self.quorum:
                    return
                if left <= 0 and tries >= section.retries:
                    raise FederationError(self.too_few())
                if left <= 0:
                    tries, pause = tries + 1, section.resend
                    continue
            pause, again = min(pause, left), clock.now() + min(pause, left)
            refused = self.desk.audit.refusals
            self.ask(pause)
            rest = again - clock.now()
            if len(self.counted) < self.enough and rest > 0:  # who refused is not asked at once; a carrier comes back
                clock.sleep(rest if self.desk.audit.refusals > refused else min(rest, CARRIER_PAUSE))
            pause = min(2 * pause, LONGEST_PAUSE)

    @property
    def quorum(self) -> int:
        said = self.desk.section.quorum
        return max(1, said if isinstance(said, int) else math.ceil(said * self.enough - 1e-9))

    def too_few(self) -> str:
        missing = [who for who in self.rows if who not in self.counted]
        why = next(
            (f"; client {who}: {self.desk.audit.reasons[who]}" for who in missing if who in self.desk.audit.reasons), ""
        )
        return (
            f"round {self.t} has {len(self.counted)} uploads and needs {self.quorum} (network.quorum), after "
            f"{self.desk.section.retries + 1} deadlines of {self.desk.section.deadline:g} s; missing: clients "
            f"{', '.join(map(str, missing[:10]))}{why}. Nothing is lost: bring them back and resume"
        )

    def ask(self, seconds: float) -> None:
        """One exchange with everybody who has not answered; who needs everything is greeted and asked once more."""
        needy = self.collect([who for who in self.rows if who not in self.counted], seconds)
        if needy:
            self.desk.greet(needy, seconds, self.t)
            self.collect(needy, seconds)

    def collect(self, clients: list[int], seconds: float) -> list[int]:
        """Count what these clients answer; gives those of them who need everything first."""
        needy: list[int] = []
        with closing(self.desk.post.exchange(self.letters(clients), seconds, self.most)) as answers:
            for who, data in answers:
                if who in self.rows and who not in self.counted and self.take(who, data):
                    needy.append(who)
                self.tell()
                if len(self.counted) >= self.enough:
                    return []
        return needy

    def tell(self) -> None:
        waiting = tuple(who for who in self.rows if who not in self.counted)
        audit = self.desk.audit
        self.desk.watch(Progress(self.t, len(self.rows), len(self.counted), waiting, self.bytes, audit.refusals))

    def most(self, who: int) -> int:
        """Bytes of an answer worth reading."""
        return self.asked[who].most if who in self.asked else 0

    def letters(self, clients: list[int]) -> Iterator[tuple[int, bytes]]:
        """Made one by one, as the carrier takes them: they may be large."""
        for who in clients:
            ctx, server = self.seen_by(who)
            down = outgoing(self.job.method, server, ctx)
            body = write_download(server.past, down, ctx)
            sizes = download_kinds(server.past, down, ctx)[1]
            expected = schema_up(self.job.method, down, ctx)
            self.asked[who] = _Asked(ctx, server, sizes, HEAD_BYTES + max(most_bytes(expected), 4096))
            yield who, write_letter(self.desk.letter(Kind.TRAIN, server, ctx, body, self.digest(down)))

    def seen_by(self, who: int) -> tuple[Ctx, Server]:
        """The round and the server as this client is to see them; one that has lost its state is met anew."""
        ctx = self.rows[who]
        if who not in self.lost:
            return ctx, self.server
        ctx = ctx._replace(members=ctx.members._replace(first=torch.tensor([True])))
        past = self.server.past
        if "held" in past:
            place = torch.tensor([who], device=past["held"].device)
            past = past | {"held": past["held"].index_fill(0, place, first_held(self.job.method))}
        return ctx, self.server._replace(past=past)

    def digest(self, down: Parcel) -> bytes:
        """Of the model that a client holds from this round on, where the server broadcasts."""
        names = commonly_held(self.job.method)
        return model_digest({n: down.leaves[n].value for n in names if n in down.leaves}) if names else bytes(16)

    def take(self, who: int, data: bytes) -> bool:
        """Count an answer, or write down why not. True: this client needs everything first."""
        desk = self.desk
        try:
            letter = desk.checked(data, self.most(who), desk.letter(Kind.TRAIN, self.server, self.asked[who].ctx))
            if letter.kind == Kind.NEED:
                if who in self.lost:
                    raise WireError("the node asks for everything twice in a round")
                self.lost.add(who)
                desk.audit.refuse(self.t, who, "has lost its state, and is sent everything")
                return True
            if letter.kind != Kind.UPLOAD:
                raise WireError(f"an answer of kind {letter.kind.name} to a letter that asks for an upload")
            self.count(who, letter.body)
        except Exception as error:  # whatever a stranger's bytes lead to, it is the stranger who is left out
            said = str(error) if isinstance(error, SparingError) else f"{type(error).__name__}: {error}"
            desk.audit.refuse(self.t, who, said)
        return False

    def count(self, who: int, upload: bytes) -> None:
        ctx, server, method = self.asked[who].ctx, self.asked[who].server, self.job.method
        down = outgoing(method, server, ctx)
        device = server.device
        arrived = from_bytes(upload, schema_up(method, down, ctx))
        sizes = {kind: x.cpu() for kind, x in parcel_sizes(arrived).items()}
        if sum(int(x[0]) for x in sizes.values()) != len(upload):
            raise WireError(f"an upload of {len(upload)} bytes that says no more than a shorter one would")
        hidden = method.privacy is not None and method.privacy.mode == "local"  # then everybody says 1
        told, n = float(arrived.notes["n"][0]), 1 if hidden else int(ctx.n[0])
        if told != n:
            raise WireError(f"an upload of {told:g} samples, where {n} must be said")
        loss = arrived.notes["loss"]
        if not bool(torch.isfinite(loss).all()):
            raise WireError(f"client {who} says its loss is {float(loss[0])}, which is no number to go on with")
        left_out = self.fold.roster.refused
        incoming(method, server, self.fold, down, map_tensors(arrived, lambda x: x.to(device)), ctx)
        if self.fold.roster.refused > left_out:
            self.desk.audit.refuse(
                self.t, who, "its numbers are not finite or too large, and the blend leaves them out"
            )
        self.counted[who] = (sizes, loss)
        self.bytes += len(upload)

    def tally(self) -> Tally:
        tally = Tally()
        some = next(iter(self.asked.values())).sizes
        nothing = {kind: torch.zeros_like(x) for kind, x in some.items()}
        for who in sorted(self.rows):
            asked = self.asked.get(who)
            if asked is None:  # enough had answered before its letter was written
                tally.add_absent(self.rows[who], nothing)
                continue
            if who not in self.counted:
                tally.add_absent(asked.ctx, asked.sizes)
                continue
            sizes, loss = self.counted[who]
            gone_K = torch.zeros(1, dtype=torch.bool)
            tally.add(asked.ctx, lambda down=asked.sizes: down, lambda up=sizes: up, loss, gone_K)
        return tally
