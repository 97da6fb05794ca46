"""A federation under the eyes of the people who run it: the server's and the node's side."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from sparing.cli.commands.shared import complain, print_json
from sparing.cli.interrupt import INTERRUPT
from sparing.cli.progress import RunProgress, log_plain_lines
from sparing.cli.watched_runs import study_in_folder
from sparing.cli.wording import method_name, print_result, size_text
from sparing.core.errors import ConfigError
from sparing.net.desk import Progress
from sparing.net.holdings import load_holdings, load_server_sets, trusted_call
from sparing.net.key_book import PublicKeyBook
from sparing.net.letter import HEAD_BYTES
from sparing.net.local_sockets import listen, serve_letters
from sparing.net.node import MOST_LETTER, Node
from sparing.net.node_sums import SumRules, open_node_keys, read_keys_file
from sparing.net.relay_post import RelayPost
from sparing.net.roster import ClientRoster, read_roster
from sparing.net.server import (
    Carried,
    ServerSets,
    read_federation,
    resume_federation,
    start_federation,
    study_on_network,
)
from sparing.net.store import Store
from sparing.net.terms import OwnCode
from sparing.runs.explanation import explain_method
from sparing.runs.loop import Logger, cohort_size
from sparing.runs.results import Result
from sparing.runs.study import Study
from sparing.secure.long_term import KeyRoster
from sparing.secure.node_rules import NodePolicy

TypedSets = tuple[Path | None, tuple[int, ...] | None, int | None]
"""--test, --shape and --classes."""
_WAITING_SHOWN = 8  # clients


# --------------------------------------------------------------------------------------------------------- the server


def serve_study(
    study: Study, roster: Path, typed: TypedSets, socket: Path, out: Path, as_json: bool, keys: Path | None = None
) -> None:
    entries, sets = read_roster(roster), load_server_sets(*typed)
    known = _handed_out(study, keys)
    study = study_on_network(study, entries)
    progress = RunProgress(method_name(study.method), study.rounds)

    def go(carried: Carried, loggers: Sequence[Logger]) -> Result:
        return start_federation(study, entries, sets, carried, out, loggers, keys=known)

    _watch(go, entries, socket, progress, out, as_json)


def resume_served(folder: Path, typed: TypedSets, socket: Path, trust: bool, as_json: bool) -> None:
    study, known, (test, shape, classes) = study_in_folder(folder), read_federation(folder), typed
    sets = load_server_sets(test, shape or known.shape, classes or known.classes)
    progress = RunProgress(method_name(study.method), study.rounds)

    def go(carried: Carried, loggers: Sequence[Logger]) -> Result:
        return resume_federation(folder, sets, carried, loggers, trust)

    _watch(go, known.roster, socket, progress, folder, as_json)


def _watch(
    go: Callable[[Carried, Sequence[Logger]], Result],
    roster: ClientRoster,
    socket: Path,
    progress: RunProgress,
    out: Path,
    as_json: bool,
) -> None:
    """Serve to the end, with a line for whatever a person should know."""
    view = RoundView(progress)
    tell = (lambda line: None) if as_json else complain
    post = RelayPost(socket, [one.key for one in roster.entries], tell)
    tell(f"waiting for the relay at {socket}")
    advice = f"go on with: sparing serve --resume {out} --socket {socket} and what you gave it before"
    try:
        with INTERRUPT.advising(lambda: advice), view.shown(quiet=as_json) as logger:
            result = go(Carried(post, view.watch, tell), (logger,))
        post.close()
    except BaseException:
        post.leave()
        raise
    if as_json:
        print_json({**result.summary, "folder": str(out)})
    else:
        print_result(result, str(out), Console())


class RoundView:
    """The run so far, and below it the round that is under way: who has answered, and who has not."""

    def __init__(self, progress: RunProgress):
        self.progress = progress
        self.round: Progress | None = None

    def watch(self, progress: Progress) -> None:
        self.round = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.progress
        if self.round is not None:
            yield Text(f"  {self.line}", style="dim", no_wrap=True, overflow="crop")

    @property
    def line(self) -> str:
        now = self.round
        assert now is not None
        late = ", ".join(map(str, now.waiting[:_WAITING_SHOWN])) + (" ..." if len(now.waiting) > _WAITING_SHOWN else "")
        refused = f", {now.refused} letters refused (audit.jsonl)" if now.refused else ""
        waiting = f", waiting for clients {late}" if now.waiting else ""
        return f"round {now.round}: {now.counted} of {now.asked} uploads, {size_text(now.bytes)}{waiting}{refused}"

    @contextmanager
    def shown(self, quiet: bool) -> Iterator[Logger]:
        console = Console()
        if quiet:
            yield self.progress
        elif console.is_terminal:
            with Live(self, console=console, transient=True, refresh_per_second=4):
                yield self.progress
        else:
            yield log_plain_lines(self.progress)


def _handed_out(study: Study, keys: Path | None) -> KeyRoster | None:
    if keys is not None and study.secure is None:
        raise ConfigError("--keys is for studies with `secure: true`, which this one does not have; drop it")
    return None if keys is None else read_keys_file(keys)


def print_server_plan(study: Study, roster: Path, typed: TypedSets, keys: Path | None = None) -> None:
    """What would be sent to whom."""
    entries, sets = read_roster(roster), load_server_sets(*typed)
    if known := _handed_out(study, keys):
        PublicKeyBook().use(known, len(entries))
    study = study_on_network(study, entries)
    console = Console()
    asked = cohort_size(len(entries), study.sample)
    console.print(
        f"{len(entries)} clients on {len({one.key for one in entries.entries})} nodes; {asked} asked per round"
    )
    for line in _sizes_of_letters(study, sets, asked):
        console.print(line, highlight=False)
    for name in ("deadline", "quorum", "retries", "over", "resend", "most_samples", "evaluate"):
        console.print(f"network.{name}: {getattr(study.network, name)}", highlight=False)
    console.print("nothing was sent")


def _sizes_of_letters(study: Study, sets: ServerSets, asked: int) -> list[str]:
    if study.task.code() or study.task.model is None:
        return ["the model is code of your own; `sparing check` says what it sends"]
    found = explain_method(study.method, study.task.model, sets.shape, sets.classes, study.secure is not None, asked)
    most = found.sizes[0]
    if found.secure is not None:
        down = size_text(most.down.most + found.secure.down)
        return [
            f"to a client and round: heads of {HEAD_BYTES} bytes and at most {down}",
            f"from a client and round: heads of {HEAD_BYTES} bytes and about {size_text(found.secure.up)}, under masks",
        ]
    return [
        f"to a client and round: a head of {HEAD_BYTES} bytes and at most {size_text(most.down.most)}",
        f"from a client and round: a head of {HEAD_BYTES} bytes and at most {size_text(most.up.most)}",
    ]


# ----------------------------------------------------------------------------------------------------------- the node


def typed_sum_rules(secure: bool, keys: Path | None, fewest: int, colluding: int) -> SumRules:
    """What a node insists on: each of --keys, --fewest and --colluding implies --secure."""
    policy = NodePolicy(fewest, colluding)
    handed_out = None if keys is None else read_keys_file(keys)
    return SumRules(secure or keys is not None or policy != NodePolicy(), policy, handed_out)


def join_federation(
    data: Sequence[str],
    state: Path,
    socket: Path,
    model: str | None,
    loss: str | None,
    tell: Callable[[str], None],
    rules: SumRules,
) -> None:
    """Answer letters until somebody stops the process."""
    own = OwnCode(model=_typed_code(model), loss=_typed_code(loss))
    holdings = load_holdings(data)
    store, door, stopped = Store(state), listen(socket), threading.Event()
    node = Node(store, holdings, own, tell, rules=rules)
    for name, held in holdings.items():
        who = "this client" if name is None else f"client {name}"
        tell(f"{who} has {held.n} samples to train on; the server is told this number, and no sample")
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    tell(f"waiting for letters at {socket}")
    try:
        with INTERRUPT.advising(lambda: "start it again with the same --state to go on"):
            serve_letters(door, node.handle, MOST_LETTER, stopped)
    finally:
        store.close()


def print_public_keys(client: int, state: Path, tell: Callable[[str], None]) -> None:
    store = Store(state)
    try:
        public = open_node_keys(store.folder, client).public()
    finally:
        store.close()
    print(KeyRoster({client: public}).text(), end="")
    tell(f"fingerprint of client {client}: {public.fingerprint}")


def _typed_code(reference: str | None) -> str | None:
    return None if reference is None else trusted_call(reference).reference


def print_node_plan(data: Sequence[str], state: Path) -> None:
    """What would leave this machine."""
    console = Console()
    for name, held in load_holdings(data).items():
        who = "this client" if name is None else f"client {name}"
        tests = 0 if held.test is None else len(held.test[1])
        console.print(f"{who}: {held.n} training samples, {tests} test samples; none of them leaves this machine")
    told = [
        ("once", "the number of training samples, and that of the client"),
        (
            "per round",
            "an upload as the study's method writes it, and the mean training loss; if the study says "
            "`secure: true`, both under masks, so that the server sees sums over clients alone",
        ),
        ("if the server asks", "sums of hits and losses on the test samples, and their number"),
        ("kept in", f"{state}: state between rounds, the last upload, a secret for noise, keys for secure aggregation"),
    ]
    for when, what in told:
        console.print(f"{when}: {what}", highlight=False)
    console.print("nothing was sent")
