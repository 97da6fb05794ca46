"""One round at the desk in which uploads are summed under masks: prepare, upload, unmask, each a question to clients.

    too few prepare      as where uploads are missing: the run stops, and can be resumed
    too few upload       the same clients are asked again, as a new attempt over the updates that they have kept
    too few unmask       they are asked the same again; in the end the round counts for nobody

Once a request to unmask has left, nodes answer no other in this round. So before it leaves, all that is needed to ask
the same again is on disk (`kept_sum`). If that is lost, who has answered is bound, and the others go on if they are
enough; else the round counts for nobody.
"""

import math
import secrets as random_source
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from sparing.core.context import Ctx
from sparing.core.errors import FederationError, SecureError
from sparing.core.fold import Collect, Fold
from sparing.core.grid import Grid
from sparing.core.round import Server, outgoing
from sparing.engines.engine import TRAIN_LOSS, Tally
from sparing.net.downloads import MOST_ELSE, Downloads
from sparing.net.kept_sum import KeptSum, delete_earlier_sums, kept_sum_path, read_kept_sum, write_kept_sum
from sparing.net.letter import HEAD_BYTES, Kind, write_letter
from sparing.net.round_table import enough_of, quorum_of, said_of_missing
from sparing.net.sum_bill import SumBill, sizes_of_client
from sparing.net.terms import digest_of
from sparing.secure.mask_graph import those_introduced
from sparing.secure.sum_messages import Prepared, most_shares_length, prepare_length, upload_length
from sparing.secure.sum_server import MaskedSum, read_prepared
from sparing.secure.sum_terms import SumTerms, write_sum_terms
from sparing.secure_round.planned_sum import SECURE_KINDS
from sparing.secure_round.sum_layout import sum_layout
from sparing.secure_round.sum_notice import sum_notice, write_notice
from sparing.secure_round.summands import RoundSum, fold_sum
from sparing.secure_round.told_alike import told_alike
from sparing.wire.frame import BYTE_KINDS

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
        self.bill = SumBill()
        method, first = desk.job.method, cohort.at(slice(0, 1))
        total, self.sent = method.blend.weigh.most(cohort), outgoing(method, server, first)
        layout = sum_layout(method, self.sent, total, first)
        self.sums = RoundSum(layout, Grid(server.limits, total), total)
        self.about = told_alike(digest_of(desk.terms), method, self.sums, self.sent, first)
        self.trained: set[int] = set()  # clients that have an update of this round
        self.bound: set[int] = set()  # clients that have helped to unmask a sum of this round that is lost

    def play(self) -> None:
        folder = self.desk.folder
        if folder is not None:
            delete_earlier_sums(folder, self.t)
        masked = self.restored() or self.masked_uploads()
        if masked is None:
            fails = "too few clients are left that have not helped to unmask another sum of it"
        else:
            if folder is not None:
                write_kept_sum(kept_sum_path(folder, self.t), self.kept(masked))
            fails = self.unmask(masked)
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

    def masked_uploads(self) -> MaskedSum | None:
        """Enough uploads to unmask their sum, in as many attempts as it takes; None: too few clients are not bound."""
        section, fails = self.desk.section, ""
        quorum = quorum_of(enough_of(len(self.cohort.ids), section.over), section.quorum)
        for i in range(section.retries + 1):
            if i:
                self.desk.clock.sleep(section.resend)
            prepare = PrepareQuestion(self, self.new_attempt())
            self.desk.waiting.ask(prepare)
            if prepare.is_lost():
                return None
            masked = MaskedSum(prepare.terms, prepare.prepared)
            self.desk.waiting.ask(UploadQuestion(self, masked))
            fails = masked.why_too_few()
            if not fails and len(masked.arrived) >= quorum:
                return masked
            fails = fails or f"{len(masked.arrived)} uploads, where {quorum} are needed (network.quorum)"
            self.desk.audit.note(self.t, f"an attempt failed: {fails}")
        raise FederationError(
            f"round {self.t}: {fails}, in {section.retries + 1} attempts. Nothing is lost: bring them back and resume"
        )

    def unmask(self, masked: MaskedSum) -> str:
        """Fold in the sum. Why it cannot be, if so."""
        try:
            self.ask_to_unmask(UnmaskQuestion(self, masked))
            words = masked.unmasked()
            survivors = [k for k, who in enumerate(self.cohort.ids.tolist()) if who in masked.arrived]
            here = self.cohort.at(torch.tensor(survivors))
            loss = fold_sum(self.desk.job.method, self.sums, self.fold, words, self.sent, here)
        except (FederationError, SecureError) as error:
            return str(error)
        self.counted, self.report = set(masked.arrived), {TRAIN_LOSS: loss}
        return ""

    def ask_to_unmask(self, question: "UnmaskQuestion") -> None:
        """Everybody once, as a simulation does; from then on it is enough that the sum can be unmasked."""
        section = self.desk.section
        self.desk.waiting.ask_once(question, min(section.resend, section.deadline or math.inf))
        question.everybody = False
        self.desk.waiting.ask(question)

    def kept(self, masked: MaskedSum) -> KeptSum:
        return KeptSum(masked.terms, masked.prepared, masked.masked, masked.arrived, self.downloads.lost, self.bill)

    def restored(self) -> MaskedSum | None:
        """The sum of this round that was being unmasked when the server stopped."""
        folder, run = self.desk.folder, self.desk.run
        kept = None if folder is None else read_kept_sum(kept_sum_path(folder, self.t), run, self.t)
        if kept is None:
            return None
        masked = MaskedSum(kept.terms, kept.prepared)
        masked.restore(kept.masked, kept.arrived)
        self.downloads.lost, self.trained, self.bill = kept.lost, set(kept.prepared), kept.bill
        return masked

    def tally(self) -> Tally:
        tally = Tally()
        for who in sorted(self.downloads.rows):
            ctx, down = self.downloads.rows[who], self.downloads.sizes(who)
            if who not in self.bill.down:  # it was never asked
                down = {kind: torch.zeros_like(x) for kind, x in down.items()}
            down = down | sizes_of_client(self.bill.down, who, SECURE_KINDS)
            up = sizes_of_client(self.bill.up, who, (*BYTE_KINDS, *SECURE_KINDS))
            gone_K = torch.tensor([who not in self.counted])
            tally.add(ctx, lambda down=down: down, lambda up=up: up, torch.full((1,), math.nan), gone_K)
        return tally

    def letter_to(self, who: int, kind: Kind, body: bytes) -> bytes:
        """A letter of this round to one client, other than that with its download."""
        ctx, server = self.downloads.seen_by(who)
        return write_letter(self.desk.letter(kind, server, ctx, body))

    def answer_of(self, who: int, data: bytes, most: int, asked: Kind, *kinds: Kind) -> tuple[Kind, bytes]:
        """The kind and the body of an answer to a letter of the kind `asked`: one of these kinds, or NEED."""
        ctx, server = self.downloads.seen_by(who)
        letter = self.desk.checked(data, most, self.desk.letter(asked, server, ctx), *kinds)
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
        self.most_bytes = max(prepare_length(terms), MOST_ELSE)

    def free(self) -> list[int]:
        """Who is not bound."""
        return [who for who in self.terms.cohort if who not in self.table.bound]

    def is_lost(self) -> bool:
        """Whether so many are bound that the others are too few."""
        free = self.free()
        too_few = len(free) < self.quorum or len(those_introduced(self.terms, free)) < self.terms.least
        return bool(self.table.bound) and too_few

    def missing(self) -> list[int]:
        return [who for who in self.free() if who not in self.prepared]

    def letters(self, clients: list[int]) -> Iterator[tuple[int, bytes]]:
        table, notice = self.table, self.table.notice(self.terms)
        for who in clients:
            if who in table.trained:
                yield who, table.letter_to(who, Kind.PREPARE, table.bill.announce(who, write_sum_terms(self.terms)))
            else:
                yield from table.downloads.letters([who], table.bill.announce(who, notice), self.most_bytes)

    def most(self, who: int) -> int:
        return HEAD_BYTES + self.most_bytes

    def greet(self, clients: list[int], seconds: float) -> None:
        desk = self.table.desk
        desk.greet(clients, seconds, self.table.t)
        desk.share_keys(clients, seconds, self.table.t)

    def take(self, who: int, data: bytes) -> bool:
        table, needy = self.table, False
        with table.desk.blaming(table.t, who):
            kind, body = table.answer_of(who, data, self.most(who), Kind.TRAIN, Kind.PREPARED, Kind.BOUND)
            if kind == Kind.BOUND:
                table.bound.add(who)
                table.desk.audit.refuse(table.t, who, "has helped to unmask another sum of this round")
            elif kind == Kind.NEED and who in table.trained:
                table.trained.discard(who)  # it is asked to train once more
            elif kind == Kind.NEED:
                table.downloads.lose(who)
                table.desk.audit.refuse(table.t, who, "has lost its state, and is sent everything")
                needy = True
            else:
                self.prepared[who] = read_prepared(self.terms, table.desk.keys.roster, who, body)
                table.bill.prepared(who, body)
                table.trained.add(who)
        table.tell(set(self.prepared), self.missing())
        return needy

    def is_answered(self) -> bool:
        return self.is_lost() or self.has_prepared(min(self.enough, len(self.free())))

    def suffices(self) -> bool:
        return self.has_prepared(self.quorum)

    def has_prepared(self, clients: int) -> bool:
        going = those_introduced(self.terms, self.prepared)
        return len(self.prepared) >= clients and len(going) >= self.terms.least

    def too_few(self) -> str:
        seen = f"{len(self.prepared)} clients that prepared"
        return said_of_missing(self.table.desk, self.table.t, seen, self.quorum, self.missing())


class _MaskedQuestion:
    """Put to those who prepared. Who refuses, or has lost its state, has dropped out."""

    asks: Kind
    wants: Kind
    message: Callable[[int], bytes]
    count: Callable[[int, bytes], None]

    def __init__(self, table: SecureTable, masked: MaskedSum, heard: set[int], most_bytes: int):
        self.table, self.masked, self.heard, self.out = table, masked, heard, set[int]()
        self.most_bytes = max(most_bytes, MOST_ELSE)

    def missing(self) -> list[int]:
        return [who for who in self.masked.prepared if who not in self.heard | self.out]

    def letters(self, clients: list[int]) -> Iterator[tuple[int, bytes]]:
        for who in clients:
            yield who, self.table.letter_to(who, self.asks, self.message(who))

    def most(self, who: int) -> int:
        return HEAD_BYTES + self.most_bytes

    def greet(self, clients: list[int], seconds: float) -> None:
        pass

    def take(self, who: int, data: bytes) -> bool:
        table = self.table
        self.out.add(who)
        with table.desk.blaming(table.t, who):
            kind, body = table.answer_of(who, data, self.most(who), self.asks, self.wants)
            if kind == self.wants:
                self.count(who, body)
                self.out.discard(who)
        table.tell(self.masked.arrived, self.missing())
        return False


class UploadQuestion(_MaskedQuestion):
    """Tells them of their neighbours; they upload under masks."""

    asks, wants = Kind.INTRODUCE, Kind.UPLOAD

    def __init__(self, table: SecureTable, masked: MaskedSum):
        super().__init__(table, masked, masked.arrived, upload_length(masked.terms))

    def message(self, who: int) -> bytes:
        return self.table.bill.introduce(who, self.masked.introduction(who), len(self.masked.near[who]))

    def count(self, who: int, body: bytes) -> None:
        self.masked.add(who, body)
        self.table.bill.uploaded(who, body)

    def is_answered(self) -> bool:
        return not self.missing()

    def suffices(self) -> bool:
        return True  # else it is a new attempt

    def too_few(self) -> str:
        return self.masked.why_too_few()


class UnmaskQuestion(_MaskedQuestion):
    """Everybody gives one share of each neighbour."""

    asks, wants = Kind.UNMASK, Kind.SHARES

    def __init__(self, table: SecureTable, masked: MaskedSum):
        super().__init__(table, masked, masked.heard, most_shares_length(masked.terms))
        self.everybody = True  # is waited for; else as many as it takes

    def message(self, who: int) -> bytes:
        return self.table.bill.request(who, self.masked.request(who))

    def count(self, who: int, body: bytes) -> None:
        self.masked.hear(who, body)
        self.table.bill.helped(who, body)

    def is_answered(self) -> bool:
        return not self.missing() or not (self.everybody or self.masked.missing())

    def suffices(self) -> bool:
        return False

    def too_few(self) -> str:
        return f"shares of {len(self.masked.missing())} clients are missing"
