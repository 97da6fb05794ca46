"""Starting, resuming: from a study and a task to a run that can loop."""

import random
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

from sparing.accel.install import SWITCH
from sparing.core import tree
from sparing.core.compose import compose, remake_model
from sparing.core.errors import ConfigError, TrainingError
from sparing.core.method import Method, Trait
from sparing.core.round import first_client, first_row, first_server
from sparing.core.tree import under
from sparing.data.options import name_and_options
from sparing.engines.engine import Engine, Job
from sparing.engines.reference import Reference
from sparing.engines.vector import Vector
from sparing.fleet.attack import Attack, choose_attackers, with_flipped_labels
from sparing.fleet.fleet import Fleet, read_arrivals, read_capacity, read_trace
from sparing.fleet.links import link_rates
from sparing.parts.size.lora.ranks import adapter_layers
from sparing.ranks.agreement import refuse_unshared_folder
from sparing.ranks.group import Ranks
from sparing.ranks.shards import RankRows, shard_of
from sparing.runs.environment import describe_environment
from sparing.runs.files.kept_parcels import keep_parcels
from sparing.runs.files.log import log_to_file, round_line
from sparing.runs.files.run_folder import (
    CHECKPOINT_FILE,
    CONFIG_FILE,
    FAILED_FILE,
    LEDGER_FILE,
    LOG_FILE,
    SERVER_SLOTS_FILE,
    SLOTS_FILE,
    FollowedFolder,
    RunFolder,
    read_config,
    server_from_tensors,
)
from sparing.runs.identity import refuse_other_identity, run_identity
from sparing.runs.loop import Logger, OwedRound, RunState, cohort_size, privacy_account, train_rounds
from sparing.runs.malloc import keep_freed_memory
from sparing.runs.own_code import CODE_FOLDER, keep_copies, trust_code
from sparing.runs.plan.settle import SettledPlan, settle_plan, study_device
from sparing.runs.plan.step_pieces import step_pieces
from sparing.runs.preflight import refuse_model_misfit
from sparing.runs.privacy import secret as secrets
from sparing.runs.privacy.releases import Releases
from sparing.runs.privacy.secret import ClientSecret, Secret
from sparing.runs.rank_runs import (
    agree_on_run,
    agreed_folder,
    agreed_plan,
    pace_words,
    process_ranks,
    refuse_idle_ranks,
)
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.results import Record, Result
from sparing.runs.snapshots import refuse_similarity_of_sizes
from sparing.runs.study import OWN_TASK, FleetSection, Study, place_code, study_from
from sparing.secure_round.settings import SecureSettings
from sparing.secure_round.summable import refuse_unsummable
from sparing.storage.atomic import os_errors_as_checkpoint_error, write_atomic
from sparing.storage.bank import ALL_CLIENTS, open_bank
from sparing.tasks.build import build_task
from sparing.tasks.code import CodeCall, is_code, load_code
from sparing.tasks.fingerprint import task_fingerprint
from sparing.tasks.task import Task, copy_model

_ENGINES = ("vector", "debug")
EngineMaker = Callable[[Job, RunFolder | None], Engine]
"""Makes the engine of a run whose clients are elsewhere."""


def run(
    task: Task | dict[str, Any] | str | None = None,
    method: str | Sequence[Any] = "fedavg",
    *,
    out: str | Path | None = None,
    loggers: Sequence[Logger] = (),
    secret: bytes | None = None,
    **study: Any,
) -> Result:
    """Train, and return the result. `study` takes every key of a study file: rounds, sample, local, seed, ...

    `task` is your own `sparing.Task`, the name of a dataset, or the task section of a study file as a dict. `secret` is
    what secret noise is drawn from, 32 bytes, to repeat a run whose secret was kept; by default it is new in every run.

    >>> result = run("digits", method="psfed+int8", rounds=1, sample=4, seed=1)
    >>> result.rounds, result.up_bytes < result.down_bytes
    (1, True)
    """
    own = study_of_arguments(task, method, study, kept=out is not None)
    return start_run(own, task if isinstance(task, Task) else None, out, loggers, secret, ranks=process_ranks(own))


def study_of_arguments(
    task: Task | dict[str, Any] | str | None, method: str | Sequence[Any], study: dict[str, Any], kept: bool = False
) -> Study:
    """The study that Python's arguments say. `kept`: a run folder will tell this task from others."""
    values: dict[str, Any] = {**study, "method": method}
    if isinstance(task, Task):
        known = {"name": task.name} | ({"fingerprint": task_fingerprint(task)} if kept else {})
        values["task"] = {"data": {OWN_TASK: known}, "clients": len(task), "split": None, "model": None}
        return study_from(values)
    if task is not None:
        values["task"] = {"data": task} if isinstance(task, str) else dict(task)
    place_code(values)
    own = study_from(values)
    trust_code(own)  # whoever writes Python runs code of their own
    return own


def start_run(
    study: Study,
    task: Task | None = None,
    out: str | Path | None = None,
    loggers: Sequence[Logger] = (),
    key: bytes | None = None,
    engine: EngineMaker | None = None,
    ranks: Ranks | None = None,
) -> Result:
    """A new run. Everything that can be refused is refused before anything is written.

    `ranks`: that play it together; each of them calls this.
    """
    secret, out = _secret_of_run(ranks, key), agreed_folder(ranks, out)
    own = measured_task(task, study) if task else task_from_study(study)
    job, study = settle_study(study, own, secret, ranks)
    with (
        nullcontext() if out is None else _created_folder(out, study, job, ranks) as folder,
        closing(new_run(study, job, folder, secret, engine, ranks)) as state,
    ):
        if folder and state.writes:
            state.releases.create()
            if state.secret:
                secrets.write_secret(folder.path, secret)
            keep_copies(study, folder.path)
        if folder:
            state.save()
        if folder and state.writes:
            folder.publish(study.model_dump())
        return _train_logged(state, loggers)


def _secret_of_run(ranks: Ranks | None, key: bytes | None) -> Secret:
    """One for all ranks."""
    secret = Secret(key)
    return Secret(bytes.fromhex(ranks.agreed(secret.key.hex()))) if ranks else secret


def _created_folder(out: Path, study: Study, job: Job, ranks: Ranks | None) -> RunFolder:
    if ranks is None or ranks.is_first:
        folder = RunFolder.create(out, study.device, job.task.metrics[0].name, study.secure is not None)
    else:
        folder = FollowedFolder(out)
    if ranks:
        refuse_unshared_folder(ranks, out)
    return folder


def resume(
    path: str | Path, task: Task | None = None, loggers: Sequence[Logger] = (), *, trust: bool = False
) -> Result:
    """Continue the run in a folder from its last checkpoint. A run on your own Task needs that task again.

    `trust`: run the code that came with the folder, though you have not run it before.
    """
    ranks = process_ranks(study_from(read_config(path), str(path)))
    return resume_run(path, task, loggers, trust, ranks=ranks)


def resume_run(
    path: str | Path,
    task: Task | None = None,
    loggers: Sequence[Logger] = (),
    trust: bool = False,
    engine: EngineMaker | None = None,
    ranks: Ranks | None = None,
) -> Result:
    """The same, of a run whose clients may be elsewhere, or that several ranks play."""
    with _opened_folder(Path(path), ranks) as folder:
        study = study_from(read_config(path), str(folder.path / CONFIG_FILE))
        if task is None and name_and_options("data", study.task.data)[0] == OWN_TASK:
            raise ConfigError(
                f"{path} was run on a task of your own; pass it again: sparing.resume({str(path)!r}, task=...)"
            )
        copies = folder.path / CODE_FOLDER
        if trust:
            trust_code(study, copies)
        key = secrets.read_secret(folder.path)
        secret = Secret(key)
        path = study.plan.path
        own = measured_task(task, study, copies) if task else task_from_study(study, copies)
        job, study = settle_study(study, own, secret, ranks)
        if study.plan.path != path:
            raise ConfigError(f"{folder.path} was run by path {path}, which {SWITCH} switches off; unset it to go on")
        with closing(new_run(study, job, folder, secret, engine, ranks)) as state:
            _restore_run(state, key)
            return _train_logged(state, loggers)


def _opened_folder(path: Path, ranks: Ranks | None) -> RunFolder:
    if ranks is None:
        return RunFolder.open(path)
    refuse_unshared_folder(ranks, path)
    return RunFolder.open(path) if ranks.is_first else FollowedFolder(path)


def _restore_run(run: RunState, key: bytes | None) -> None:
    """A run as its last checkpoint has it; nothing is changed in its folder before all of it is known to be sound."""
    folder = run.folder
    assert folder is not None
    tensors, meta = folder.load()
    refuse_other_identity(meta["identity"], run.identity, folder.path / CHECKPOINT_FILE)
    run.done, run.seconds, run.table = meta["round"], meta["seconds"], folder.records(meta["round"])
    if run.secret:
        run.releases.restore(meta["releases"])
        run.recount()
        if run.done < run.last or key is not None:
            secrets.refuse_other_secret(run.secret, key, meta["secret"], folder.path)
    run.server = server_from_tensors(tensors)._replace(rows=run.rows).to(run.server.device)
    if "owed" in meta:
        run.owed = OwedRound.of(under("owed", tensors), meta["owed"])
    run.bank.restore(under("bank", tensors))
    if run.rows is not None:
        run.rows.restore(under("rows", tensors))
    folder.cut()
    run.releases.cut()


def _train_logged(state: RunState, loggers: Sequence[Logger]) -> Result:
    """The loop, with what it says kept in the run folder."""
    if state.folder is None or not state.writes:
        return train_rounds(state, loggers if state.writes else ())
    about = describe_environment(state.study.device)
    plan = ", ".join(f"{name} {getattr(state.study.plan, name)}" for name in ("path", "chunk", "threads"))
    where = f"sparing {about['sparing']}, torch {about['torch']}, {about['device']}"
    ranks = f", {state.ranks.world} ranks" if state.ranks else ""
    opening = f"{where}, {plan}{ranks}: after round {state.done}"
    failed = state.folder.path / FAILED_FILE
    with log_to_file(state.folder.path / LOG_FILE, opening) as say:

        def log(record: Record) -> None:
            say(round_line(record) + (pace_words(state.engine.pace) if isinstance(state.engine, Vector) else ""))

        try:
            result = train_rounds(state, (log, *loggers))
        except TrainingError as error:
            with os_errors_as_checkpoint_error(failed):
                write_atomic(failed, f"{error}\n".encode())
            raise
    failed.unlink(missing_ok=True)
    return result


def task_from_study(study: Study, copies: Path | None = None) -> Task:
    """`copies`: where a run keeps the code that it began with."""
    return measured_task(build_task(**study.task.model_dump(), seed=study.seed, copies=copies), study, copies)


def measured_task(task: Task, study: Study, copies: Path | None = None) -> Task:
    """The task with the metrics that the study names, ours or one's own."""
    names = study.evaluate.metrics
    return task.measured_by([load_code(CodeCall(m), copies) if is_code(m) else m for m in names]) if names else task


def settle_study(
    study: Study, task: Task, secret: Secret | ClientSecret | None = None, ranks: Ranks | None = None
) -> tuple[Job, Study]:
    """The job for an engine, and the study with every "auto" replaced by what was chosen."""
    job, study, _ = settle_study_and_plan(study, task, secret, ranks)
    if ranks:
        agree_on_run(ranks, study, job)
    return job, study


def settle_study_and_plan(
    study: Study, task: Task, secret: Secret | ClientSecret | None = None, ranks: Ranks | None = None
) -> tuple[Job, Study, SettledPlan]:
    """The same, and how the plan came about. `secret`: what the method's secret noise will be drawn from."""
    device = ranks.device if ranks else study_device(study.device)
    task = task.on_validation() if study.evaluate.set == "validation" else task
    fleet = _fleet_from_section(study.fleet, task, study.seed)
    if fleet.attack is not None and fleet.attack.kind == "label-flip":
        task = with_flipped_labels(task, fleet.attack.who)
    made, static = recipes_from_entries(study.method, study.personalization.options()), study.local.buffers == "static"
    model = remake_model(_check_model(task.build(study.seed)), made, static, study.seed).to(device)
    layout = tree.layout_of(model, static)
    count = cohort_size(len(task) - len(task.held_out), study.sample)
    if ranks:
        refuse_idle_ranks(ranks, count)
    secret = secret or Secret()
    secure = secure_settings(study, fleet, count)
    given: dict[str, Any] = {"words": secret.words, "summed": secure.summed if secure else None}
    method = compose(layout, *made, local=study.local.local(), arrives=fleet.sure, **given)
    if _counts_sampling(method) and isinstance(secret, Secret):
        fleet = fleet._replace(draw=secret.cohort)
    job = Job(
        method=method,
        task=task.to(device),
        model=model,
        initial=tree.tree_of(model, layout),
        seed=study.seed,
        rounds=study.rounds,
        fleet=fleet,
        rest=tree.rest_of(model, layout),
        secure=secure,
    )
    if secure:
        refuse_unsummable(method, job.initial)
    if device.type == "cpu":
        keep_freed_memory()
    if job.method.fit is not None:
        fit = job.method.fit
        job = job._replace(sizes=tuple(fit.module(model, size) for size in range(len(fit.layouts))))
    refuse_model_misfit(job)
    if fleet.deadline is None and any(Trait.DEADLINE in codec.effect.traits for codec in job.method.up):
        raise ConfigError("budget names no bytes and rounds have no deadline; write budget: 20kB, or fleet.deadline")
    if study.task.probe and not job.method.probe:
        kept = f"task.probe is {study.task.probe:g}: the server holds these samples back from the clients"
        warnings.warn(f"{kept}, but no part of the method looks at them; drop it", stacklevel=2)
    if "adapter" in fleet.capacity and len(job.sizes) < 2 and adapter_layers(layout):
        said = "fleet.capacity declares adapter, but lora offers one rank, which every client trains"
        warnings.warn(f"{said}; offer several as lora.ranks, or drop the column", stacklevel=2)
    if "similarity" in study.record:
        refuse_similarity_of_sizes(job)
    privacy_account(job, count)  # refuses a budget that does not pay for one round
    found = settle_plan(study.plan, study.engine, job, count, study.method)
    if ranks:
        found = found._replace(plan=agreed_plan(ranks, found))
    study = study.model_copy(update={"plan": found.plan, "device": device.type if ranks else str(device)})
    names = ("path", "chunk", "threads", "precision", "graph")
    job = job._replace(**{name: getattr(found.plan, name) for name in names}, pieces=step_pieces(found.plan, job))
    return job, study, found


def secure_settings(study: Study, fleet: Fleet, count: int) -> SecureSettings | None:
    """What the study says of secure aggregation, where it asks for any; `count` clients are asked a round."""
    if study.secure is None:
        return None
    if fleet.deadline is not None:
        raise ConfigError(
            "fleet.deadline drops single uploads by their bytes, which a secure round does not know beforehand; drop "
            "it, or simulate losses by fleet.dropout"
        )
    if study.plan.parcels == "kept":
        raise ConfigError("plan.parcels is kept, and with secure no parcel goes up; drop one of them")
    settings = SecureSettings(**study.secure.model_dump())
    settings.check(count)
    return settings


def _counts_sampling(method: Method) -> bool:
    """Whether a promise of privacy rests on nobody knowing who takes part."""
    return method.privacy is not None and method.privacy.secret and method.privacy.mode == "central"


def _check_model(model: nn.Module) -> nn.Module:
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"the model ({type(model).__name__}) has no parameters to train; give it some")
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_meta:
            raise ConfigError(f"{name!r} is on the meta device, where there are no values; build the model on the CPU")
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ConfigError(f"parameter {name!r} has no shape yet; run the model once on a sample before using it")
        if not p.is_floating_point():
            raise ConfigError(f"parameter {name!r} is of type {p.dtype}; only real floats can be trained")
    copy_model(model)  # as every engine does, in rounds where a refusal would come late
    return model


def _fleet_from_section(section: FleetSection, task: Task, seed: int) -> Fleet:
    trace = read_trace(section.trace, len(task)) if section.trace else None
    capacity = link_rates(seed, len(task), **section.links.model_dump())
    if section.capacity:
        capacity |= read_capacity(section.capacity, len(task))
    if section.deadline is not None and "up" not in capacity:
        raise ConfigError(
            f"fleet.deadline is {section.deadline:g} seconds, but no client declares how fast it uploads; "
            "set fleet.links.up, or add a column up to the file fleet.capacity"
        )
    attack, said = None, section.attack
    if said.kind != "none":
        attack = Attack(said.kind, choose_attackers(seed, len(task), said.share, task.held_out), said.scale)
    when = (section.latency, section.deadline)
    fleet = Fleet(section.available, trace, section.dropout, capacity, task.held_out, attack, *when)
    if section.arrived is None:
        return fleet
    if not fleet.sure or trace is not None or section.available < 1:
        raise ConfigError("fleet.arrived says who came, so nobody is drawn; drop available, trace, dropout, deadline")
    return fleet._replace(arrivals=read_arrivals(Path(section.arrived) / LEDGER_FILE, len(task)))


def new_run(
    study: Study,
    job: Job,
    folder: RunFolder | None,
    secret: Secret | None = None,
    make: EngineMaker | None = None,
    ranks: Ranks | None = None,
) -> RunState:
    """The run before its first round."""
    clients, device = len(job.task), next(iter(job.initial.values())).device
    on_disk = study.plan.bank == "file"
    scratch = TemporaryDirectory(prefix="sparing-") if on_disk and folder is None else None
    where = Path(scratch.name) if scratch else folder.path if folder else None
    path = where / SLOTS_FILE if on_disk and where else None
    home = "cpu" if study.plan.bank == "host" else None
    shard = shard_of(ranks) if ranks else ALL_CLIENTS
    bank = open_bank(first_client(job.method, job.initial), clients, device, path, home, shard)
    template, beside = first_row(job.method, job.initial), path.with_name(SERVER_SLOTS_FILE) if path else None
    rows = open_bank(template, clients, device, beside, home, shard) if template else None
    if ranks:
        bank, rows = RankRows(bank, ranks), RankRows(rows, ranks) if rows else None
    server = first_server(job.method, job.initial, clients, rows, job.gradient)
    if make is None and study.engine not in _ENGINES:
        raise ConfigError(f"engine is {study.engine}, which needs clients elsewhere; use `sparing serve`")
    if make:
        engine = make(job, folder)
    else:
        engine = Reference(job, bank) if study.engine == "debug" else Vector(job, bank, ranks)
    used = secret if job.method.secret else None
    run = RunState(study, clients, engine, bank, server, folder, job, rows, scratch, secret=used, ranks=ranks)
    if folder:
        run.identity, run.releases = run_identity(study, job), Releases(folder.path if used and run.writes else None)
    if secret:
        secret.drawn.clear()  # by trials of the plan, which release nothing
    if study.plan.parcels == "kept":
        if folder is None:
            raise ConfigError("plan.parcels is kept, but this run has no folder to keep them in; name one (out=...)")
        run.engine = Reference(job, bank, keep_parcels(folder.path / "parcels", run.release))
    return run


def set_seed(seed: int) -> None:
    """Seed Python, NumPy and torch. sparing's own draws are keyed by `seed=` and do not need it; your model may."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
