"""A node: the clients' side of a federation. It takes letters and gives letters; how they travel is not its business.

Whatever comes is a stranger's until it is checked. A letter that was answered before gets the same answer, so that
nothing is trained twice because a reply was lost, and a letter that contradicts what this node knows gets one sentence.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from sparing.core.context import Ctx, context
from sparing.core.download import parcel_about, read_download
from sparing.core.errors import CheckpointError, ConfigError, SecureError, SparingError, WireError
from sparing.core.parcel import Parcel
from sparing.core.round import client as client_round
from sparing.core.round import first_client, schema_down
from sparing.core.tree import Tree, tree_sha256
from sparing.core.versions import commonly_held, first_held
from sparing.data.clients import Pair
from sparing.engines.engine import Job
from sparing.engines.reference import refuse_infinite
from sparing.net import client_scores
from sparing.net.letter import CAPACITIES, Kind, Letter, printable, read_letter, sentence_body, write_letter
from sparing.net.node_sums import NodeSums, SumRules
from sparing.net.store import Kept, Pending, Store
from sparing.net.terms import OwnCode, digest_of, node_job, read_terms
from sparing.runs.privacy.secret import ClientSecret, new_client_secret
from sparing.secure.sum_terms import SumTerms, read_sum_terms, write_sum_terms
from sparing.secure_round.sum_layout import sum_layout
from sparing.secure_round.sum_notice import read_notice, write_notice
from sparing.secure_round.summands import RoundSum, client_vector, read_vector, write_vector
from sparing.secure_round.told_alike import told_alike
from sparing.wire import to_bytes

MOST_LETTER = 2 << 30
SHARED_KEY_BYTES = 32


class Holding(NamedTuple):
    """The samples of one client."""

    train: Pair
    test: Pair | None = None

    @property
    def n(self) -> int:
        return len(self.train[1])


Told = Callable[[str], None]
"""Is told a line about what happened."""


class Node:
    """Some clients of one machine. `holdings` has their samples by client; the key None is for a client whose number
    the server has not said yet."""

    def __init__(
        self,
        store: Store,
        holdings: Mapping[int | None, Holding],
        own: OwnCode | None = None,
        tell: Told = lambda line: None,
        secrets: Mapping[int, ClientSecret] | None = None,
        rules: SumRules = SumRules(),
    ):
        self.store, self.holdings, self.own, self.tell = store, dict(holdings), own or OwnCode(), tell
        self.secrets = dict(secrets or {})  # handed in, to repeat a simulation
        self.rules = rules  # for secure sums
        self.sums: dict[int, NodeSums] = {}
        self.kept: dict[int, Kept] = {}
        self.jobs: dict[int, Job] = {}
        self.busy = threading.Lock()  # one letter after the other

    def handle(self, data: bytes) -> bytes:
        """The answer to a letter, on disk before it is given; a full disk or a bad letter is answered in a sentence."""
        try:
            letter = read_letter(data, MOST_LETTER)
        except WireError as error:
            refused = Letter(Kind.REFUSED, bytes(16), bytes(16), 0, clients=1, body=sentence_body(str(error)))
            return write_letter(refused)
        with self.busy, torch.no_grad():
            try:
                answer = self.answer(letter, digest_of(data))
            except SparingError as error:
                answer = self.refused(letter, str(error), str(error))
            except Exception as error:  # its words may tell of samples: they stay on this machine
                name = type(error).__name__
                answer = self.refused(letter, f"{name}: {error}", f"a {name} on the node, whose own log says more")
        return write_letter(answer)

    def refused(self, letter: Letter, here: str, there: str) -> Letter:
        """One sentence for each side."""
        self.tell(printable(f"client {letter.client}, round {letter.round}: {here}"))
        return letter.answer(Kind.REFUSED, sentence_body(there))

    def answer(self, letter: Letter, digest: bytes) -> Letter:
        if letter.kind == Kind.HELLO:
            return self.join(letter)
        kept = self.known(letter)
        if kept is None:
            return letter.answer(Kind.NEED)
        if self.job_of(kept).secure is not None:
            if letter.kind == Kind.KEYS:
                return self.learn_keys(letter, kept)
            if letter.kind in (Kind.TRAIN, Kind.PREPARE, Kind.INTRODUCE, Kind.UNMASK):
                return self.take_part_in_sum(letter, kept)
        if letter.kind == Kind.TRAIN:
            return self.train(letter, kept, digest)
        if letter.kind == Kind.EVALUATE:
            return self.evaluate(letter, kept.resolved(letter.settled))
        raise WireError(f"a letter of kind {letter.kind.name}, which a server never sends")

    # ------------------------------------------------------------------------------------------------------- joining

    def join(self, letter: Letter) -> Letter:
        """Take part in a run, or go on with it."""
        key, body = letter.body[:SHARED_KEY_BYTES], letter.body[SHARED_KEY_BYTES:]
        if len(key) < SHARED_KEY_BYTES or digest_of(body) != letter.terms:
            raise WireError("the server's terms do not match their digest; send them again")
        holding, kept = self.holding(letter.client), self.load(letter.client)
        if kept is None or (kept.run != letter.run and kept.is_untouched):
            secret = self.secrets.get(letter.client) or new_client_secret(key)
            kept = Kept(letter.run, letter.client, holding.n, body, secret)
            self.check_samples(kept)
            for made in (self.jobs, self.sums):  # by the terms of a run that never began
                made.pop(letter.client, None)
            self.job_of(kept)
            self.store.save(kept)
        elif kept.run != letter.run:
            raise ConfigError(
                f"{self.store.path(kept.client)} belongs to run {kept.run.hex()[:8]}, the server plays run "
                f"{letter.run.hex()[:8]}; use another --state folder for it"
            )
        elif kept.terms != body:
            raise ConfigError("the server's study has changed since this node joined; undo that, or start a new run")
        self.kept[letter.client] = kept
        self.job_of(kept)
        self.tell(f"client {kept.client}: joined run {kept.run.hex()[:8]} with {kept.n} samples")
        body = b"".join(self.sums_of(kept).keys.public()) if self.job_of(kept).secure is not None else b""
        return letter.answer(Kind.JOINED, body, n=kept.n)

    def holding(self, client: int) -> Holding:
        if client not in self.holdings and None in self.holdings:
            others = [one for one in self.store.clients() if one != client]
            if others:
                raise ConfigError(
                    f"{self.store.folder} holds the state of client {others[0]}, and the letter is for client "
                    f"{client}; use a --state folder of its own for each client, or name the client with its data"
                )
            self.holdings[client] = self.holdings.pop(None)
        if client not in self.holdings:
            here = ", ".join(str(one) for one in self.holdings if one is not None)
            raise ConfigError(f"client {client} is not on this node, which has {here}; correct the roster")
        return self.holdings[client]

    def load(self, client: int) -> Kept | None:
        if client not in self.kept:
            found = self.store.load(client)
            if found is None:
                return None
            self.kept[client] = found
        return self.kept[client]

    def known(self, letter: Letter) -> Kept | None:
        """What is kept of the client whom a letter is for, which must be of its run; None: it has joined none yet."""
        self.holding(letter.client)
        kept = self.load(letter.client)
        if kept is None:
            return None
        if kept.run != letter.run or digest_of(kept.terms) != letter.terms:
            raise ConfigError(
                f"client {letter.client} takes part in run {kept.run.hex()[:8]}, this letter is of run "
                f"{letter.run.hex()[:8]}, or of another study; use another --state folder"
            )
        self.check_samples(kept)
        if letter.n != kept.n:
            raise ConfigError(f"the server counts {letter.n} samples of client {kept.client}, who joined with {kept.n}")
        return kept

    def check_samples(self, kept: Kept) -> None:
        here = self.holding(kept.client).n
        if here != kept.n:
            raise ConfigError(
                f"client {kept.client} joined with {kept.n} samples and has {here} now; put the samples back, or "
                "start a new run"
            )

    def job_of(self, kept: Kept) -> Job:
        if kept.client not in self.jobs:
            terms, holding = read_terms(kept.terms), self.holding(kept.client)
            secret = kept.secret
            assert secret is not None
            job = node_job(terms, kept.client, holding.train, holding.test, self.own, secret)
            if self.rules.insists and job.secure is None:
                raise ConfigError(
                    "the server's study has no secure aggregation, which this node insists on; set `secure: true` there"
                )
            self.jobs[kept.client] = job
        return self.jobs[kept.client]

    # ----------------------------------------------------------------------------------------------------- secure sums

    def sums_of(self, kept: Kept) -> NodeSums:
        if kept.client not in self.sums:
            settings = self.job_of(kept).secure
            assert settings is not None
            self.sums[kept.client] = NodeSums(self.store.folder, kept.client, settings, self.rules)
        return self.sums[kept.client]

    def learn_keys(self, letter: Letter, kept: Kept) -> Letter:
        try:
            roster = self.sums_of(kept).pin(letter.run, letter.body.decode())
        except UnicodeDecodeError:
            raise WireError("the server's key roster is no text; send it again") from None
        self.tell(f"client {kept.client}: masks towards {len(roster) - 1} others, key roster {roster.fingerprint}")
        return letter.answer(Kind.JOINED)

    def take_part_in_sum(self, letter: Letter, kept: Kept) -> Letter:
        """Answer a letter about the sum of a round."""
        sums = self.sums_of(kept)
        if sums.roster(letter.run) is None:
            return letter.answer(Kind.NEED)
        if letter.kind == Kind.TRAIN:
            return self.train_for_sum(letter, kept)
        if letter.kind == Kind.PREPARE:
            if sums.is_bound(read_sum_terms(letter.body)):
                return letter.answer(Kind.BOUND)
            if kept.pending is None or kept.pending.round != letter.round:
                return letter.answer(Kind.NEED)
            return self.prepare_sum(letter, kept, read_sum_terms(letter.body))
        if letter.kind == Kind.INTRODUCE:
            vector = self.vector_of(letter, kept)
            return letter.answer(Kind.UPLOAD, sums.upload(letter.run, letter.round, letter.body, vector))
        return letter.answer(Kind.SHARES, sums.unmask(letter.run, letter.round, letter.body))

    def train_for_sum(self, letter: Letter, kept: Kept) -> Letter:
        """Train, unless that was done in an earlier attempt, and agree to the terms of this one."""
        notice, download = read_notice(letter.body)
        if self.sums_of(kept).is_bound(notice.terms):
            return letter.answer(Kind.BOUND)
        of_any_attempt = notice._replace(terms=notice.terms._replace(attempt=0))
        alike = letter._replace(body=write_notice(of_any_attempt) + download)  # letters of all attempts have one digest
        trained = self.train(letter, kept, digest_of(write_letter(alike)))
        if trained.kind == Kind.NEED:
            return trained
        return self.prepare_sum(letter, self.kept[kept.client], notice.terms)

    def prepare_sum(self, letter: Letter, kept: Kept, terms: SumTerms) -> Letter:
        """Agree to another attempt at the sum that the update of this round is for, and to no other sum."""
        if kept.pending is None or kept.pending.terms != in_any_attempt(terms):
            raise SecureError(
                f"client {kept.client} has trained round {letter.round} for a sum by other terms; send those, with "
                "another attempt"
            )
        return letter.answer(Kind.PREPARED, self.sums_of(kept).prepare(terms))

    def vector_of(self, letter: Letter, kept: Kept) -> np.ndarray:
        """The update of this round that the client has kept, unmasked."""
        if kept.pending is None or kept.pending.round != letter.round:
            raise SecureError(f"client {kept.client} has no update of round {letter.round}; ask it to train")
        return read_vector(kept.pending.upload)

    # ------------------------------------------------------------------------------------------------------ training

    def train(self, letter: Letter, kept: Kept, digest: bytes) -> Letter:
        pending, job = kept.pending, self.job_of(kept)
        if pending is not None and pending.round == letter.round:
            if pending.digest == digest:
                self.tell(f"client {kept.client}, round {letter.round}: asked again, the same upload goes again")
                return letter.answer(Kind.UPLOAD, pending.upload)
            if job.method.privacy is not None and job.method.privacy.mode != "central":
                raise CheckpointError(
                    f"client {kept.client} has released round {letter.round} once, and noise covers one release; "
                    "the server must ask for the next round"
                )
        if not letter.settled < letter.round <= job.rounds:
            raise WireError(
                f"a letter of round {letter.round} after {letter.settled}; the study has {job.rounds} rounds"
            )
        kept = kept.resolved(letter.settled)
        self.refuse_backwards(letter, kept, 0 if pending is None else pending.round)
        if is_behind(letter, kept, job):
            self.tell(f"client {kept.client}: its state is older than the server's, so it asks for everything")
            return letter.answer(Kind.NEED)
        if letter.first or keeps_nothing(job):
            kept = Kept(kept.run, kept.client, kept.n, kept.terms, kept.secret, letter.settled)
            kept = kept._replace(copy=seeded_copy(job), held=first_held(job.method))
        try:
            got, copy = self.read(letter, kept, job)
        except _OtherModel:
            return letter.answer(Kind.NEED)
        sums = self.checked_sum(letter, job, got) if job.secure is not None else None
        with self.keeping_numbers(letter, sums):
            upload, state = self.train_round(letter, kept, job, got, sums)
        terms = b"" if sums is None else in_any_attempt(read_notice(letter.body)[0].terms)
        kept = kept._replace(pending=Pending(letter.round, digest, upload, state, copy, terms))
        self.store.save(kept)
        self.kept[kept.client] = kept
        return letter.answer(Kind.UPLOAD, upload)

    @contextmanager
    def keeping_numbers(self, letter: Letter, sums: RoundSum | None) -> Iterator[None]:
        """What is said of an update that would be masked tells nothing of it."""
        try:
            yield
        except SparingError as error:
            if sums is None:
                raise
            self.tell(printable(f"client {letter.client}, round {letter.round}: {error}"))
            raise SecureError(
                f"client {letter.client} has no update of round {letter.round} that can be summed; its node's own log "
                "says why"
            ) from None

    def refuse_backwards(self, letter: Letter, kept: Kept, trained: int) -> None:
        """Rounds only go on: before a letter of a later round leaves the server, every earlier one is on its disk."""
        if letter.settled < kept.settled or letter.round <= kept.settled or letter.round < trained:
            raise CheckpointError(
                f"client {kept.client} knows of round {max(kept.settled, trained)}, and the server asks for round "
                f"{letter.round} after round {letter.settled}; if this is no late letter, it goes on from an older "
                "checkpoint: restore a newer one, or start a new run"
            )

    def read(self, letter: Letter, kept: Kept, job: Job) -> tuple[Parcel, Tree]:
        """The download, and the copy of the model to keep where the server broadcasts."""
        ctx, names = round_context(letter, job), commonly_held(job.method)
        expected = schema_down(job.method, job.initial, ctx)
        body = letter.body if job.secure is None else read_notice(letter.body)[1]
        try:
            got, _ = read_download(job.method, body, expected, kept.copy, kept.held, ctx)
        except WireError:
            if names and not letter.first:
                raise _OtherModel from None
            raise
        if not names:
            return got, {}
        copy = {name: got.leaves[name].value for name in names if name in got.leaves}
        if model_digest(copy) != letter.model:
            if letter.first:
                raise WireError("the download is not the model that the server says it is; send it again")
            raise _OtherModel
        return got, {name: x.clone() for name, x in copy.items()}

    def train_round(
        self, letter: Letter, kept: Kept, job: Job, got: Parcel, sums: RoundSum | None
    ) -> tuple[bytes, Tree]:
        ctx = round_context(letter, job)
        state = first_client(job.method, job.initial) if kept.state is None else kept.state
        up, state = client_round(job.method, state, got, job.train, ctx)
        if not job.method.blend.lenient:
            refuse_infinite(up, ctx)
        if sums is None:
            upload = to_bytes(up, 0, f"{parcel_about(ctx)}/up")
        else:
            upload = write_vector(client_vector(job.method, sums, got, up, ctx))
        loss = float(up.notes["loss"][0])
        self.tell(f"client {kept.client}, round {letter.round}: loss {loss:.4f}, {len(upload):,} bytes up")
        return upload, {name: x.detach().clone() for name, x in state.items()}

    def checked_sum(self, letter: Letter, job: Job, got: Parcel) -> RoundSum:
        """The sum that the letter is about: its terms must be those that follow from the study and from what this
        client was told, whatever the server would like."""
        assert job.secure is not None
        ctx, notice = round_context(letter, job), read_notice(letter.body)[0]
        terms, layout = notice.terms, sum_layout(job.method, got, notice.total, ctx)
        if (terms.run, terms.round, len(terms.cohort)) != (letter.run, letter.round, letter.cohort):
            raise SecureError(f"terms of another sum than that of round {letter.round}; send its own")
        if (layout.size, layout.bits) != (terms.size, terms.bits):
            raise SecureError(
                f"a sum of {terms.size} values of {terms.bits} bits, and this client has {layout.size} of {layout.bits}"
            )
        if terms != job.secure.terms(*terms[:6], terms.about):
            raise SecureError(f"the terms of the sum of round {letter.round} are not those of the study")
        sums = RoundSum(layout, notice.grid([leaf.name for leaf in layout.leaves]), notice.total)
        if told_alike(letter.terms, job.method, sums, got, ctx) != terms.about:
            raise SecureError(
                f"the terms of the sum of round {letter.round} are about another model, grid or study than this client "
                "was told of; tell all clients the same"
            )
        return sums

    def evaluate(self, letter: Letter, kept: Kept) -> Letter:
        job = self.job_of(kept)
        if job.secure is not None and read_terms(kept.terms).evaluate != "clients":
            raise ConfigError(
                "the study that was joined has no evaluation on clients (network.evaluate); evaluate on the server"
            )
        if client_scores.are_secret(job):
            raise ConfigError("dp.mode is local, and nothing leaves this client without noise; evaluate on the server")
        if is_behind(letter, kept, job):
            return letter.answer(Kind.NEED)
        state = first_client(job.method, job.initial) if kept.state is None else kept.state
        scores = client_scores.scores_of_client(job, state, letter.body, round_context(letter, job))
        return letter.answer(Kind.SCORES, scores)


def in_any_attempt(terms: SumTerms) -> bytes:
    """What stays the same while a round is asked for again."""
    return write_sum_terms(terms._replace(attempt=0))


class _OtherModel(Exception):
    """What came does not fit the version of the model that this client holds."""


def keeps_nothing(job: Job) -> bool:
    """Whether clients of this method have no state, so that none can be lost."""
    return not first_client(job.method, job.initial) and not commonly_held(job.method)


def is_behind(letter: Letter, kept: Kept, job: Job) -> bool:
    """Whether the server counts on state that this client does not have."""
    if letter.first or keeps_nothing(job):
        return False
    return kept.state is None or letter.settled > kept.settled


def round_context(letter: Letter, job: Job) -> Ctx:
    """What a letter says about its round and client."""
    declared = {name: x for name, x in zip(CAPACITIES, letter.capacity, strict=True) if x == x}
    capacity = {name: torch.tensor([x], dtype=torch.float64) for name, x in declared.items()}
    return context(
        seed=job.seed,
        round=letter.round,
        rounds=job.rounds,
        ids=[letter.client],
        n=[letter.n],
        clients=letter.clients,
        samples=letter.samples,
        cohort=letter.cohort,
        first=torch.tensor([letter.first]),
        capacity=capacity or None,
        held=letter.held,
    )


def seeded_copy(job: Job) -> Tree:
    """The version of the model that a client never met holds: the first, where everybody builds it from the seed."""
    broadcast = job.method.broadcast
    names = commonly_held(job.method) if broadcast is not None and broadcast.seeded else []
    first = job.initial | job.method.extra(job.initial) if names else {}
    return {name: first[name] for name in names}


def model_digest(copy: Tree) -> bytes:
    return bytes.fromhex(tree_sha256(copy))[:16]
