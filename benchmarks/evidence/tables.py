"""Every table and figure of docs/results.md that rests on runs, anew from results/: `make evidence-tables`.

python benchmarks/evidence/tables.py [--check]      --check: say whether the page is up to date, and write nothing
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from figures import draw_all
from intervals import interval
from judge import difference, ends, is_flat, saved
from over_seeds import mean_spread
from question import Job, Question
from questions import QUESTIONS
from rates import is_bracketed

from runs import AT, all_finals, came_apart, finals, rate_scores, rates_that_came_apart, read_results

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
PICTURES = PAGE.parent / "pictures" / "evidence"
DASH = "-"


class Line:
    """A row's final runs, and what its cells are made of."""

    def __init__(self, question: Question, setting: str, row: str, done: list[Job]):
        self.question, self.setting, self.row, self.done = question, setting, row, done
        self.runs = finals(setting, row, done)
        self.judged = question.rows[row].judged

    def marks(self, column: str) -> str:
        values = list(ends(self.setting, self.row, self.done, column).values())
        return mean_spread(values) if values else DASH

    def difference(self) -> str:
        if self.row == self.question.reference:
            return ""
        found = difference(self.setting, self.row, self.question.reference, self.done, self.judged)
        return str(found) if found else DASH

    def megabytes(self, way: str) -> str:
        return f"{statistics.mean(job['curve'][-1][AT[way]] for job in self.runs) / 1e6:,.2f}"

    def times(self, way: str) -> str:
        found = saved(self.setting, self.row, self.question.reference, self.done, way)
        return f"{found:,.1f}x" if found == found else DASH

    def clock(self) -> str:
        values = [job["curve"][-1][AT["clock"]] for job in self.runs]
        return DASH if None in values else f"{statistics.mean(values):,.0f}"

    def flat(self) -> str:
        column = "global" if self.judged == "global" else "personal"
        return f"{sum(is_flat(job, column) for job in self.runs)} of {len(self.runs)}"

    def rounds(self) -> str:
        return str(self.runs[0]["curve"][-1][0])

    def rate(self) -> str:
        scores = rate_scores(self.question, self.setting, self.row, self.done)
        notes = [] if is_bracketed(scores) or not scores else ["edge"]
        rate = self.runs[0]["rate"]
        notes += [
            f"{one:g} came apart" for one in rates_that_came_apart(self.setting, self.row, self.done) if one > rate
        ]
        return f"{rate:g}" + (f" ({', '.join(notes)})" if notes else "")

    def seeds(self) -> str:
        """Finished ones; beside them those that came apart at the lowest rate there is."""
        here = [job for job in all_finals(self.setting, self.row, self.done) if job["rate"] == self.runs[0]["rate"]]
        apart = sum(map(came_apart, here))
        return str(len(self.runs)) + (f", {apart} came apart" if apart else "")

    def metric(self, name: str) -> str:
        values = [job["metrics"][name] for job in self.runs if name in job.get("metrics", {})]
        return f"{statistics.mean(values):.3g}" if values else DASH


COLUMNS: dict[str, tuple[str, Callable[[Line], str]]] = {
    "global": ("global, %", lambda line: line.marks("global")),
    "personal": ("personalized, %", lambda line: line.marks("personal")),
    "worst": ("worst decile, %", lambda line: line.marks("worst")),
    "after": ("fine-tuned, %", lambda line: line.marks("after")),
    "difference": ("difference, points [95 %]", Line.difference),
    "up": ("MB up", lambda line: line.megabytes("up")),
    "down": ("MB down", lambda line: line.megabytes("down")),
    "times up": ("fewer up", lambda line: line.times("up")),
    "times down": ("fewer down", lambda line: line.times("down")),
    "clock": ("seconds on thin links", Line.clock),
    "flat": ("flat", Line.flat),
    "rounds": ("rounds", Line.rounds),
}


def table(question: Question, setting: str, done: list[Job]) -> list[str]:
    """Rows with a final run, and a line that names the others."""
    lines = [Line(question, setting, row, done) for row in question.rows_of(setting)]
    ran, missing = [line for line in lines if line.runs], [line.row for line in lines if not line.runs]
    out: list[str] = []
    if ran:
        heads = [COLUMNS[name][0] if name in COLUMNS else f"`{name}`" for name in question.columns]
        out += ["| method | lr | seeds | " + " | ".join(heads) + " |", "|---" * (len(heads) + 3) + "|"]
    for line in ran:
        cells = [COLUMNS[name][1](line) if name in COLUMNS else line.metric(name) for name in question.columns]
        out.append("| " + " | ".join([line.row, line.rate(), line.seeds(), *cells]) + " |")
    if missing:
        out += ["", "Not run: " + (", ".join(missing) if ran else "any row") + "."]
    return out


def cost(done: list[Job]) -> str:
    """By machine: runs and minutes."""
    machines = sorted({job["machine"] for job in done})
    said = []
    for machine in machines:
        spent = [job["seconds"] for job in done if job["machine"] == machine]
        name = {"x86_64": "one core of an AMD EPYC"}.get(machine, machine)
        said.append(f"{len(spent)} runs, {sum(spent) / 60:.0f} minutes on {name}")
    versions = sorted({job["torch"] for job in done})
    return f"{'; '.join(said)} (torch {', '.join(versions)})."


def again(question: Question, setting: str, done: list[Job]) -> list[str]:
    """Rows that were run again with other seeds: whether the means agree."""
    out: list[str] = []
    for row in question.rows_of(setting):
        judged = question.rows[row].judged
        first, second = (list(ends(setting, row, done, judged, late).values()) for late in (False, True))
        if first and second:
            found = interval(first)
            inside = found.low <= statistics.mean(second) <= found.high
            out.append(f"{row}: {mean_spread(second)}, {'within' if inside else 'outside'} the interval of the mean")
    return ["", "Run again with other seeds: " + "; ".join(out) + "."] if out else []


def claims() -> list[str]:
    lines = ["| claimed | by | measured, 95 % | verdict |", "|---|---|---|---|"]
    for question in QUESTIONS.values():
        done = read_results(question.name)
        for claim in question.claims:
            found = claim.judge(done)
            lines.append(f"| {claim.said} | {claim.where} | {found.measured} | {found.verdict} |")
    return lines


def details() -> list[str]:
    lines: list[str] = []
    for question in QUESTIONS.values():
        done = read_results(question.name)
        lines += [f"### {question.asks}", "", f"`python benchmarks/evidence/settle.py {question.name}`. "]
        lines[-1] += cost(done) if done else "Not run yet."
        lines.append("")
        for name, setting in question.settings.items():
            lines += [
                f"**{name}**: {setting.about}.",
                "",
                *table(question, name, done),
                *again(question, name, done),
                "",
            ]
        if (PICTURES / f"{question.name}.png").exists():
            lines += [f"![{question.asks}](pictures/evidence/{question.name}.png)", ""]
    return lines[:-1]


def replaced(text: str, name: str, lines: list[str]) -> str:
    """With what stands between two marks made anew."""
    begin, end = f"<!-- {name}: written by make evidence-tables -->", f"<!-- end of {name} -->"
    head, rest = text.split(begin)
    return head + begin + "\n\n" + "\n".join(lines) + "\n\n" + end + rest.split(end)[1]


def page() -> str:
    return replaced(replaced(PAGE.read_text(), "claims", claims()), "details", details())


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--check", action="store_true")
    if options.parse_args().check:
        sys.exit(0 if page() == PAGE.read_text() else "docs/results.md is older than its results; make evidence-tables")
    draw_all(PICTURES)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
