"""How the work is laid out on this machine: the path of local training, clients at once, threads, and the bank.

Short runs are laid out by rule. Where a run is long enough for it to pay, a few ways are tried against the clock, and
the choice is remembered in the cache folder. Either way it is written into the run, which never chooses again.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparing.accel.install import SWITCH
from sparing.accel.train_choice import fastest_path
from sparing.accel.train_cpu.implicit import can_imply, history_bytes, most_visits
from sparing.accel.train_cuda.captured import can_capture, forget_recordings
from sparing.accel.train_cuda.compiled_path import can_compile
from sparing.core.byte_sizes import bytes_of_text
from sparing.core.errors import ConfigError
from sparing.core.method import Form
from sparing.core.round import first_client, first_row
from sparing.core.tree import Tree
from sparing.data.inputs import sample_tensors
from sparing.engines.engine import Job
from sparing.parts.size.mixture import Mix
from sparing.ranks.rank_place import rank_place
from sparing.runs.plan.plan_cache import plan_cache_path, recall_plan, remember_plan
from sparing.runs.plan.plan_trials import (
    TRIAL_STEPS,
    TRIAL_VISITS,
    LayoutSpeeds,
    WorkLayout,
    clients_in_trial,
    guess_training_seconds,
    layout_trial,
    race_layouts,
    synchronized_time,
)
from sparing.runs.plan.step_pieces import asks_for_pieces, settle_pieces, step_pieces, without_pieces
from sparing.runs.preflight import path_agrees, refuse_without_bfloat16
from sparing.runs.study import PlanSection
from sparing.train.paths import PATHS, path_called

_FLIGHT_MEMORY = (
    1 << 30
)  # bytes of client models and updates in flight, where the study does not say; a quarter of a GPU
_COPIES_PER_CLIENT = (
    8  # of a client's model and state: start, after, update, gradient, masks, codecs; twice that if rotated
)
_MOST_AT_ONCE = 256  # clients, however small they are
_RECORDED = ("stacked", "compiled")  # paths of which a step can be recorded as a CUDA graph
_BANK_MEMORY = (
    2 << 30
)  # bytes of client state that may live in memory; with a GPU a quarter of its own, then of its host's
LONG_RUN_SECONDS = 20.0  # seconds of training, roughly, from which on measuring pays
_TRIAL_SHARE, _LEAST_TRIAL_SECONDS, _MOST_TRIAL_SECONDS = (
    0.02,
    1.0,
    10.0,
)  # of that, and seconds, that measuring may take
_BUSY_LOAD = 1.5  # processes waiting for a core, from which on nothing is measured
_CLEARLY_FASTER = 1.15  # times faster than the rule's choice, or the rule has its way


class SettledPlan(NamedTuple):
    """A plan without any "auto", and how it came about."""

    plan: PlanSection
    how: str  # "given", "rule", "measured" or "remembered"
    why: str  # the rule had to do
    speeds: LayoutSpeeds  # clients a second, of the ways that were tried
    client_bytes: int  # that one client in flight takes
    memory_bytes: int  # that all of them may take


def study_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; use auto, cpu or cuda")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device is {name!r}; use auto, cpu, cuda or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but this machine has no usable GPU; use cpu or auto")
    return device


def settle_plan(plan: PlanSection, engine: str, job: Job, cohort: int, method: Sequence[Any]) -> SettledPlan:
    """Replace every "auto" by a choice. `method` is the study's list of names and options."""
    device = next(iter(job.initial.values())).device
    plan = _on_existing_path(plan)
    _refuse_plan(plan, engine, job)
    job = job._replace(precision=plan.precision, graph=plan.graph is not False and _can_record_graph(job))
    plan, path, step = _settle_step(plan, engine, job)
    job = job._replace(pieces=step_pieces(plan, job))
    way = _layout_by_rule(path, plan, engine, job, cohort, step)
    how, why, speeds = "rule", "", LayoutSpeeds()
    if engine != "vector":
        why = f"engine {engine} trains one client after the other"
    elif "auto" not in (plan.path, plan.chunk, plan.threads):
        how = "given"
    elif job.graph and way.path in _RECORDED:
        why = "nothing comes near a recorded step on a GPU"
    elif (seconds := guess_training_seconds(job, cohort)) < LONG_RUN_SECONDS:
        why = f"about {seconds:.1g} s of training are too few to measure"
    else:
        how, why, way, speeds = _measured_layout(way, plan, job, cohort, method, seconds, step)
    graph = job.graph and way.path in _RECORDED and path_agrees(job, way.path, graph=True)
    forget_recordings(job.model)
    if plan.graph is True and not graph:
        raise ConfigError(
            f"plan.graph is true, but this training cannot be recorded, or comes out differently (path {way.path}): it "
            "takes path stacked or compiled and SGD without prox, correction or kept velocities; drop it"
        )
    bank = _settle_bank(job, device) if plan.bank == "auto" else plan.bank
    settled = plan.model_copy(update={**way._asdict(), "bank": bank, "graph": graph})
    return SettledPlan(settled, how, why, speeds, _client_bytes(way.path, job), _flight_memory(plan, device))


def _settle_step(plan: PlanSection, engine: str, job: Job) -> tuple[PlanSection, str, int]:
    """The path, how it takes a step, and the bytes of activations that one client's step holds.

    Clients side by side take whole steps: where one client's does not fit, they train in turn.
    """
    device = next(iter(job.initial.values())).device
    path, whole = _settle_path(plan.path, engine, job), _flight_memory(plan, device)
    room = max(whole - _client_bytes("loop", job), whole // 4)
    if path_called(path).in_turn:
        step = settle_pieces(plan, job, room)
        return step.plan, path, step.bytes
    text = _is_text(job)
    if plan.path == "auto" and (asks_for_pieces(plan) or (text and settle_pieces(plan, job, room).whole_bytes > room)):
        step = settle_pieces(plan, job, room)
        return step.plan, "loop-fast", step.bytes
    held = settle_pieces(plan, job, room).whole_bytes if text else 0
    return without_pieces(plan.model_copy(update={"path": path})).model_copy(update={"path": plan.path}), path, held


def _is_text(job: Job) -> bool:
    """Whether samples are tokens, of which a step holds much more than of pictures."""
    first = next(x for _, x in sample_tensors(job.task.train.x))
    return not first.is_floating_point() and first.ndim == 2


def _on_existing_path(plan: PlanSection) -> PlanSection:
    """Without accelerators, a study that names one of their paths takes the plain one."""
    if plan.path == "auto" or plan.path in PATHS:
        return plan
    warnings.warn(f"plan.path is {plan.path}, but {SWITCH} is set, so the run takes path loop", stacklevel=2)
    return plan.model_copy(update={"path": "loop"})


def _settle_bank(job: Job, device: torch.device) -> str:
    """The fastest place that has room for every client's state."""
    each = tree_bytes(first_client(job.method, job.initial)) + tree_bytes(first_row(job.method, job.initial))
    whole = each * len(job.task)
    if device.type == "cpu":
        return "memory" if whole <= _BANK_MEMORY else "file"
    if whole <= torch.cuda.get_device_properties(device).total_memory // 4:
        return "memory"
    return "host" if whole <= _host_memory() // 4 else "file"


def _host_memory() -> int:
    """Bytes that this process may use: the machine's, or fewer where its group is held to fewer."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            found.append(int(path.read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return min(found)


def _refuse_plan(plan: PlanSection, engine: str, job: Job) -> None:
    device = next(iter(job.initial.values())).device
    if plan.parcels == "kept" and engine != "debug":
        raise ConfigError(f"plan.parcels is kept, but engine {engine!r} only counts their bytes; set engine: debug")
    for key, off in (("precision", ("float32", "bf16")), ("graph", (False,)), ("bank", ("memory", "file"))):
        value = getattr(plan, key)
        if device.type != "cuda" and value not in (*off, "auto"):
            raise ConfigError(
                f"plan.{key} is {str(value).lower()}, which is for CUDA, but the device is {device}; drop it"
            )
    half = device.type == "cpu" and plan.precision == "bf16"
    if half and "loop-fast" not in PATHS:
        raise ConfigError(f"plan.precision is bf16, which takes accelerators, but {SWITCH} is set; drop one of them")
    if half and plan.path in ("loop", *_RECORDED):
        raise ConfigError(
            f"plan.path is {plan.path}, on a CPU for float32 alone, but plan.precision is bf16; use loop-fast"
        )
    clients = 1 if plan.threads == "auto" else plan.threads
    if plan.memory != "auto" and (least := clients * _client_bytes("loop", job)) > _flight_memory(plan, device):
        raise ConfigError(
            f"plan.memory is {plan.memory}, but the models and updates of {clients} at once take {least:,} bytes; "
            "allow so many, or set plan.threads to 1"
        )
    if half:
        refuse_without_bfloat16(job)
    if half and _is_bfloat16_emulated(getattr(torch.cpu, "get_capabilities", dict)()):  # not in every torch
        warnings.warn(
            "plan.precision is bf16, for which this processor has no instructions, so float32 may be faster; drop it",
            stacklevel=2,
        )


def _is_bfloat16_emulated(processor: Mapping[str, Any]) -> bool:
    """Whether products of bfloat16 are put together from others; of processors other than x86 nothing is said."""
    has = processor.get("avx512_bf16") or processor.get("amx_bf16")
    return processor.get("architecture") == "x86_64" and not has


def _can_record_graph(job: Job) -> bool:
    local, bases = job.method.local, isinstance(job.model, Mix)
    single = isinstance(job.task.train.x, torch.Tensor)
    plain = single and not bases and not local.wrapped_phases and not local.init(job.method.layout)
    return "stacked" in PATHS and can_capture(local, job.initial) and plain


def _can_compile_steps(job: Job) -> bool:
    """In float32, three products of TF32 parts in kernels of ours are quicker than what cuDNN has."""
    few_bits = job.precision != "float32"
    return few_bits and job.graph and not job.sizes and can_compile(job.model, job.method.local)


def _layout_by_rule(path: str, plan: PlanSection, engine: str, job: Job, cohort: int, step: int = 0) -> WorkLayout:
    """The usual way to take this path, where one client's step holds so many bytes of activations."""
    on_cpu = next(iter(job.initial.values())).device.type == "cpu"
    chunk, threads = plan.chunk, plan.threads
    if chunk == "auto":
        most = _most_clients_at_once(path, plan, job, cohort, step)
        chunk = max(1, min(most, _MOST_AT_ONCE))
    if threads == "auto":
        many = (path == "implicit" or path_called(path).in_turn) and on_cpu and engine == "vector"
        threads = min(_cpu_cores(), chunk, _most_steps_at_once(path, plan, job, step)) if many else 1
    threads = threads if on_cpu else 1
    return WorkLayout(path, 1 if engine == "debug" else chunk, threads)


def _measured_layout(
    rule: WorkLayout, plan: PlanSection, job: Job, cohort: int, method: Sequence[Any], seconds: float, step: int
) -> tuple[str, str, WorkLayout, LayoutSpeeds]:
    """The fastest of a few ways, as remembered or as tried now: first each path and number of threads, then chunks."""
    place = plan_cache_path(plan, method, job, cohort, _cpu_cores())
    known = recall_plan(place)
    if known is not None and _path_works(known[0].path, job):
        return "remembered", "", *known
    if _machine_is_busy():
        return "rule", "the machine is too busy to measure", rule, {}
    on_cpu = next(iter(job.initial.values())).device.type == "cpu"
    visited = most_visits(job.method.local, _most_samples(job))
    paths = [
        path
        for path in PATHS
        if path in (rule.path, plan.path)
        or (plan.path == "auto" and path not in ("loop", "compiled") and _path_works(path, job))
        if path_called(path).in_turn or not asks_for_pieces(plan)
    ]
    if visited > TRIAL_VISITS and rule.path != "implicit":
        paths = [path for path in paths if path != "implicit"]
    ways = [rule]
    for path in paths:
        way = _layout_by_rule(path, plan, "vector", job, cohort, step)
        many = (1, min(_cpu_cores(), way.chunk)) if plan.threads == "auto" and on_cpu else (way.threads,)
        ways += [way._replace(threads=n) for n in many]

    def clients(way: WorkLayout) -> int:
        return clients_in_trial(way, cohort)

    trial = layout_trial(job, cohort, None if "implicit" in paths and visited <= TRIAL_VISITS else TRIAL_STEPS)
    until = synchronized_time() + max(_LEAST_TRIAL_SECONDS, min(_MOST_TRIAL_SECONDS, _TRIAL_SHARE * seconds))
    speeds = race_layouts(list(dict.fromkeys(ways)), trial, clients, until)
    fastest = max(speeds, key=lambda way: speeds[way])
    if plan.chunk == "auto" and not path_called(fastest.path).in_turn:
        most = _most_clients_at_once(fastest.path, plan, job, cohort, step)
        sizes = {
            max(fastest.threads, min(most, size)) for size in (fastest.chunk // 2, 2 * fastest.chunk, 4 * fastest.chunk)
        }
        others = [fastest._replace(chunk=size) for size in sorted(sizes - {fastest.chunk})]
        speeds |= race_layouts([fastest, *others], trial, clients, until)
        fastest = max(speeds, key=lambda way: speeds[way])
    if sum(speed > 0 for speed in speeds.values()) < 2:
        return "rule", "there was no time to compare", rule, speeds
    chosen = fastest if speeds[fastest] > _CLEARLY_FASTER * speeds[rule] else rule
    remember_plan(place, chosen, speeds)
    return "measured", "", chosen, speeds


def _settle_path(path: str, engine: str, job: Job) -> str:
    device = next(iter(job.initial.values())).device
    if path == "auto":
        if "loop-fast" not in PATHS:
            return "loop"
        if engine != "vector":
            return "loop" if _path_works("loop", job) else "loop-fast"
        samples = _most_samples(job)
        offers = [fastest_path(job.model, device, job.method.local, samples), fastest_path(job.model, device)]
        if "compiled" in offers:
            offers = [offer for offer in offers if offer != "compiled" or _can_compile_steps(job)] + ["stacked"]
        return next((offer for offer in offers if _path_works(offer, job)), "loop-fast")
    if not _path_works(path, job):
        raise ConfigError(f"plan.path is {path}, but this model trains differently or not at all by it; use loop")
    return path


def _path_works(path: str, job: Job) -> bool:
    """Whether this path trains as the loop does, in every size of the model, and with this precision."""
    device = next(iter(job.initial.values())).device
    if path in ("loop", *_RECORDED) and job.precision == "bf16" and device.type == "cpu":
        return False
    fits = path != "implicit" or all(can_imply(model, job.method.local) for model in job.sizes or (job.model,))
    return path_called(path).in_turn or (fits and path_agrees(job, path, graph=job.graph and path == "compiled"))


def _flight_memory(plan: PlanSection, device: torch.device) -> int:
    """Bytes that clients in flight may take together."""
    if plan.memory != "auto":
        return int(bytes_of_text(plan.memory))
    return torch.cuda.get_device_properties(device).total_memory // 4 if device.type == "cuda" else _FLIGHT_MEMORY


def _client_bytes(path: str, job: Job) -> int:
    """What one client in flight takes: its models, its updates, its state."""
    past = history_bytes(job.model, job.method.local, _most_samples(job)) if path == "implicit" else 0
    copies = _COPIES_PER_CLIENT * (2 if any(Form.BASIS in codec.effect.gives for codec in job.method.up) else 1)
    return max(1, copies * (tree_bytes(job.initial) + tree_bytes(first_client(job.method, job.initial))) + past)


def _most_clients_at_once(path: str, plan: PlanSection, job: Job, cohort: int, step: int = 0) -> int:
    """Of the cohort, at once; of those that train in turn, one holds a step."""
    memory, client = _flight_memory(plan, next(iter(job.initial.values())).device), _client_bytes(path, job)
    step = step if step > client else 0  # among its copies there is room for as much
    if path_called(path).in_turn:
        return min(cohort, (memory - step) // client) if step + client <= memory else 1
    return min(cohort, memory // (client + step))


def _most_steps_at_once(path: str, plan: PlanSection, job: Job, step: int) -> int:
    """Threads for whose clients, and what their steps hold, there is memory."""
    memory, client = _flight_memory(plan, next(iter(job.initial.values())).device), _client_bytes(path, job)
    return max(1, memory // (client + step)) if step > client else _cpu_cores()


def _cpu_cores() -> int:
    """Of this machine, those that are this process's where several ranks share it."""
    place = rank_place(os.environ)
    return max(1, (os.cpu_count() or 1) // (place.local_world if place else 1))


def _machine_is_busy() -> bool:
    """Whether others want more of the processor than there is: trials would say more of them than of us."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > _BUSY_LOAD * _cpu_cores()


def _most_samples(job: Job) -> int:
    return int(job.task.train.count.max())


def tree_bytes(tree: Tree) -> int:
    return sum(x.numel() * x.element_size() for x in tree.values())
