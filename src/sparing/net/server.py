"""A server of a federation: from a study, a roster and a carrier to a run folder like any other.

The run folder holds one file more, federation.json: the run's own random number, and the roster as nodes have joined.
"""

import secrets as random_source
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparing.core.errors import CheckpointError, ConfigError
from sparing.data.clients import Pair
from sparing.data.files.unpacking import read_json
from sparing.data.options import name_and_options
from sparing.engines.engine import Engine, Job
from sparing.net.asking import Clock, Post
from sparing.net.audit import AUDIT_FILE
from sparing.net.client_scores import are_secret
from sparing.net.desk import Desk, Progress
from sparing.net.roster import ClientRoster
from sparing.net.terms import terms_of
from sparing.runs.files.run_folder import RunFolder, read_config
from sparing.runs.loop import Logger
from sparing.runs.own_code import CODE_FOLDER
from sparing.runs.plan.step_pieces import pieces_as_given
from sparing.runs.privacy.secret import Secret, read_secret
from sparing.runs.results import Result
from sparing.runs.start import resume_run, settle_study, start_run
from sparing.runs.study import FleetSection, Study, study_from
from sparing.secure.long_term import KeyRoster
from sparing.storage.atomic import os_errors_as_checkpoint_error, write_json
from sparing.tasks.apart import task_without_samples
from sparing.tasks.build import network_builder, own_loss
from sparing.tasks.task import Task

FEDERATION_FILE = "federation.json"
_RUN_BYTES = 16


class ServerSets(NamedTuple):
    """What a server holds itself: what samples look like, and perhaps some of its own."""

    shape: tuple[int, ...]
    classes: int
    test: Pair | None = None
    probe: Pair | None = None

    @property
    def example(self) -> Pair:
        """A sample to try the model on."""
        if self.test is not None:
            return self.test[0][:1], self.test[1][:1]
        return torch.zeros(1, *self.shape), torch.zeros(1, dtype=torch.int64)

    @property
    def per_token(self) -> bool | None:
        """Whether there is a target at every place of a sequence; None where there are no samples to tell by."""
        return None if self.test is None else torch.as_tensor(self.test[1][:1]).ndim > 1


class Carried(NamedTuple):
    """How a server reaches its nodes, and who watches."""

    post: Post
    watch: Callable[[Progress], None] = lambda progress: None
    tell: Callable[[str], None] = lambda line: None
    clock: Clock | None = None


def start_federation(
    study: Study,
    roster: ClientRoster,
    sets: ServerSets,
    carried: Carried,
    out: str | Path | None = None,
    loggers: Sequence[Logger] = (),
    key: bytes | None = None,
    keys: KeyRoster | None = None,
) -> Result:
    """A new run: everybody in the roster joins, then rounds are played.

    `keys`: everybody's public keys, for secure sums; by default as nodes say when they join.
    """
    study = study_on_network(study, roster)
    run, secret = random_source.token_bytes(_RUN_BYTES), Secret(key)
    known = torch.tensor([max(1, one.samples or 1) for one in roster.entries])
    job, _ = settle_study(study, _server_task(study, known, sets), secret)
    terms = terms_of(study, job, sets.shape, sets.classes).to_bytes()
    warn_unbounded(job)
    if study.network.evaluate == "clients" and are_secret(job):
        raise ConfigError("network.evaluate is clients, and with dp.mode local they tell nobody; set it to server")
    desk = _desk(job, carried, roster, study, run, terms, secret)
    if keys is not None:
        desk.keys.use(keys, len(roster))
    gather(desk, carried)

    def make(job: Job, folder: RunFolder | None) -> Engine:
        if folder is not None:
            _write_federation(folder.path, run, roster, sets, desk.keys.text() if job.secure else "")
            desk.audit.path = folder.path / AUDIT_FILE
            desk.folder = folder.path
        desk.job = _with_capacity(job, roster)
        return desk

    return start_run(study, _server_task(study, roster.count, sets), out, loggers, secret.key, make)


def resume_federation(
    path: str | Path, sets: ServerSets, carried: Carried, loggers: Sequence[Logger] = (), trust: bool = False
) -> Result:
    """Go on with the run in a folder; its nodes may be anywhere between its last checkpoint and where it stopped."""
    folder = Path(path)
    study = study_from(read_config(folder), str(folder))
    if study.engine != "network":
        raise ConfigError(f"{folder} is a simulation; go on with `sparing resume {folder}`")
    held = read_federation(folder)
    run, roster = held.run, held.roster
    key = read_secret(folder)

    def make(job: Job, opened: RunFolder | None) -> Engine:
        terms = terms_of(study, job, sets.shape, sets.classes, folder / CODE_FOLDER).to_bytes()
        desk = _desk(_with_capacity(job, roster), carried, roster, study, run, terms, Secret(key) if key else None)
        desk.audit.path = folder / AUDIT_FILE
        desk.folder = folder
        desk.keys.restore(held.keys)
        return desk

    copies = folder / CODE_FOLDER
    return resume_run(path, _server_task(study, roster.count, sets, copies), loggers, trust, make)


def _desk(
    job: Job, carried: Carried, roster: ClientRoster, study: Study, run: bytes, terms: bytes, secret: Secret | None
) -> Desk:
    seen = (carried.watch, carried.clock)
    return Desk(job, carried.post, roster, study.network, run, terms, secret, None, *seen)


def _with_capacity(job: Job, roster: ClientRoster) -> Job:
    """What devices declare stands in the roster, unless the study names a file for it."""
    return job._replace(fleet=job.fleet._replace(capacity=roster.capacity)) if roster.capacity else job


def gather(desk: Desk, carried: Carried) -> None:
    """Wait until everybody has joined: the weights of all follow from everybody's number of samples."""
    pause = desk.section.resend
    while missing := [who for who in range(len(desk.roster)) if who not in desk.joined]:
        before = dict(desk.audit.reasons)
        desk.greet(missing, pause)
        for who in sorted(desk.joined & set(missing)):
            entry = desk.roster.entries[who]
            carried.tell(f"client {who} ({entry.key}) joined with {entry.samples} samples")
        for who, why in desk.audit.reasons.items():
            if before.get(who) != why:
                carried.tell(f"client {who}: {why}")
        if missing := [who for who in missing if who not in desk.joined]:
            desk.clock.sleep(min(pause, 5.0))
            carried.tell(f"waiting for {len(missing)} clients to join: {', '.join(map(str, missing[:10]))}")
    if desk.job.secure:
        _agree_on_keys(desk, carried)


def _agree_on_keys(desk: Desk, carried: Carried) -> None:
    """Wait until everybody has everybody's public keys."""
    pause, reasons = desk.section.resend, desk.audit.reasons
    carried.tell(f"key roster {desk.keys.roster.fingerprint}: every node shows the same")
    while missing := [who for who in range(len(desk.roster)) if who not in desk.keys.confirmed]:
        desk.share_keys(missing, pause)
        if missing := [who for who in missing if who not in desk.keys.confirmed]:
            why = next((f"; client {who}: {reasons[who]}" for who in missing if who in reasons), "")
            carried.tell(f"waiting for {len(missing)} clients to accept everybody's keys{why}")
            desk.clock.sleep(min(pause, 5.0))


def study_on_network(study: Study, roster: ClientRoster) -> Study:
    """The study as a server plays it. What only a simulation can do is refused."""
    for key in FleetSection.model_fields:
        if key != "capacity" and getattr(study.fleet, key) != getattr(FleetSection(), key):
            raise ConfigError(f"fleet.{key} is for simulations: on a network clients come and go as they do; drop it")
    if study.fleet.capacity and roster.capacity:
        raise ConfigError("fleet.capacity and the roster both say what devices can do; drop fleet.capacity")
    if study.plan.parcels == "kept":
        raise ConfigError("plan.parcels is kept, which is for simulations; drop it")
    if study.record:
        raise ConfigError(f"record is {study.record}, which looks into clients; on a network nobody can: drop it")
    if study.task.held_out:
        raise ConfigError(f"task.held_out is {study.task.held_out}; on a network leave these clients out of the roster")
    if study.evaluate.set == "validation":
        raise ConfigError("evaluate.set is validation, which clients hold; on a network give the server test samples")
    for entry in study.method:
        name, options = name_and_options("method", entry)
        if options.get("source") == "seed":
            raise ConfigError(f"{name}.source is seed: noise from the study's public seed protects nobody; drop it")
    if isinstance(study.network.quorum, float) and study.network.quorum > 1:
        raise ConfigError(f"network.quorum is {study.network.quorum}; a share lies between 0 and 1, a count is whole")
    path = "loop" if study.plan.path == "auto" else study.plan.path
    plan = {"path": path, "chunk": 1, "threads": 1, "bank": "memory", **pieces_as_given(study.plan)}
    return study.model_copy(
        update={"engine": "network", "checkpoint": 1, "plan": study.plan.model_copy(update=plan), "device": "cpu"}
    )


def warn_unbounded(job: Job) -> None:
    if not job.method.blend.lenient and job.method.blend.collect is None and not job.secure:
        warnings.warn(
            "nothing bounds what one client can do to the model; put norm-bound into the method, such as "
            "{norm-bound: {bound: 10}}",
            stacklevel=2,
        )


def _server_task(study: Study, count: Any, sets: ServerSets, copies: Path | None = None) -> Task:
    model, loss = study.task.model, study.task.loss
    if model is None:
        raise ConfigError("task.model names no network; name one of sparing's, or my_file.py:Net")
    task = task_without_samples(
        network_builder(model, sets.shape, sets.classes, copies, None, sets.per_token),
        count,
        sets.example,
        loss=None if loss is None else own_loss(loss, copies),
        test=sets.test,
        probe=sets.probe,
        name=name_and_options("data", study.task.data)[0],
    )
    return task


def _write_federation(folder: Path, run: bytes, roster: ClientRoster, sets: ServerSets, keys: str) -> None:
    path = folder / FEDERATION_FILE
    known = {"run": run.hex(), "roster": roster.to_json(), "shape": list(sets.shape), "classes": sets.classes}
    known |= {"keys": keys} if keys else {}
    with os_errors_as_checkpoint_error(path):
        write_json(path, known)


class FederationFile(NamedTuple):
    """What a run folder knows of its federation."""

    run: bytes
    roster: ClientRoster
    shape: tuple[int, ...]  # of a sample
    classes: int
    keys: str = ""  # everybody's public keys, where uploads are summed under masks


def read_federation(folder: Path) -> FederationFile:
    path = folder / FEDERATION_FILE
    held = read_json(path, f"{path} is missing or was altered, and without it nodes cannot be told apart; restore it")
    try:
        run, roster = bytes.fromhex(held["run"]), ClientRoster.from_json(held["roster"])
        known = FederationFile(run, roster, tuple(map(int, held["shape"])), int(held["classes"]))
        known = known._replace(keys=str(held.get("keys", "")))
        if len(run) != _RUN_BYTES or min(known.shape, default=1) < 1 or known.classes < 1:
            raise ValueError
        return known
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path} was altered; restore it from a copy") from None
