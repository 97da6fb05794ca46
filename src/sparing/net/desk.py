"""The desk: the engine of a server whose clients are elsewhere. It writes letters, and counts the answers.

Whatever one answer is like, the worst that it can do is that this client is absent in this round: it is as if the round
had never happened to it. Nothing of a round leaves before the checkpoint of the round before is on disk, which is the
caller's business (`runs.loop`).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import SparingError, WireError
from sparing.core.round import Server, begin, settle
from sparing.engines.engine import Evaluation, Job, Marks, Outcome, cohort_context
from sparing.engines.evaluation import Wanted, evaluate
from sparing.engines.outcome import read_later
from sparing.net.asking import Clock, Post, Waiting
from sparing.net.audit import AuditLog
from sparing.net.client_scores import ClientScores, Whose, read_scores, write_model
from sparing.net.key_book import PublicKeyBook
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
from sparing.net.node import SHARED_KEY_BYTES
from sparing.net.roster import ClientRoster
from sparing.net.round_table import RoundTable
from sparing.net.secure_table import SecureTable
from sparing.net.terms import digest_of
from sparing.runs.privacy.secret import Secret
from sparing.runs.study import NetworkSection
from sparing.storage.bank import MemoryBank
from sparing.train.named_metrics import ACCURACY

WHOSE = {"global": Whose.GLOBAL, "before": Whose.BEFORE, "after": Whose.AFTER}


class Progress(NamedTuple):
    """Where a round stands, for whoever watches."""

    round: int
    asked: int
    counted: int
    waiting: tuple[int, ...]  # clients
    bytes: int  # up, so far
    refused: int


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
        self.waiting = Waiting(post, section, self.audit, self.clock)
        self.keys = PublicKeyBook()  # of clients, where uploads are summed under masks
        self.folder: Path | None = None  # of the run, where a sum is kept while it is unmasked

    def start(self, server: Server, ids: Tensor, t: int) -> tuple[Server, Callable[[], Outcome]]:
        server, outcome = self.round(server, ids, t)
        return server, lambda: outcome

    def round(self, server: Server, ids: Tensor, t: int) -> tuple[Server, Outcome]:
        job, method = self.job, self.job.method
        cohort = cohort_context(job, server, ids, t)
        table = (SecureTable if job.secure else RoundTable)(self, server, cohort, begin(method, server, cohort))
        with torch.no_grad():
            table.play()
            counted = torch.tensor([k for k, who in enumerate(ids.tolist()) if who in table.counted], dtype=torch.int64)
            taking_part, report = cohort.at(counted), {}
            if table.counted:
                server, report = settle(method, server, table.fold, taking_part, job.gradient)
        tally = table.tally()
        return server, tally.outcome(*read_later([], tally.losses, report, table.report)())

    def tell(self, t: int, asked: int, counted: set[int], waiting: list[int], sent: int) -> None:
        """Whoever watches, where round t stands."""
        self.watch(Progress(t, asked, len(counted), tuple(waiting), sent, self.audit.refusals))

    @contextmanager
    def blaming(self, t: int, who: int) -> Iterator[None]:
        """Whatever a stranger's bytes lead to inside, it is the stranger who is left out."""
        try:
            yield
        except Exception as error:
            said = str(error) if isinstance(error, SparingError) else f"{type(error).__name__}: {error}"
            self.audit.refuse(t, who, said)

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
                    letter = self.joined_answer(data, who, "this greeting")
                    if self.job.secure:
                        self.keys.add(who, letter.body)
                    self.roster.joined(who, letter.n, self.section.most_samples)
                    self.joined.add(who)
                except SparingError as error:
                    self.audit.refuse(t, who, str(error))

    def share_keys(self, clients: list[int], seconds: float, t: int = 0) -> None:
        """Tell these clients everybody's public keys."""
        head = Letter(Kind.KEYS, self.run, digest_of(self.terms), 0, t, clients=len(self.roster))
        head = head._replace(body=self.keys.text().encode())
        letters = ((who, write_letter(head._replace(client=who, n=self.samples_of(who)))) for who in clients)
        with closing(self.post.exchange(letters, seconds, lambda who: HEAD_BYTES + 4 * MOST_SENTENCE)) as answers:
            for who, data in answers:
                with self.blaming(t, who):
                    self.joined_answer(data, who, "everybody's keys")
                    self.keys.confirmed.add(who)

    def joined_answer(self, data: bytes, who: int, asked: str) -> Letter:
        """The answer JOINED of this client to what was asked, if it is one."""
        letter = _accepted_letter(data, 4 * MOST_SENTENCE)
        if letter.kind != Kind.JOINED or (letter.run, letter.client) != (self.run, who):
            raise WireError(f"an answer to something else than {asked}")
        return letter

    def samples_of(self, who: int) -> int:
        return self.roster.entries[who].samples or 0

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
                        asked = self.letter(Kind.EVALUATE, server, rows[who])
                        letter = self.checked(data, _longest_scores(who), asked, Kind.SCORES)
                        if letter.kind == Kind.NEED:
                            raise WireError("the node has lost its state; it is asked again in a round")
                        scores[who] = read_scores(letter.body, ACCURACY in self.job.task.metrics)
                        sent["evaluation_up_bytes"] += len(letter.body)
                    except Exception as error:  # as in a round: it is the stranger who is left out
                        self.audit.refuse(cohort.round - 1, who, str(error))
        return _marks_of_scores(scores, server)

    @property
    def patience(self) -> float:
        """Seconds that an evaluation waits."""
        return self.section.deadline or self.section.resend

    def checked(self, data: bytes, most: int, asked: Letter, *kinds: Kind) -> Letter:
        """The answer to this letter, if it is one: of these kinds, or that the node needs everything first."""
        letter = _accepted_letter(data, most)
        for name in ("run", "terms", "client", "round", "n", "first"):
            if getattr(letter, name) != getattr(asked, name):
                raise WireError(f"an answer to another letter (its {name} differs); late, or somebody else's")
        if letter.kind not in (*kinds, Kind.NEED):
            raise WireError(f"an answer of kind {letter.kind.name} to a letter that asks for {kinds[0].name}")
        return letter


def _accepted_letter(data: bytes, most: int) -> Letter:
    """What a node answers, unless it refuses."""
    letter = read_letter(data, most)
    if letter.kind == Kind.REFUSED:
        raise WireError(f"refused by the node: {read_sentence(letter.body)}")
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
