"""One job: a study is trained, and its curve comes back."""

import time
from typing import Any

from question import Job, Row, Setting

COLUMNS = ("round", "global", "personal", "worst", "after", "up", "down", "clock")


def study_of(setting: Setting, row: Row, job: Job) -> dict[str, Any]:
    """The keys of this run. Rates are chosen on validation samples; final runs train on all training samples."""
    rate = job["stage"] == "rate"
    rounds = round((setting.tuning_rounds if rate else setting.study["rounds"]) * row.stretch)
    study = merged(setting.study, row.study)
    study["local"] = {**study["local"], "lr": job["rate"]}
    study["task"] = {**study["task"], "validation": 0.2 if rate else 0.0}
    who = {"global": ["global"], "personal": ["global", "personalized"], "after": ["global", "personalized", "after"]}
    every = rounds if rate else max(1, rounds // setting.evaluations)
    judged = {
        **study.get("evaluate", {}),
        "every": every,
        "who": who[row.judged],
        "set": "validation" if rate else "test",
    }
    return {**study, "method": row.method, "rounds": rounds, "seed": job["seed"], "evaluate": judged}


def merged(study: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """
    >>> merged({"local": {"epochs": 1}, "rounds": 3}, {"local": {"batch": 10}})
    {'local': {'epochs': 1, 'batch': 10}, 'rounds': 3}
    """
    out = dict(study)
    for key, value in changes.items():
        out[key] = {**out[key], **value} if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def play(setting: Setting, row: Row, job: Job, device: str) -> Job:
    """In a process of its own: what came out, beside what was asked. Seconds on a CPU are the processor's."""
    import platform

    import torch

    import sparing

    plan = merged({"plan": setting.study.get("plan", {})}, {"plan": {"threads": 1} if device == "cpu" else {}})
    if device == "cpu":
        torch.set_num_threads(1)
        plan["plan"].pop("precision", None)
    clock = time.process_time if device == "cpu" else time.perf_counter
    began = clock()
    machine = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    about = {"machine": machine, "torch": torch.__version__.partition("+")[0], "sparing": sparing.__version__}
    try:
        result = sparing.run(**merged(study_of(setting, row, job), {"device": device, **plan}))
    except sparing.SparingError as error:
        return {**job, **about, "failed": str(error)[:200], "seconds": round(clock() - began, 1)}
    last = result.table[-1].metrics
    return {
        **job,
        **about,
        "curve": curve_of(result),
        "metrics": {name: last[name] for name in row.kept if name in last},
        "sha256": result.model_sha256[:16],
        "seconds": round(clock() - began, 1),
    }


def curve_of(result: Any) -> list[list[float | None]]:
    """A line for each evaluation, with the bytes until then."""
    up = down = 0
    lines: list[list[float | None]] = []
    for record in result.table:
        up, down = up + record.up_bytes, down + record.down_bytes
        marks = (record.accuracy, record.personal_accuracy, record.worst_decile, record.after_accuracy)
        if record.accuracy == record.accuracy or record.personal_accuracy == record.personal_accuracy:
            clock = record.metrics.get("clock", float("nan"))
            numbers = [*(None if x != x else round(x, 5) for x in marks), up, down]
            lines.append([record.round, *numbers, None if clock != clock else round(clock, 1)])
    return lines
