"""What the evidence costs: rows x trials x seeds x seconds, in plan.md."""

import statistics
from pathlib import Path

from question import Job, Question
from rates import MOST

from runs import finals, rate_scores, read_results, wanted_jobs

PLAN = Path(__file__).with_name("plan.md")
BEGIN, END = "<!-- plan: written by settle.py --plan -->", "<!-- end of plan -->"
TRIALS = 4
"""Of a row's rate, as it usually comes; at most `rates.MOST`."""
START = 8.0
"""Seconds before the first round."""


def expected_seconds(question: Question, job: Job, done: list[Job], device: str = "") -> float:
    """By the runs of this row in this setting on such a device, or by the setting's own guess."""
    setting, row = question.settings[job["setting"]], question.rows[job["row"]]
    rounds = (setting.tuning_rounds if job["stage"] == "rate" else setting.study["rounds"]) * row.stretch
    like = [one for one in done if (one["setting"], one["row"]) == (job["setting"], job["row"]) and "curve" in one]
    on_gpu = (device or setting.device) == "cuda"
    like = [one for one in like if ("NVIDIA" in one["machine"]) == on_gpu]
    each = statistics.median(one["seconds"] / one["curve"][-1][0] for one in like) if like else 1.5 * setting.seconds
    return START + rounds * each


def write_plan() -> None:
    """The table of plan.md, from the questions and what was measured so far."""
    from questions import QUESTIONS

    head, rest = PLAN.read_text().split(BEGIN)
    lines = [
        "| question | setting | device | rows | trials | seeds | minutes in all | done | left |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    whole = {"cpu": [0.0, 0.0], "cuda": [0.0, 0.0]}
    for question in QUESTIONS.values():
        done = read_results(question.name)
        for name, setting in question.settings.items():
            all_minutes, spent = setting_minutes(question, name, done)
            whole[setting.device][0] += all_minutes
            whole[setting.device][1] += spent
            rows = question.rows_of(name)
            ended = sum(len(finals(name, row, done)) for row in rows)
            trials = f"{TRIALS} (at most {MOST})" if setting.tuning_rounds else "none"
            seeds = len(question.seeds_in(name))
            cells = [question.name, name, setting.device, len(rows), trials, seeds, f"{all_minutes:.0f}"]
            cells += [f"{spent:.0f} min, {ended} of {len(rows) * seeds}", f"{max(0.0, all_minutes - spent):.0f}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", *(f"{device}: {a:.0f} minutes in all, {b:.0f} done." for device, (a, b) in whole.items())]
    PLAN.write_text(head + BEGIN + "\n\n" + "\n".join(lines) + "\n\n" + END + rest.split(END)[1])


def setting_minutes(question: Question, name: str, done: list[Job]) -> tuple[float, float]:
    """Of all rows of a setting as they are expected to be, and of what was run."""
    spent = sum(job["seconds"] for job in done if job["setting"] == name) / 60
    left = sum(expected_seconds(question, job, done) for job in wanted_jobs(question, done) if job["setting"] == name)
    for row in question.rows_of(name) if question.settings[name].tuning_rounds else ():
        tried = len(rate_scores(question, name, row, done))
        rate, final = ({"setting": name, "row": row, "stage": stage} for stage in ("rate", "final"))
        left += max(0, TRIALS - max(3, tried)) * expected_seconds(question, rate, done)
        if not tried:
            left += len(question.seeds_in(name)) * expected_seconds(question, final, done)
    return spent + left / 60, spent
