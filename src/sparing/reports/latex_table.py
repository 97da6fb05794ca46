"""`sparing compare --latex`: one table for a paper, with the booktabs package."""

import math
import re

from sparing.reports.comparison import BaselineGap, Comparison, ComparisonRow, SeedStat
from sparing.reports.comparison_tables import baseline_word, short_megabytes
from sparing.reports.ranking import Ranking, short_value, signed_value

_LATEX_SPECIALS = {"\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX_SPECIALS |= {char: f"\\{char}" for char in "&%$#_{}"}
_NOT_IN_LABELS = re.compile(r"[^a-z0-9]+")


def comparison_latex(found: Comparison) -> str:
    """The best accuracy, or what a task is ranked by, is bold; a column that nobody has a number for is left out."""
    base, several = _escape_latex(baseline_word(found)), len(found.tasks) > 1
    rankings = dict.fromkeys(row.ranking for row in found.rows if not row.ranking.by_accuracy)
    columns = {head: cells for ranking in rankings for head, cells in _ranked_columns(ranking, base, found).items()}
    columns |= {
        r"Accuracy (\%)": [_accuracy_cell(row, "final_accuracy", found) for row in found.rows],
        r"Personalized (\%)": [_accuracy_cell(row, "personal_accuracy", found) for row in found.rows],
        rf"$\Delta$ vs.\ {base} (pp)": [_difference_cell(row) for row in found.rows],
        "Upload (MB)": [short_megabytes(row.stats["up_mb"].mean) for row in found.rows],
        "Download (MB)": [short_megabytes(row.stats["down_mb"].mean) for row in found.rows],
        "Upload compression": [_compression_cell(row) for row in found.rows],
    }
    columns |= _target_columns(found)
    columns = {head: cells for head, cells in columns.items() if set(cells) != {"--"}}
    wide = 1 + len(columns)
    lines = [r"\begin{table}[t]", r"\centering", rf"\caption{{{_caption(found)}}}", rf"\label{{{_label(found)}}}"]
    lines += [rf"\begin{{tabular}}{{l{'r' * len(columns)}}}", r"\toprule", " & ".join(["Method", *columns]) + r" \\"]
    task = None
    for i, row in enumerate(found.rows):
        if row.task != task:
            task = row.task
            lines += [r"\midrule"]
            lines += [rf"\multicolumn{{{wide}}}{{l}}{{\emph{{{_escape_latex(task)}}}}} \\"] if several else []
        lines.append(" & ".join([_escape_latex(row.method), *(cells[i] for cells in columns.values())]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join(["% needs \\usepackage{booktabs}", *lines, *(f"% {note}" for note in found.notes)]) + "\n"


def _target_columns(found: Comparison) -> dict[str, list[str]]:
    """Rounds to the target, by each metric that tasks are ranked by."""
    if found.target is None:
        return {}
    columns = {}
    for ranking in dict.fromkeys(row.ranking for row in found.rows):
        to = rf"{100 * found.target:g}\,\%" if ranking.by_accuracy else _escape_latex(ranking.target_text(found.target))
        columns[f"Rounds to {to}"] = [_rounds_cell(row) if row.ranking == ranking else "--" for row in found.rows]
    return columns


def _caption(found: Comparison) -> str:
    where = "" if len(found.tasks) > 1 or found.tasks == [""] else f" on {_escape_latex(found.tasks[0])}"
    rounds, seeds = ({f(row) for row in found.rows} for f in (lambda row: row.rounds, lambda row: len(row.seeds)))
    over = " or ".join(map(str, sorted(seeds)))
    many = "one seed" if seeds == {1} else rf"mean $\pm$ standard deviation ($n-1$) over {over} seeds"
    after = f"after {' or '.join(map(str, sorted(rounds)))} rounds"
    gaps = [gap for row in found.rows for gap in row.gaps.values()]
    points = " in percentage points" if all(row.ranking.by_accuracy for row in found.rows) else ""
    interval = rf"; differences{points}, paired by seed, with 95\,\% confidence intervals"
    best = "; best in bold" if any(row.best for row in found.rows) else ""
    return f"Results{where} {after}: {many}{interval if any(gap.low == gap.low for gap in gaps) else ''}{best}."


def _label(found: Comparison) -> str:
    return "tab:" + (_NOT_IN_LABELS.sub("-", "-".join(found.tasks).lower()).strip("-") or "results")


def _ranked_columns(ranking: Ranking, base: str, found: Comparison) -> dict[str, list[str]]:
    """Of a metric other than accuracy, in its own unit; rows that are ranked otherwise have none."""
    whole, personal = ranking.measures
    name, arrow = _escape_latex(ranking.metric), r"$\uparrow$" if ranking.higher_is_better else r"$\downarrow$"

    def gap(row: ComparisonRow) -> str:
        return _plain_difference(row.gaps.get(whole) or row.gaps.get(personal))

    made = {
        f"{name} {arrow}": lambda row: _metric_cell(row, whole, found),
        f"Personalized {name} {arrow}": lambda row: _metric_cell(row, personal, found),
        rf"$\Delta$ {name} vs.\ {base}": gap,
    }
    return {head: [cell(row) if row.ranking == ranking else "--" for row in found.rows] for head, cell in made.items()}


def _metric_cell(row: ComparisonRow, name: str, found: Comparison) -> str:
    stat = row.stats[name]
    if stat.mean != stat.mean:
        return "--"
    values = [other.stats[name].mean for other in found.rows if other.task == row.task]
    top = len(values) > 1 and row.ranking.sign * stat.mean == max(row.ranking.sign * v for v in values if v == v)
    mean = rf"\textbf{{{short_value(stat.mean)}}}" if top else short_value(stat.mean)
    return mean + (rf" $\pm$ {stat.std:.2g}" if stat.std == stat.std else "")


def _plain_difference(gap: BaselineGap | None) -> str:
    if gap is None:
        return "--"
    mean, low, high = (_with_math_signs(signed_value(value)) for value in (gap.mean, gap.low, gap.high))
    return mean + (f" [{low}, {high}]" if gap.low == gap.low else "")


def _with_math_signs(text: str) -> str:
    """
    >>> _with_math_signs("-0.0123")
    '$-$0.0123'
    """
    return f"${text[0]}${text[1:]}" if text[0] in "+-" else text


def _accuracy_cell(row: ComparisonRow, name: str, found: Comparison) -> str:
    stat: SeedStat = row.stats[name]
    if stat.mean != stat.mean:
        return "--"
    values = [other.stats[name].mean for other in found.rows if other.task == row.task]
    top = len(values) > 1 and stat.mean == max(value for value in values if value == value)
    mean = f"{100 * stat.mean:.2f}"
    mean = rf"\textbf{{{mean}}}" if top else mean
    return mean + (rf" $\pm$ {100 * stat.std:.2f}" if stat.std == stat.std else "")


def _difference_cell(row: ComparisonRow) -> str:
    gap: BaselineGap | None = row.gaps.get("final_accuracy") or row.gaps.get("personal_accuracy")
    if gap is None:
        return "--"
    low, high = _signed(gap.low), _signed(gap.high)
    return _signed(gap.mean) + (f" [{low}, {high}]" if gap.low == gap.low else "")


def _signed(share: float) -> str:
    """
    >>> _signed(-0.095), _signed(0.012)
    ('$-$9.50', '$+$1.20')
    """
    text = f"{abs(100 * share):.2f}"
    return text if float(text) == 0 else f"${'-' if share < 0 else '+'}${text}"


def _compression_cell(row: ComparisonRow) -> str:
    ratio = row.ratios["compression"]
    return rf"{ratio:.1f}$\times$" if math.isfinite(ratio) else "--"


def _rounds_cell(row: ComparisonRow) -> str:
    stat = row.stats["rounds_to_target"]
    return f"{stat.mean:.1f}" if stat.mean == stat.mean else "--"


def _escape_latex(text: str) -> str:
    """
    >>> _escape_latex("a_b 5 %")
    'a\\\\_b 5 \\\\%'
    """
    return "".join(_LATEX_SPECIALS.get(char, char) for char in text)
