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

_CellText = Callable[[ComparisonRow], str]


class TextTable(NamedTuple):
    """A table of text: the first column is the method. Heads have line breaks where a terminal wants them."""

    title: str
    head: list[str]
    rows: list[list[str]]

    @property
    def line(self) -> list[str]:
        return [head.replace("\n", " ") for head in self.head]


def tables_of_comparison(found: Comparison) -> list[TextTable]:
    """What there is to see, in a few tables; a column that nobody has a number for is left out, an empty table too."""
    base, target = found.baseline, found.target
    accuracy: dict[str, _CellText] = {
        "seeds": lambda row: str(len(row.seeds)),
        "final": _mean_cell("final_accuracy", 100, 2),
        "best": _mean_cell("best_accuracy", 100, 2),
        "personal": _mean_cell("personal_accuracy", 100, 2),
        "worst\ndecile": _mean_cell("worst_decile", 100, 2),
    }
    against: dict[str, _CellText] = {"final": _gap_cell("final_accuracy"), "personal": _gap_cell("personal_accuracy")}
    cost: dict[str, _CellText] = {
        "rounds": lambda row: str(row.rounds),
        "MB\nup": _mean_cell("up_mb", 1, 2, spread=False),
        "MB\ndown": _mean_cell("down_mb", 1, 2, spread=False),
        f"fewer up than\n{base}, wire": _ratio_cell("compression"),
        "values\nalone": _ratio_cell("compression_values"),
    }
    until: dict[str, _CellText] = {
        "rounds": _reached_cell("rounds_to_target", 1),
        "MB up and down": _reached_cell("mb_to_target", 2),
        "seconds of the virtual clock": _mean_cell("seconds_to_target", 1, 1),
    }
    course: dict[str, _CellText] = {
        "loss": _mean_cell("final_loss", 1, 3),
        "best\nloss": _mean_cell("best_loss", 1, 3),
        "converged\nin round": _mean_cell("convergence_round", 1, 1),
        "std over\nseeds": _unrest_cell("seed_std"),
        "std round\nto round": _unrest_cell("jitter"),
    }
    several = any(g.low == g.low for row in found.rows for g in row.gaps.values())
    interval = " [95 % confidence]" if several else ""
    parts = {
        "Accuracy, %": accuracy,
        f"Accuracy less {base}'s, points{interval}": against,
        "Cost": cost,
        f"Until {100 * (target or 0):g} % accuracy": until,
        f"Course; std in points of accuracy (against {base}'s)": course,
    }
    made = [_build_table(title, cells, found.rows) for title, cells in parts.items()]
    return [one for one in made if len(one.head) > 1]


def _build_table(title: str, cells: dict[str, _CellText], rows: list[ComparisonRow]) -> TextTable:
    columns = {head: [cell(row) for row in rows] for head, cell in cells.items()}
    columns = {head: texts for head, texts in columns.items() if set(texts) != {"-"}}
    lines = [[row.label, *(texts[i] for texts in columns.values())] for i, row in enumerate(rows)]
    return TextTable(title, ["method", *columns], lines)


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
        return f"{100 * value:.2f}" + (f" ({round(100 * more):+d}%)" if more == more else "")

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
    for one in tables_of_comparison(found):
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for i, head in enumerate(one.head):
            table.add_column(escape(head), justify="right" if i else "left", no_wrap=i > 0, overflow="fold")
        for row in one.rows:
            table.add_row(*map(escape, row))
        console.print(f"[bold]{escape(one.title)}[/]", highlight=False)
        console.print(table, highlight=False)
        console.print()
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)


def comparison_markdown(found: Comparison) -> str:
    lines = []
    for one in tables_of_comparison(found):
        lines += [f"**{one.title}**", "", "| " + " | ".join(one.line) + " |"]
        lines += ["|---" + "|--:" * (len(one.head) - 1) + "|"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in one.rows] + [""]
    return "\n".join(lines + [f"- {note}" for note in found.notes]).rstrip() + "\n"


_LATEX_SPECIALS = {"\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX_SPECIALS |= {char: f"\\{char}" for char in "&%$#_{}"}


def comparison_latex(found: Comparison) -> str:
    """Tables for the booktabs package."""
    lines = []
    for one in tables_of_comparison(found):
        lines += [f"% {one.title}", f"\\begin{{tabular}}{{l{'r' * (len(one.head) - 1)}}}", "\\toprule"]
        rows = [" & ".join(map(_escape_latex, row)) + r" \\" for row in (one.line, *one.rows)]
        lines += [rows[0], "\\midrule", *rows[1:], "\\bottomrule", "\\end{tabular}", ""]
    return "\n".join(lines + [f"% {note}" for note in found.notes]).rstrip() + "\n"


def _escape_latex(text: str) -> str:
    """
    >>> _escape_latex("a_b 5 %")
    'a\\\\_b 5 \\\\%'
    """
    return "".join(_LATEX_SPECIALS.get(char, char) for char in text)


def comparison_csv(found: Comparison) -> str:
    """One row for each method, four decimals; what was not measured is empty."""
    out = io.StringIO()
    lines = [_flat_row(row) for row in found.rows]
    writer = csv.DictWriter(out, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: _four_decimals(v) for k, v in line.items()} for line in lines)
    return out.getvalue()


def _flat_row(row: ComparisonRow) -> dict[str, Any]:
    out: dict[str, Any] = {"method": row.label, "seeds": len(row.seeds), "rounds": row.rounds}
    for name, s in row.stats.items():
        out |= {name: s.mean, f"{name}_std": s.std} if name != "seed_std" else {name: s.mean}
    out |= row.ratios
    for name, g in row.gaps.items():
        out |= {f"{name}_gap": g.mean, f"{name}_gap_low": g.low, f"{name}_gap_high": g.high}
    return out


def _four_decimals(value: Any) -> Any:
    return value if not isinstance(value, float) else f"{value:.4f}" if value == value else ""


def comparison_json(found: Comparison) -> dict[str, Any]:
    """Everything, in full; what is not finite becomes None."""
    rows = []
    for row in found.rows:
        stats = {name: finite_or_none(s._asdict()) for name, s in row.stats.items()}
        gaps = {name: finite_or_none(g._asdict()) for name, g in row.gaps.items()}
        rows.append(row._asdict() | {"stats": stats, "ratios": finite_or_none(row.ratios), "gaps": gaps})
    return found._asdict() | {"rows": rows}


def finite_or_none(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
