"""`sparing compare`: the same numbers for a terminal, a spreadsheet, a page, a paper and a program."""

import csv
import io
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sparing.reports.comparison import Comparison, ComparisonRow, SeedStat
from sparing.reports.ranking import Ranking, short_value, signed_value

_CellText = Callable[[ComparisonRow], str]
_GUTTER = 2  # spaces between two columns of a terminal


class TextTable(NamedTuple):
    """A table of text: the first columns name a row. Heads have line breaks where a terminal wants them."""

    title: str
    head: list[str]
    rows: list[list[str]]
    names: int = 1  # how many columns name a row

    @property
    def line(self) -> list[str]:
        return [head.replace("\n", " ") for head in self.head]


def tables_of_comparison(found: Comparison) -> list[TextTable]:
    """What there is to see, in a few tables; a column that nobody has a number for is left out, an empty table too."""
    base = baseline_word(found)
    where = f" on {found.tasks[0]}" if found.tasks != [""] and len(found.tasks) == 1 else ""
    accuracy: dict[str, _CellText] = {
        "seeds": lambda row: str(len(row.seeds)),
        "final": _mean_cell("final_accuracy", 100, 2),
        "": lambda row: _marks_cell(row) if row.ranking.by_accuracy else "",
        "best\nround": _mean_cell("best_accuracy", 100, 2),
        "personalized": _mean_cell("personal_accuracy", 100, 2),
        "worst\ndecile": _mean_cell("worst_decile", 100, 2),
    }
    against: dict[str, _CellText] = {
        "final": _gap_cell("final_accuracy"),
        "personalized": _gap_cell("personal_accuracy"),
    }
    cost: dict[str, _CellText] = {
        "rounds": lambda row: str(row.rounds),
        "MB\nup": lambda row: short_megabytes(row.stats["up_mb"].mean),
        "MB\ndown": lambda row: short_megabytes(row.stats["down_mb"].mean),
        "wire": _ratio_cell("compression"),
        "values\nonly": _ratio_cell("compression_values"),
    }
    several = any(g.low == g.low for row in found.rows for g in row.gaps.values())
    interval = " [95 % confidence interval]" if several else ""
    ranked = _ranked_tables(found, where, f" vs {base}", interval)
    parts = {
        f"Accuracy{where} (%)": accuracy if _has_accuracy(found) else {},
        f"Accuracy difference vs {base} (percentage points){interval}": against,
        f"Bytes sent, and upload compression vs {base} (wire / values only)": cost,
    }
    made = [*ranked, *(_build_table(title, cells, found) for title, cells in parts.items())]
    made += [*_target_tables(found), *_course_tables(found, base)]
    return [one for one in made if len(one.head) > one.names]


def _has_accuracy(found: Comparison) -> bool:
    """Whether there is one to show, or one was to be ranked by."""
    return any(
        row.ranking.by_accuracy or any(row.stats[name].seeds for name in Ranking().measures) for row in found.rows
    )


def _rows_by_ranking(found: Comparison) -> dict[Ranking, list[ComparisonRow]]:
    rows: dict[Ranking, list[ComparisonRow]] = {}
    for row in found.rows:
        rows.setdefault(row.ranking, []).append(row)
    return rows


def _target_tables(found: Comparison) -> list[TextTable]:
    """What it took to reach the target, by the metric of each task."""
    if found.target is None:
        return []
    until: dict[str, _CellText] = {
        "rounds": _reached_cell("rounds_to_target", 1),
        "MB up and down": _reached_cell("mb_to_target", 2),
        "simulated seconds": _mean_cell("seconds_to_target", 1, 1),
    }
    return [
        _build_table(f"Cost to reach {ranking.target_text(found.target)}", until, found, rows)
        for ranking, rows in _rows_by_ranking(found).items()
    ]


def _course_tables(found: Comparison, base: str) -> list[TextTable]:
    """How soon and how evenly runs got to where they end, by the metric of each task."""
    course: dict[str, _CellText] = {
        "loss": _mean_cell("final_loss", 1, 3),
        "best\nloss": _mean_cell("best_loss", 1, 3),
        "converged\nin round": _mean_cell("convergence_round", 1, 1),
        "std over\nseeds": _unrest_cell("seed_std"),
        "std round\nto round": _unrest_cell("jitter"),
    }
    shown_above = {head for head in course if "loss" in head}  # in the tables of what is ranked by loss
    rows = _rows_by_ranking(found)
    out = []
    for ranking, some in rows.items():
        of = "" if list(rows) == [Ranking()] else f" of {ranking.metric}"
        unit = "percentage points" if ranking.by_accuracy else "its unit"
        own = {} if ranking.by_accuracy else {"loss": _value_cell("final_loss"), "best\nloss": _value_cell("best_loss")}
        kept = {head: cell for head, cell in course.items() if ranking.metric != "loss" or head not in shown_above}
        cells = kept | {head: cell for head, cell in own.items() if head in kept}
        title = f"Convergence and stability{of}; std in {unit} (change vs {base})"
        out.append(_build_table(title, cells, found, some))
    return out


def _ranked_tables(found: Comparison, where: str, against: str, interval: str) -> list[TextTable]:
    """For each metric other than accuracy that methods are ranked by: its values, and the differences."""
    out = []
    for ranking in dict.fromkeys(row.ranking for row in found.rows if not row.ranking.by_accuracy):
        whole, personal = ranking.measures
        values: dict[str, _CellText] = {
            "seeds": lambda row: str(len(row.seeds)),
            ranking.metric: _value_cell(whole),
            "": _marks_cell,
            "best\nround": _value_cell(f"best_{ranking.metric}"),
            "personalized": _value_cell(personal),
        }
        gaps = {ranking.metric: _plain_gap_cell(whole), "personalized": _plain_gap_cell(personal)}
        rows = [row for row in found.rows if row.ranking == ranking]
        titles = f"{ranking.metric}{where} ({ranking.direction})", f"{ranking.metric} difference{against}{interval}"
        out += [_build_table(title, cells, found, rows) for title, cells in zip(titles, (values, gaps), strict=True)]
    return out


def _value_cell(name: str) -> _CellText:
    """Mean ± std over seeds, in the metric's own unit."""

    def cell(row: ComparisonRow) -> str:
        s = row.stats[name]
        if s.mean == s.mean:
            return short_value(s.mean) + (f" ± {s.std:.2g}" if s.std == s.std else "")
        return f"{s.seeds} of {len(row.seeds)} seeds" if s.seeds else "-"

    return cell


def _plain_gap_cell(name: str) -> _CellText:
    def cell(row: ComparisonRow) -> str:
        g = row.gaps.get(name)
        if g is None:
            return "-"
        reach = f" [{signed_value(g.low)}, {signed_value(g.high)}]" if g.low == g.low else ""
        return f"{signed_value(g.mean)}{reach}"

    return cell


def baseline_word(found: Comparison) -> str:
    """The baseline's name; where tasks have different ones, that it is the task's own."""
    names = {row.method for row in found.rows if row.baseline}
    return names.pop() if len(names) == 1 else "each task's baseline"


def mark_legend(found: Comparison) -> str:
    """What the marks beside the accuracies mean; nothing where there are none."""
    if not any(row.best for row in found.rows):
        return ""
    rankings = list(dict.fromkeys(row.ranking for row in found.rows))
    alone = all(len(row.seeds) == 1 for row in found.rows)
    mean = "" if alone else "mean "
    best = " or ".join(f"the {'highest' if r.higher_is_better else 'lowest'} {mean}{r.metric}" for r in rankings)
    if alone:
        return f"best: {best}. No method gets a star: with one seed a lead cannot be told from noise."
    return f"best: {best}. {star_legend('method', 'more accurate' if rankings == [Ranking()] else 'better')}"


def star_legend(what: str, better: str = "more accurate") -> str:
    """What a Pareto star says of a method or a trial."""
    rivals = f"another {what} and every one that sends no more bytes"
    return f"* (Pareto): {better} than {rivals}, by more than noise (95 % interval over seeds)."


def _build_table(
    title: str, cells: dict[str, _CellText], found: Comparison, some: list[ComparisonRow] | None = None
) -> TextTable:
    """Of all rows, or of some."""
    rows = found.rows if some is None else some
    columns = {head: [cell(row) for row in rows] for head, cell in cells.items()}
    columns = {head: texts for head, texts in columns.items() if set(texts) - {"-", ""}}
    several = len(found.tasks) > 1
    names = [[row.method, row.task] if several else [row.method] for row in rows]
    lines = [[*names[i], *(texts[i] for texts in columns.values())] for i in range(len(names))]
    return TextTable(title, ["method", "task"][: 1 + several] + list(columns), lines, 1 + several)


def _marks_cell(row: ComparisonRow) -> str:
    return " ".join(word for word, holds in (("baseline", row.baseline), ("best", row.best), ("*", row.star)) if holds)


def short_megabytes(size: float) -> str:
    """
    >>> [short_megabytes(size) for size in (1234.5, 12.345, 0.77123, 0.000123, 0.0)]
    ['1,234', '12.35', '0.771', '0.000123', '0']
    """
    return f"{size:,.0f}" if size >= 1000 else f"{size:.2f}" if size >= 1 else f"{size:.3g}"


def _mean_cell(name: str, scale: float, digits: int, spread: bool = True) -> _CellText:
    """Mean ± std over seeds; how many got there, where not all did."""

    def cell(row: ComparisonRow) -> str:
        s = row.stats.get(name, SeedStat(math.nan, math.nan, 0))
        if s.mean == s.mean:
            more = f" ± {scale * s.std:.{digits}f}" if spread and s.std == s.std else ""
            return f"{scale * s.mean:.{digits}f}{more}"
        return f"{s.seeds} of {len(row.seeds)} seeds" if s.seeds else "-"

    return cell


def _reached_cell(name: str, digits: int) -> _CellText:
    """The same of what it took to reach a target; none of the seeds is told too."""
    plain = _mean_cell(name, 1, digits)
    return lambda row: f"0 of {len(row.seeds)} seeds" if name in row.stats and not row.stats[name].seeds else plain(row)


def _unrest_cell(name: str) -> _CellText:
    """A standard deviation, and how much more it is than the baseline's."""

    def cell(row: ComparisonRow) -> str:
        value, more = row.stats[name].mean, row.ratios[f"{name}_change"]
        if value != value:
            return "-"
        said = f"{100 * value:.2f}" if row.ranking.by_accuracy else f"{value:.2g}"
        return said + (f" ({round(100 * more):+d}%)" if more == more else "")

    return cell


def _gap_cell(name: str) -> _CellText:
    def cell(row: ComparisonRow) -> str:
        if name not in row.gaps:
            return "-"
        g = row.gaps[name]
        reach = f" [{100 * g.low:+.2f}, {100 * g.high:+.2f}]" if g.low == g.low else ""
        return f"{100 * g.mean:+.2f}{reach}"

    return cell


def _ratio_cell(name: str) -> _CellText:
    return lambda row: f"{row.ratios[name]:.2f}x" if math.isfinite(row.ratios[name]) else "nothing sent"


def print_comparison(found: Comparison, console: Console) -> None:
    """No name breaks, and no line of a table is wider than the terminal: a table that is becomes several."""
    tables = tables_of_comparison(found)
    if any(_names_are_too_long(one, console.width) for one in tables):
        for i, row in enumerate(found.rows):
            console.print(f"{i + 1}: {row.label}", highlight=False, markup=False, soft_wrap=True)
        console.print()
        tables = [_with_numbers_for_names(one) for one in tables]
    for i, one in enumerate(tables):
        for k, part in enumerate(_tables_that_fit(one, console.width)):
            console.print(f"[bold]{escape(one.title)}{', continued' * (k > 0)}[/]", highlight=False)
            console.print(_rich_table(part), highlight=False)
            console.print()
        if i == 0 and (legend := mark_legend(found)):
            console.print(f"{legend}\n", highlight=False, markup=False)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)


def _rich_table(one: TextTable) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, head in enumerate(one.head):
        table.add_column(escape(head), justify="left" if i < one.names or not head else "right", no_wrap=True)
    for row in one.rows:
        table.add_row(*map(escape, row))
    return table


def _column_widths(one: TextTable) -> list[int]:
    cells = [[*head.split("\n"), *(row[i] for row in one.rows)] for i, head in enumerate(one.head)]
    return [max(map(len, column)) + _GUTTER for column in cells]


def _tables_that_fit(one: TextTable, width: int) -> list[TextTable]:
    """The columns in as few tables as there is room for, the names in each of them."""
    widths = _column_widths(one)
    own = sum(widths[: one.names])
    parts: list[list[int]] = [[]]
    for i in range(one.names, len(widths)):
        if parts[-1] and own + sum(widths[j] for j in (*parts[-1], i)) - _GUTTER + 1 > width:
            parts.append([])
        parts[-1].append(i)
    kept = [[*range(one.names), *part] for part in parts]
    return [one._replace(head=[one.head[i] for i in part], rows=[[row[i] for i in part] for row in one.rows])
            for part in kept]  # fmt: skip


def _names_are_too_long(one: TextTable, width: int) -> bool:
    """To leave room for any column."""
    widths = _column_widths(one)
    return sum(widths[: one.names]) + max(widths[one.names :]) > width


def _with_numbers_for_names(one: TextTable) -> TextTable:
    rows = [[str(i + 1), *row[one.names :]] for i, row in enumerate(one.rows)]
    return TextTable(one.title, ["method", *one.head[one.names :]], rows)


def comparison_markdown(found: Comparison) -> str:
    lines = []
    for one in tables_of_comparison(found):
        lines += [f"**{one.title}**", "", "| " + " | ".join(one.line) + " |"]
        lines += ["|---" * one.names + "|--:" * (len(one.head) - one.names) + "|"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in one.rows] + [""]
    legend = [mark_legend(found)] if mark_legend(found) else []
    return "\n".join(lines + [f"- {note}" for note in (*legend, *found.notes)]).rstrip() + "\n"


def comparison_csv(found: Comparison) -> str:
    """One row for each method, four decimals; what was not measured is empty.

    Of a metric in a unit of its own, six significant digits.
    """
    out = io.StringIO()
    lines = [flat_row(row) for row in found.rows]
    if any(not row.ranking.by_accuracy for row in found.rows):
        lines = [line | {"ranked_by": row.ranking.metric} for line, row in zip(lines, found.rows, strict=True)]
    writer = csv.DictWriter(out, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
    writer.writeheader()
    for line, row in zip(lines, found.rows, strict=True):
        fine = () if row.ranking.by_accuracy else ("loss", "seed_std", "jitter", row.ranking.metric)
        writer.writerow({k: _csv_cell(v, any(word in k for word in fine)) for k, v in line.items()})
    return out.getvalue()


def flat_row(row: ComparisonRow) -> dict[str, Any]:
    out: dict[str, Any] = {"method": row.method, "task": row.task, "seeds": len(row.seeds), "rounds": row.rounds}
    for name, s in row.stats.items():
        out |= {name: s.mean, f"{name}_std": s.std} if name != "seed_std" else {name: s.mean}
    out |= row.ratios
    for name, g in row.gaps.items():
        out |= {f"{name}_gap": g.mean, f"{name}_gap_low": g.low, f"{name}_gap_high": g.high}
    return out


def _csv_cell(value: Any, significant: bool) -> Any:
    if not isinstance(value, float):
        return value
    return "" if value != value else f"{value:.6g}" if significant else f"{value:.4f}"


def comparison_json(found: Comparison) -> dict[str, Any]:
    """Everything, in full; what is not finite becomes None."""
    rows = []
    for row in found.rows:
        stats = {name: finite_or_none(s._asdict()) for name, s in row.stats.items()}
        gaps = {name: finite_or_none(g._asdict()) for name, g in row.gaps.items()}
        plain = {name: value for name, value in row._asdict().items() if name != "ranking"}
        ranked = {"ranked_by": row.ranking.metric, "higher_is_better": row.ranking.higher_is_better}
        rows.append(plain | ranked | {"stats": stats, "ratios": finite_or_none(row.ratios), "gaps": gaps})
    return found._asdict() | {"rows": rows}


def finite_or_none(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
