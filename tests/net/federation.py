"""A small federation in one process, beside the simulation of the same study."""

import warnings
from pathlib import Path
from typing import Any

import torch

import sparing
from sparing.core.tree import tree_sha256
from sparing.net.asking import Clock
from sparing.net.letter import CAPACITIES
from sparing.net.loopback import Loopback
from sparing.net.node import Holding, Node
from sparing.net.roster import ClientRoster, Entry
from sparing.net.server import Carried, ServerSets, resume_federation, start_federation
from sparing.net.store import Store
from sparing.runs.loop import train_rounds
from sparing.runs.privacy.secret import Secret
from sparing.runs.start import new_run, settle_study, task_from_study
from sparing.runs.study import Study, study_from
from sparing.tasks.task import Task
from sparing.wire.frame import BYTE_KINDS

TASK = {"data": "digits", "clients": 6, "split": {"dirichlet": 0.5}, "model": {"mlp": {"hidden": [16]}}}
STUDY = {"task": TASK, "rounds": 4, "sample": 4, "seed": 3, "plan": {"path": "loop"}, "local": {"epochs": 1, "lr": 0.1}}
KEY = bytes(range(32))


def study_with(method: Any, **other: Any) -> Study:
    return study_from(STUDY | {"method": method} | other)


class QuickClock(Clock):
    """Time passes only while the server waits; a server that would wait for ever is stopped."""

    def __init__(self, most: int = 3000):
        self.time, self.left = 0.0, most

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.left -= 1
        assert self.left, "the server waits for something that never comes"


class Simulated:
    """The study in the reference engine: the result, the ledger and every client's state."""

    def __init__(self, study: Study, out: Path, key: bytes = KEY):
        from sparing.runs.files.run_folder import RunFolder

        secret = Secret(key)
        job, study = settle_study(study.model_copy(update={"engine": "debug"}), task_from_study(study), secret)
        with RunFolder.create(out, "cpu", secure=study.secure is not None) as folder:
            run = new_run(study, job, folder, secret)
            run.releases.create()
            run.save()
            self.result = train_rounds(run)
            clients = torch.arange(len(job.task))
            whole = run.bank.read(clients)
            self.states = {k: {n: x[k : k + 1].clone() for n, x in whole.items()} for k in clients.tolist()}
        self.ledger = (out / "ledger.csv").read_text()


class Federated:
    """The same study with every client on a node of its own."""

    def __init__(
        self, study: Study, folder: Path, key: bytes | None = KEY, capacity: dict[str, torch.Tensor] | None = None
    ):
        self.study, self.folder, self.key = study, folder, key
        self.task = task_from_study(study)
        self.nodes: dict[int, Node] = {}
        for who in range(len(self.task)):
            self.start_node(who)
        capacity = capacity or {}
        declared = [
            tuple(float(capacity[name][k]) if name in capacity else float("nan") for name in CAPACITIES)
            for k in range(len(self.task))
        ]
        self.roster = ClientRoster([Entry(k, f"node-{k}", None, declared[k]) for k in range(len(self.task))])
        self.sets = server_sets(self.task)

    def holding(self, who: int) -> Holding:
        test = self.task.test.client(who) if self.task.test is not None else None
        return Holding(self.task.train.client(who), test if test is not None and len(test[1]) else None)

    def start_node(self, who: int) -> None:
        """As a new process would, from its folder alone."""
        if who in self.nodes:
            self.nodes[who].store.close()
        secrets = {who: Secret(self.key).of_client(who)} if self.key else {}
        self.nodes[who] = Node(Store(self.folder / f"node-{who}"), {who: self.holding(who)}, secrets=secrets)

    def carried(self, post: Any = None, **other: Any) -> Carried:
        handles = {who: (lambda data, who=who: self.nodes[who].handle(data)) for who in self.nodes}
        return Carried(post or Loopback(handles), clock=other.pop("clock", None) or QuickClock(), **other)

    def run(self, post: Any = None, out: Path | None = None, **other: Any) -> sparing.Result:
        out = out or self.folder / "run"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "nothing bounds")
            return start_federation(self.study, self.roster, self.sets, self.carried(post, **other), out, key=self.key)

    def resume(self, post: Any = None, out: Path | None = None, **other: Any) -> sparing.Result:
        return resume_federation(out or self.folder / "run", self.sets, self.carried(post, **other))

    @property
    def ledger(self) -> str:
        return (self.folder / "run" / "ledger.csv").read_text()

    def state(self, who: int, rounds: int) -> dict[str, torch.Tensor]:
        """Of a client, once it knows which of its rounds count."""
        kept = self.nodes[who].store.load(who)
        assert kept is not None
        counted = [int(row.split(",")[0]) for row in self.ledger.splitlines()[1:] if _counts(row, who)]
        found = kept.resolved(max(counted, default=0)).state
        return found or {}


def _counts(row: str, who: int) -> bool:
    _, client, direction, *sizes = row.split(",")
    told = sizes[-1:] if len(sizes) > len(BYTE_KINDS) else sizes  # of a secure sum: the column that says so
    return int(client) == who and direction == "up" and any(int(x) for x in told)


def server_sets(task: Task) -> ServerSets:
    shape = tuple(task.train.x.shape[1:])
    return ServerSets(shape, 10, task.test_all, task.probe)


def same_states(federated: Federated, simulated: Simulated) -> bool:
    rounds = simulated.result.rounds
    for who, state in simulated.states.items():
        mine = federated.state(who, rounds)
        if mine and tree_sha256(mine) != tree_sha256(state):
            return False
    return True
