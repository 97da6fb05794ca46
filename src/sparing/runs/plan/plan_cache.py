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
from sparing.data.files.locations import cache_folder
from sparing.data.inputs import samples_in_words
from sparing.engines.engine import Job
from sparing.runs.plan.plan_trials import LayoutSpeeds, WorkLayout
from sparing.runs.study import PlanSection
from sparing.storage.atomic import write_json
from sparing.train.paths import PATHS


def plan_cache_path(plan: PlanSection, method: Sequence[Any], job: Job, cohort: int, cores: int) -> Path:
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
        "local": [[_phase_as_json(phase) for phase in some] for some in (local.phases, local.wrapped_phases)]
        + [local.buffers],
        "samples": [samples_in_words(data.train.x), str(data.train.augment)],
        "clients": [cohort, _nearest_power_of_two(float(n.mean())), _nearest_power_of_two(float(n.max()))],
    }
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()
    return cache_folder() / "plans" / f"{digest[:32]}.json"


def _phase_as_json(phase: Phase) -> dict[str, Any]:
    """A phase as JSON can write it, the same every time."""
    return {key: sorted(x) if isinstance(x, frozenset) else x for key, x in phase._asdict().items()}


def _nearest_power_of_two(count: float) -> int:
    """The nearest power of two: the seed of a split is not to change it.

    >>> _nearest_power_of_two(100), _nearest_power_of_two(150), _nearest_power_of_two(200)
    (7, 7, 8)
    """
    return round(math.log2(max(count, 1.0)))


def recall_plan(place: Path) -> tuple[WorkLayout, LayoutSpeeds] | None:
    """What was chosen, and from what; None where there is no such file, or not a whole one."""
    try:
        kept = json.loads(place.read_text(encoding="utf-8"))
        speeds = {_layout_from_values(values): float(speed) for *values, speed in kept["speeds"]}
        return _layout_from_values(kept["chosen"]), speeds
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _layout_from_values(values: list[Any]) -> WorkLayout:
    """Refuses what no plan could hold."""
    path, chunk, threads = values
    PlanSection(path=path, chunk=chunk, threads=threads)
    if "auto" in values:
        raise ValueError("not settled")
    return WorkLayout(path, chunk, threads)


def remember_plan(place: Path, chosen: WorkLayout, speeds: LayoutSpeeds) -> None:
    """Whole or not at all, whoever else writes the same."""
    draft = place.with_name(f"{place.name}.{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json(draft, {"chosen": chosen, "speeds": [[*way, speed] for way, speed in speeds.items()]})
        os.replace(draft, place)
    except OSError as error:
        warnings.warn(f"the plan is measured anew each time: cannot write {place} ({error})", stacklevel=2)
