"""One round at the desk in which uploads are summed under masks: prepare, upload, unmask, each a question to clients.

    too few prepare      as where uploads are missing: the run stops, and can be resumed
    too few upload       the same clients are asked again, as a new attempt over the updates that they have kept
    too few unmask       they are asked the same again; in the end the round counts for nobody

Once a request to unmask has left, nodes answer no other in this round. So before it leaves, all that is needed to ask
the same again is on disk (`kept_sum`).
"""

import math
import secrets as random_source
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from sparing.core.context import Ctx
from sparing.core.errors import FederationError, SecureError
from sparing.core.fold import Collect, Fold
from sparing.core.grid import Grid
from sparing.core.round import Server, outgoing
from sparing.engines.engine import TRAIN_LOSS, Sizes, Tally
from sparing.net.downloads import MOST_ELSE, Downloads
from sparing.net.kept_sum import KeptSum, read_kept_sum, write_kept_sum
from sparing.net.letter import HEAD_BYTES, Kind, write_letter
from sparing.net.round_table import enough_of, quorum_of, said_of_missing
from sparing.net.terms import digest_of
from sparing.secure.mask_graph import those_introduced
from sparing.secure.sum_messages import Prepared, SumLengths
from sparing.secure.sum_server import MaskedSum, read_prepared
from sparing.secure.sum_terms import SumTerms, write_sum_terms
from sparing.secure_round.planned_sum import PlannedSum
from sparing.secure_round.sum_layout import sum_layout
from sparing.secure_round.sum_notice import sum_notice, write_notice
from sparing.secure_round.summands import RoundSum, fold_sum
from sparing.secure_round.told_alike import told_alike

if TYPE_CHECKING:
    from sparing.net.desk import Desk

_ATTEMPT_BITS = 31


class SecureTable:
    def __init__(self, desk: "Desk", server: Server, cohort: Ctx, fold: Fold | Collect):
        assert isinstance(fold, Fold)
        self.desk, self.fold, self.server, self.cohort, self.t = desk, fold, server, cohort, cohort.round
        self.downloads = Downloads(desk.job, server, cohort, desk.letter)
        self.counted: set[int] = set()
        self.report: dict[str, float] = {}
        self.plans: list[PlannedSum] = []  # of every attempt
        method, first = desk.job.method, cohort.at(slice(0, 1))
        total, self.sent = method.blend.weigh.most(cohort), outgoing(method, server, first)
        layout = sum_layout(method, self.sent, total, first)
        self.sums = RoundSum(layout, Grid(server.limits, total), total)
        self.about = told_alike(digest_of(desk.terms), method, self.sums, self.sent, first)
        self.trained: set[int] = set()  # clients that have an update of this round

    def play(self) -> None:
        masked = self.restored() or self.masked_uploads()
        kept = KeptSum(self.t, masked.terms, masked.prepared, masked.masked, masked.arrived, self.downloads.lost)
        if self.desk.kept_sum_path is not None:
            write_kept_sum(self.desk.kept_sum_path, kept)
        fails = self.unmask(masked)
        self.remember(masked, fails)
        if fails:
            self.desk.audit.note(self.t, f"the round counts for nobody: {fails}")

    def new_attempt(self) -> SumTerms:
        """The terms of one; its number is random, so that none comes again after a restart."""
        settings, layout = self.desk.job.secure, self.sums.layout
        assert settings is not None
        attempt, ids = random_source.randbits(_ATTEMPT_BITS), self.cohort.ids.tolist()
        return settings.terms(self.desk.run, self.t, attempt, ids, layout.size, layout.bits, self.about)

    def notice(self, terms: SumTerms) -> bytes:
        names = [leaf.name for leaf in self.sums.layout.leaves]
        return write_notice(sum_notice(terms, self.sums.grid, self.sums.total, names))

    def masked_uploads(self) -> MaskedSum:
        """Enough uploads to unmask their sum, in as many attempts as it takes."""
        section = self.desk.section
        quorum = quorum_of(enough_of(len(self.cohort.ids), section.over), section.quorum)
        for i in range(section.retries + 1):
            if i:
                self.desk.clock.sleep(section.resend)
            prepare = PrepareQuestion(self, self.new_attempt())
            self.desk.waiting.ask(prepare)
            masked = MaskedSum(prepare.terms, prepare.prepared)
            self.desk.waiting.ask(UploadQuestion(self, masked))
            why = masked.why_too_few()
            if not why and len(masked.arrived) >= quorum:
                return masked
            self.remember(masked, why or f"{len(masked.arrived)} uploads, where {quorum} are needed (network.quorum)")
            self.desk.audit.note(self.t, f"an attempt failed: {self.plans[-1].fails}")
        raise FederationError(
            f"round {self.t}: {self.plans[-1].fails}, in {section.retries + 1} attempts. Nothing is lost: bring them "
            "back and resume"
        )

    def unmask(self, masked: MaskedSum) -> str:
        """Fold in the sum. Why it cannot be, if so."""
        try:
            self.desk.waiting.ask(UnmaskQuestion(self, masked))
            words = masked.unmasked()
            survivors = [k for k, who in enumerate(self.cohort.ids.tolist()) if who in masked.arrived]
            here = self.cohort.at(torch.tensor(survivors))
            loss = fold_sum(self.desk.job.method, self.sums, self.fold, words, self.sent, here)
        except (FederationError, SecureError) as error:
            return str(error)
        self.counted, self.report = set(masked.arrived), {TRAIN_LOSS: loss}
        return ""

    def remember(self, masked: MaskedSum, fails: str) -> None:
        """What an attempt took."""
        here, notice = frozenset(self.trained | set(masked.prepared)), len(self.notice(masked.terms))
        introduced, survivors = frozenset(masked.prepared), frozenset(masked.arrived)
        self.plans.append(PlannedSum(masked.terms, notice, here, introduced, survivors, fails))

    def restored(self) -> MaskedSum | None:
        """The sum of this round that was being unmasked when the server stopped."""
        kept = read_kept_sum(self.desk.kept_sum_path) if self.desk.kept_sum_path is not None else None
        if kept is None or kept.round != self.t or kept.terms.run != self.desk.run:
            return None
        masked = MaskedSum(kept.terms, kept.prepared)
        masked.restore(kept.masked, kept.arrived)
        self.downloads.lost, self.trained = set(kept.lost), set(kept.prepared)
        return masked

    def tally(self) -> Tally:
        tally = Tally()
        for who in sorted(self.downloads.rows):
            ctx, down, up = self.downloads.rows[who], self.downloads.sizes(who), dict[str, torch.Tensor]()
            for plan in self.plans:
                down, up = _sizes_together(down, plan.down([who])), _sizes_together(up, plan.up([who]))
            gone_K = torch.tensor([who not in self.counted])
            tally.add(ctx, lambda down=down: down, lambda up=up: up, torch.full((1,), math.nan), gone_K)
        return tally

    def letter_to(self, who: int, kind: Kind, body: bytes) -> bytes:
        """A letter of this round to one client, other than that with its download."""
        ctx, server = self.downloads.seen_by(who)
        return write_letter(self.desk.letter(kind, server, ctx, body))

    def answer_of(self, who: int, data: bytes, most: int, asked: Kind, kind: Kind) -> tuple[Kind, bytes]:
        """The kind and the body of an answer to a letter of the kind `asked`: this kind, or NEED."""
        ctx, server = self.downloads.seen_by(who)
        letter = self.desk.checked(data, most, self.desk.letter(asked, server, ctx), kind)
        return letter.kind, letter.body

    def tell(self, counted: set[int], missing: list[int]) -> None:
        self.desk.tell(self.t, len(self.downloads.rows), counted, missing, 0)


class PrepareQuestion:
    """Everybody trains, unless they have, and agrees to the terms of an attempt."""

    def __init__(self, table: SecureTable, terms: SumTerms):
        self.table, self.terms, self.prepared = table, terms, dict[int, Prepared]()
        section, cohort = table.desk.section, len(terms.cohort)
        self.enough = max(enough_of(cohort, section.over), terms.least)
        self.quorum = max(quorum_of(enough_of(cohort, section.over), section.quorum), terms.least)
        self.most_bytes = max(SumLengths(terms).prepare, MOST_ELSE)

    def missing(self) -> list[int]:
        return [who for who in self.terms.cohort if who not in self.prepared]

    def letters(self, clients: list[int]) -> Iterator[tuple[int, bytes]]:
        table, notice = self.table, self.table.notice(self.terms)
        for who in clients:
            if who in table.trained:
                yield who, table.letter_to(who, Kind.PREPARE, write_sum_terms(self.terms))
            else:
                yield from table.downloads.letters([who], notice, self.most_bytes)

    def most(self, who: int) -> int:
        return HEAD_BYTES + self.most_bytes

    def greet(self, clients: list[int], seconds: float) -> None:
        desk = self.table.desk
        desk.greet(clients, seconds, self.table.t)
        desk.share_keys(clients, seconds, self.table.t)

    def take(self, who: int, data: bytes) -> bool:
        table, needy = self.table, False
        with table.desk.blaming(table.t, who):
            kind, body = table.answer_of(who, data, self.most(who), Kind.TRAIN, Kind.PREPARED)
            if kind == Kind.NEED and who in table.trained:
                table.trained.discard(who)  # it is asked to train once more
            elif kind == Kind.NEED:
                table.downloads.lose(who)
                table.desk.audit.refuse(table.t, who, "has lost its state, and is sent everything")
                needy = True
            else:
                self.prepared[who] = read_prepared(self.terms, table.desk.keys.roster, who, body)
                table.trained.add(who)
        table.tell(set(self.prepared), self.missing())
        return needy

    def is_answered(self) -> bool:
        return self.has_prepared(self.enough)

    def suffices(self) -> bool:
        return self.has_prepared(self.quorum)

    def has_prepared(self, clients: int) -> bool:
        going = those_introduced(self.terms, self.prepared)
        return len(self.prepared) >= clients and len(going) >= self.terms.least

    def too_few(self) -> str:
        seen = f"{len(self.prepared)} clients that prepared"
        return said_of_missing(self.table.desk, self.table.t, seen, self.quorum, self.missing())


class UploadQuestion:
    """Those who prepared are told of their neighbours, and upload under masks. Who refuses has dropped out."""

    def __init__(self, table: SecureTable, masked: MaskedSum):
        self.table, self.masked, self.out = table, masked, set[int]()
        self.most_bytes = max(SumLengths(masked.terms).upload, MOST_ELSE)

    def missing(self) -> list[int]:
        return [who for who in self.masked.prepared if who not in self.masked.arrived | self.out]

    def letters(self, clients: list[int]) -> Iterator[tuple[int, bytes]]:
        for who in clients:
            yield who, self.table.letter_to(who, Kind.INTRODUCE, self.masked.introduction(who))

    def most(self, who: int) -> int:
        return HEAD_BYTES + self.most_bytes

    def greet(self, clients: list[int], seconds: float) -> None:
        pass  # who has lost its state has dropped out

    def take(self, who: int, data: bytes) -> bool:
        table = self.table
        self.out.add(who)
        with table.desk.blaming(table.t, who):
            kind, body = table.answer_of(who, data, self.most(who), Kind.INTRODUCE, Kind.UPLOAD)
            if kind == Kind.UPLOAD:
                self.masked.add(who, body)
                self.out.discard(who)
        table.tell(self.masked.arrived, self.missing())
        return False

    def is_answered(self) -> bool:
        return not self.missing()

    def suffices(self) -> bool:
        return True  # else it is a new attempt

    def too_few(self) -> str:
        return self.masked.why_too_few()


class UnmaskQuestion:
    """Everybody who was introduced gives one share of each neighbour."""

    def __init__(self, table: SecureTable, masked: MaskedSum):
        self.table, self.masked, self.out = table, masked, set[int]()
        self.most_bytes = max(SumLengths(masked.terms).shares, MOST_ELSE)

    def missing(self) -> list[int]:
        return [who for who in self.masked.prepared if who not in self.masked.heard | self.out]

    def letters(self, clients: list[int]) -> Iterator[tuple[int, bytes]]:
        for who in clients:
            yield who, self.table.letter_to(who, Kind.UNMASK, self.masked.request(who))

    def most(self, who: int) -> int:
        return HEAD_BYTES + self.most_bytes

    def greet(self, clients: list[int], seconds: float) -> None:
        pass

    def take(self, who: int, data: bytes) -> bool:
        table = self.table
        self.out.add(who)
        with table.desk.blaming(table.t, who):
            kind, body = table.answer_of(who, data, self.most(who), Kind.UNMASK, Kind.SHARES)
            if kind == Kind.SHARES:
                self.masked.hear(who, body)
                self.out.discard(who)
        return False

    def is_answered(self) -> bool:
        return not self.masked.missing() or not self.missing()

    def suffices(self) -> bool:
        return False

    def too_few(self) -> str:
        return f"shares of {len(self.masked.missing())} clients are missing"


def _sizes_together(a: Sizes, b: Sizes) -> Sizes:
    return {kind: a.get(kind, 0) + b.get(kind, 0) for kind in (*a, *(kind for kind in b if kind not in a))}  # type: ignore[misc]
