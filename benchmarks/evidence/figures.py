"""The figure of each question, from its results."""

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from ask_pairs import draw_gains
from judge import difference, ends
from matplotlib import pyplot as plt
from question import Job, Question
from questions import QUESTIONS

from runs import AT, finals, read_results

MATRIX_INCHES = 5.5
FAR = 10.0
"""Points: where a row is farther from the reference, those near it are shown on a wider scale."""


def draw_all(folder: Path) -> None:
    """Of every question with final runs of two rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for question in QUESTIONS.values():
        done = read_results(question.name)
        settings = [name for name in question.settings if len(rows_with_runs(question, name, done)) > 1]
        if not settings:
            continue
        seen = question._replace(settings={name: question.settings[name] for name in settings})
        most = max(len(rows_with_runs(seen, name, done)) for name in settings)
        height = MATRIX_INCHES if question.figure == "gains" else max(3.5, 0.3 * most + 1.5)
        figure = plt.figure(figsize=(5.5 * len(settings) + 1, height), layout="constrained")
        FIGURES[question.figure](figure, seen, done)
        figure.savefig(folder / f"{question.name}.png", dpi=100, metadata={"Software": None})
        plt.close(figure)


def rows_with_runs(question: Question, setting: str, done: list[Job]) -> list[str]:
    return [row for row in question.rows_of(setting) if finals(setting, row, done)]


def draw_differences(figure: Any, question: Question, done: list[Job]) -> None:
    """How far each row is from the reference, with its 95 % interval."""
    axes = figure.subplots(1, len(question.settings), squeeze=False)[0]
    for ax, setting in zip(axes, question.settings, strict=True):
        rows = [row for row in rows_with_runs(question, setting, done) if row != question.reference][::-1]
        for y, row in enumerate(rows):
            found = difference(setting, row, question.reference, done, question.rows[row].judged)
            if found is None:
                continue
            ax.plot([found.mean], [y], "o", color="C0", ms=5)
            if found.high < float("inf"):
                ax.plot([found.low, found.high], [y, y], color="C0", lw=2)
        ax.axvline(0, color="0.6", lw=1)
        if max(map(abs, ax.get_xlim())) > FAR:
            ax.set_xscale("symlog", linthresh=1)
            ax.xaxis.set_major_formatter("{x:g}")
        ax.set_yticks(range(len(rows)), rows)
        ax.set_xlabel(f"points from {question.reference}")
        ax.set_title(setting)
        ax.grid(axis="x", alpha=0.3)


def draw_bytes(figure: Any, question: Question, done: list[Job]) -> None:
    """Accuracy at the end, with its spread over seeds, against megabytes up and down."""
    axes = figure.subplots(1, len(question.settings), squeeze=False)[0]
    for ax, setting in zip(axes, question.settings, strict=True):
        for number, row in enumerate(rows_with_runs(question, setting, done)):
            runs = finals(setting, row, done)
            x = sum(job["curve"][-1][AT["up"]] + job["curve"][-1][AT["down"]] for job in runs) / len(runs) / 1e6
            values = list(ends(setting, row, done).values())
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            look = {"fmt": "os^Dv"[number // 10], "color": f"C{number % 10}", "label": row, "capsize": 2, "lw": 1}
            ax.errorbar([x], [statistics.mean(values)], [spread], **look)
        ax.set(xscale="log", xlabel="megabytes, up and down, all clients", ylabel="accuracy, %", title=setting)
        ax.grid(alpha=0.3)
    axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


FIGURES = {"differences": draw_differences, "bytes": draw_bytes, "gains": draw_gains}
