"""What is said of a claim, from the final runs of its rows."""

import math

from intervals import Interval, at_least, interval, near
from question import Finding, Job

from runs import AT, finals

NOT_RUN = Finding("not run", "not settled")


def ends(setting: str, row: str, done: list[Job], column: str = "global", again: bool = False) -> dict[int, float]:
    """The accuracy at the end in percent, by seed."""
    found = {job["seed"]: job["curve"][-1][AT[column]] for job in finals(setting, row, done, again)}
    return {seed: 100 * value for seed, value in found.items() if value is not None}


def difference(setting: str, row: str, other: str, done: list[Job], column: str = "global") -> Interval | None:
    """Of a row from another, in points, paired by seed; none before both have been run."""
    ours, theirs = (ends(setting, name, done, column) for name in (row, other))
    both = sorted(ours.keys() & theirs.keys())
    return interval([ours[seed] - theirs[seed] for seed in both]) if both else None


def within(setting: str, row: str, other: str, done: list[Job], points: float, column: str = "global") -> Finding:
    """Whether a row is no more than so many points below another."""
    found = difference(setting, row, other, done, column)
    return Finding(f"{found} points", at_least(found, -points)) if found else NOT_RUN


def better(setting: str, row: str, other: str, done: list[Job], column: str = "global") -> Finding:
    return within(setting, row, other, done, 0.0, column)


def level(setting: str, row: str, published: float, done: list[Job], column: str = "global") -> Finding:
    """Whether a row ends within a point of what was published."""
    values = list(ends(setting, row, done, column).values())
    if not values:
        return NOT_RUN
    found = interval(values)
    return Finding(f"{found.mean:.1f} [{found.low:.1f}, {found.high:.1f}]", near(found, published))


def saved(setting: str, row: str, other: str, done: list[Job], way: str) -> float:
    """How many times fewer bytes; not a number before both have been run."""
    ours, theirs = (finals(setting, name, done) for name in (row, other))
    if not ours or not theirs:
        return math.nan
    return (
        sum(job["curve"][-1][AT[way]] for job in theirs)
        / len(theirs)
        * len(ours)
        / sum(job["curve"][-1][AT[way]] for job in ours)
    )


def is_flat(job: Job, column: str = "global") -> bool:
    """Whether the mean of the last quarter of a curve is less than half a point above that of the quarter before."""
    values = [100 * line[AT[column]] for line in job["curve"] if line[AT[column]] is not None]
    quarter = len(values) // 4
    if not quarter:
        return False
    last, before = values[-quarter:], values[-2 * quarter : -quarter]
    return sum(last) - sum(before) < 0.5 * quarter
