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

from sparing.run.compare import Comparison, Row, Stat

Cell = Callable[[Row], str]


class Sheet(NamedTuple):
    """A table of text: the first column is the method. Heads have line breaks where a terminal wants them."""

    title: str
    head: list[str]
    rows: list[list[str]]

    @property
    def line(self) -> list[str]:
        return [head.replace("\n", " ") for head in self.head]


def sheets(found: Comparison) -> list[Sheet]:
    """What there is to see, in a few tables; a column that nobody has a number for is left out, an empty table too."""
    base, target = found.baseline, found.target
    accuracy: dict[str, Cell] = {
        "seeds": lambda row: str(len(row.seeds)),
        "final": of("final_accuracy", 100, 2),
        "best": of("best_accuracy", 100, 2),
        "personal": of("personal_accuracy", 100, 2),
        "worst\ndecile": of("worst_decile", 100, 2),
    }
    against: dict[str, Cell] = {"final": gap_of("final_accuracy"), "personal": gap_of("personal_accuracy")}
    cost: dict[str, Cell] = {
        "rounds": lambda row: str(row.rounds),
        "MB\nup": of("up_mb", 1, 2, spread=False),
        "MB\ndown": of("down_mb", 1, 2, spread=False),
        f"fewer up than\n{base}, wire": times("compression"),
        "values\nalone": times("compression_values"),
    }
    until: dict[str, Cell] = {
        "rounds": reached("rounds_to_target", 1),
        "MB up and down": reached("mb_to_target", 2),
        "seconds of the virtual clock": of("seconds_to_target", 1, 1),
    }
    course: dict[str, Cell] = {
        "loss": of("final_loss", 1, 3),
        "best\nloss": of("best_loss", 1, 3),
        "converged\nin round": of("convergence_round", 1, 1),
        "std over\nseeds": unrest("seed_std"),
        "std round\nto round": unrest("jitter"),
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
    made = [sheet(title, cells, found.rows) for title, cells in parts.items()]
    return [one for one in made if len(one.head) > 1]


def sheet(title: str, cells: dict[str, Cell], rows: list[Row]) -> Sheet:
    columns = {head: [cell(row) for row in rows] for head, cell in cells.items()}
    columns = {head: texts for head, texts in columns.items() if set(texts) != {"-"}}
    lines = [[row.label, *(texts[i] for texts in columns.values())] for i, row in enumerate(rows)]
    return Sheet(title, ["method", *columns], lines)


def of(name: str, scale: float, digits: int, spread: bool = True) -> Cell:
    """Mean ± std over seeds; how many got there, where not all did."""

    def cell(row: Row) -> str:
        s = row.stats.get(name, Stat(math.nan, math.nan, 0))
        if s.mean == s.mean:
            more = f" ± {scale * s.std:.{digits}f}" if spread and s.std == s.std else ""
            return f"{scale * s.mean:.{digits}f}{more}"
        return f"{s.seeds} of {len(row.seeds)} seeds" if s.seeds else "-"

    return cell


def reached(name: str, digits: int) -> Cell:
    """The same of what it took to reach a target; none of the seeds is told too."""
    plain = of(name, 1, digits)
    return lambda row: f"0 of {len(row.seeds)} seeds" if name in row.stats and not row.stats[name].seeds else plain(row)


def unrest(name: str) -> Cell:
    """A standard deviation, and how much more it is than the baseline's."""

    def cell(row: Row) -> str:
        value, more = row.stats[name].mean, row.ratios[f"{name}_change"]
        if value != value:
            return "-"
        return f"{100 * value:.2f}" + (f" ({round(100 * more):+d}%)" if more == more else "")

    return cell


def gap_of(name: str) -> Cell:
    def cell(row: Row) -> str:
        if name not in row.gaps:
            return "-"
        g = row.gaps[name]
        reach = f" [{100 * g.low:+.2f}, {100 * g.high:+.2f}]" if g.low == g.low else ""
        return f"{100 * g.mean:+.2f}{reach}"

    return cell


def times(name: str) -> Cell:
    return lambda row: f"{row.ratios[name]:.2f}x" if math.isfinite(row.ratios[name]) else "nothing sent"


def show(found: Comparison, console: Console) -> None:
    for one in sheets(found):
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


def markdown(found: Comparison) -> str:
    lines = []
    for one in sheets(found):
        lines += [f"**{one.title}**", "", "| " + " | ".join(one.line) + " |"]
        lines += ["|---" + "|--:" * (len(one.head) - 1) + "|"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in one.rows] + [""]
    return "\n".join(lines + [f"- {note}" for note in found.notes]).rstrip() + "\n"


SPECIAL = {"\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
SPECIAL |= {char: f"\\{char}" for char in "&%$#_{}"}


def latex(found: Comparison) -> str:
    """Tables for the booktabs package."""
    lines = []
    for one in sheets(found):
        lines += [f"% {one.title}", f"\\begin{{tabular}}{{l{'r' * (len(one.head) - 1)}}}", "\\toprule"]
        rows = [" & ".join(map(tex, row)) + r" \\" for row in (one.line, *one.rows)]
        lines += [rows[0], "\\midrule", *rows[1:], "\\bottomrule", "\\end{tabular}", ""]
    return "\n".join(lines + [f"% {note}" for note in found.notes]).rstrip() + "\n"


def tex(text: str) -> str:
    """
    >>> tex("a_b 5 %")
    'a\\\\_b 5 \\\\%'
    """
    return "".join(SPECIAL.get(char, char) for char in text)


def csv_text(found: Comparison) -> str:
    """One row for each method, four decimals; what was not measured is empty."""
    out = io.StringIO()
    lines = [flat(row) for row in found.rows]
    writer = csv.DictWriter(out, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: decimals(v) for k, v in line.items()} for line in lines)
    return out.getvalue()


def flat(row: Row) -> dict[str, Any]:
    out: dict[str, Any] = {"method": row.label, "seeds": len(row.seeds), "rounds": row.rounds}
    for name, s in row.stats.items():
        out |= {name: s.mean, f"{name}_std": s.std} if name != "seed_std" else {name: s.mean}
    out |= row.ratios
    for name, g in row.gaps.items():
        out |= {f"{name}_gap": g.mean, f"{name}_gap_low": g.low, f"{name}_gap_high": g.high}
    return out


def decimals(value: Any) -> Any:
    return value if not isinstance(value, float) else f"{value:.4f}" if value == value else ""


def as_json(found: Comparison) -> dict[str, Any]:
    """Everything, in full; what is not finite becomes None."""
    rows = []
    for row in found.rows:
        stats = {name: tidy(s._asdict()) for name, s in row.stats.items()}
        gaps = {name: tidy(g._asdict()) for name, g in row.gaps.items()}
        rows.append(row._asdict() | {"stats": stats, "ratios": tidy(row.ratios), "gaps": gaps})
    return found._asdict() | {"rows": rows}


def tidy(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
