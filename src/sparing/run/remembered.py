"""Choices that were measured before, a small file each in the cache folder."""

import hashlib
import json
import math
import os
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from sparing.core.method import Phase
from sparing.engines.engine import Job
from sparing.run.config import PlanSection
from sparing.run.files import write_json
from sparing.run.timing import Speeds, Way
from sparing.task.data.places import cache_folder
from sparing.train.paths import PATHS


def place_of(plan: PlanSection, method: Sequence[Any], job: Job, cohort: int, cores: int) -> Path:
    """The file for these clients, this model, method and machine."""
    device, layout, local, data = next(iter(job.initial.values())).device, job.method.layout, job.method.local, job.task
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    n = data.train.count.double()
    asked = {
        "versions": [version("sparing"), torch.__version__],
        "machine": [device.type, machine, cores],
        "paths": sorted(PATHS),
        "plan": plan.model_dump(exclude={"bank", "parcels"}),
        "method": list(method),
        "model": [str(job.model), layout.shapes, layout.dtypes],
        "local": [[plain(phase) for phase in some] for some in (local.phases, local.wrapped_phases)] + [local.buffers],
        "samples": [data.train.x.shape[1:], data.train.x.dtype, str(data.train.augment)],
        "clients": [cohort, magnitude(float(n.mean())), magnitude(float(n.max()))],
    }
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()
    return cache_folder() / "plans" / f"{digest[:32]}.json"


def plain(phase: Phase) -> dict[str, Any]:
    """A phase as JSON can write it, the same every time."""
    return {key: sorted(x) if isinstance(x, frozenset) else x for key, x in phase._asdict().items()}


def magnitude(count: float) -> int:
    """The nearest power of two: the seed of a split is not to change it.

    >>> magnitude(100), magnitude(150), magnitude(200)
    (7, 7, 8)
    """
    return round(math.log2(max(count, 1.0)))


def recall(place: Path) -> tuple[Way, Speeds] | None:
    """What was chosen, and from what; None where there is no such file, or not a whole one."""
    try:
        kept = json.loads(place.read_text(encoding="utf-8"))
        speeds = {way_of(values): float(speed) for *values, speed in kept["speeds"]}
        return way_of(kept["chosen"]), speeds
    except (OSError, ValueError, KeyError, TypeError):
        return None


def way_of(values: list[Any]) -> Way:
    """Refuses what no plan could hold."""
    path, chunk, threads = values
    PlanSection(path=path, chunk=chunk, threads=threads)
    if "auto" in values:
        raise ValueError("not settled")
    return Way(path, chunk, threads)


def remember(place: Path, chosen: Way, speeds: Speeds) -> None:
    """Whole or not at all, whoever else writes the same."""
    draft = place.with_name(f"{place.name}.{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json(draft, {"chosen": chosen, "speeds": [[*way, speed] for way, speed in speeds.items()]})
        os.replace(draft, place)
    except OSError as error:
        warnings.warn(f"the plan is measured anew each time: cannot write {place} ({error})", stacklevel=2)
