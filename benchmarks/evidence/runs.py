"""What was measured so far, and what is still to be run."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

from play import COLUMNS
from question import NAMES, Job, Question, mark
from rates import next_rates, steady_rate

RESULTS = Path(__file__).parent / "results"
TUNING_SEED = 1000
"""Of the runs that choose a rate; no final run has it."""
AGAIN = 100
"""From this seed on, final runs are repetitions, which no table or claim counts."""
AT = {name: i for i, name in enumerate(COLUMNS)}


def read_results(name: str) -> list[Job]:
    """The last line of each job counts."""
    path = RESULTS / f"{name}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return list({mark(job): job for job in lines}.values())


def add_result(job: Job) -> None:
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / f"{job['question']}.jsonl", "a") as file:
        file.write(json.dumps(job, separators=(",", ":")) + "\n")


def score(job: Job, judged: str) -> float:
    """The accuracy at the end, in percent; that of a run that failed is nothing."""
    if "failed" in job:
        return -math.inf
    value = job["curve"][-1][AT[judged]]
    return -math.inf if value is None else 100 * value


def rate_scores(question: Question, setting: str, row: str, done: list[Job]) -> dict[float, float]:
    judged = question.rows[row].judged
    tried = [job for job in done if (job["setting"], job["row"], job["stage"]) == (setting, row, "rate")]
    return {job["rate"]: score(job, judged) for job in tried}


def all_finals(setting: str, row: str, done: list[Job], again: bool = False) -> list[Job]:
    """By rate, downwards, and seed: those of the tables, or those that were run again."""
    found = [job for job in done if (job["setting"], job["row"], job["stage"]) == (setting, row, "final")]
    found = [job for job in found if (job["seed"] >= AGAIN) == again]
    return sorted(found, key=lambda job: (-job["rate"], job["seed"]))


def finals(setting: str, row: str, done: list[Job], again: bool = False) -> list[Job]:
    """The finished ones at the rate that the row came to."""
    found = all_finals(setting, row, done, again)
    return [job for job in found if job["rate"] == found[-1]["rate"] and "failed" not in job]


def came_apart(job: Job) -> bool:
    """Whether a run was stopped by its losses or updates, or ended below half of the best that it had reached."""
    if "failed" in job:
        return True
    values = [value for line in job["curve"] if (value := line[AT["global"]]) is not None]
    return bool(values) and values[-1] < 0.5 * max(values)


def rates_that_came_apart(setting: str, row: str, done: list[Job]) -> list[float]:
    return sorted({job["rate"] for job in all_finals(setting, row, done) if came_apart(job)}, reverse=True)


def wanted_jobs(question: Question, done: list[Job]) -> Iterator[Job]:
    """Everything that can be run now: rates first, then seed after seed of all rows whose rate is known.

    A row of which one final run comes apart is run anew with all its seeds, at the next lower rate that was tried.
    """
    known, tuned = {mark(job) for job in done}, list[tuple[str, str, float]]()
    for name, setting in question.settings.items():
        for row in question.rows_of(name):
            scores = rate_scores(question, name, row, done)
            more = next_rates(setting.rate, scores) if setting.tuning_rounds else []
            for rate in more:
                yield dict(zip(NAMES, (question.name, name, row, "rate", rate, TUNING_SEED), strict=True))
            if not more:
                apart = rates_that_came_apart(name, row, done)
                tuned.append((name, row, steady_rate(scores, apart) if scores else setting.rate))
    every = sorted({seed for name in question.settings for seed in question.seeds_in(name)})
    for seed in every:
        for name, row, rate in tuned:
            if seed not in question.seeds_in(name):
                continue
            job = dict(zip(NAMES, (question.name, name, row, "final", rate, seed), strict=True))
            if mark(job) not in known:
                yield job
