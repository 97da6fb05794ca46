"""How numbers and results are put into words."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from sparing.runs.known_names import KnownNames

if TYPE_CHECKING:
    from sparing.runs.results import Result
    from sparing.runs.secure_price import SecurePrice

_METHODS_HINT = """
Combine methods with +, in order of execution; options go in a list:
  sparing run method=psfed+topk+int8
  sparing run 'method=[psfed, {topk: {ratio: 0.05}}]'"""


def percent(share: float) -> str:
    """A share as a percentage; a dash where nothing was measured.

    >>> percent(0.9234), percent(float("nan"))
    ('92.3 %', '-')
    """
    return f"{100 * share:.1f} %" if share == share else "-"


def megabytes_text(count: int) -> str:
    """Bytes in millions.

    >>> megabytes_text(12_345_678)
    '12.35'
    """
    return f"{count / 1e6:,.2f}"


def size_text(count: int) -> str:
    """Bytes in the unit that suits them.

    >>> size_text(37), size_text(6_932), size_text(51_114_466)
    ('37 B', '6.9 kB', '51.1 MB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} B"


def lost_text(price: "SecurePrice") -> str:
    """How many may drop out of a secure sum."""
    near = "" if price.all_pairs else f" (at most {price.lost_near} of anyone's {price.neighbours} neighbours)"
    return (
        f"up to {price.lost:,} of {price.cohort:,} clients may drop out{near}; with more, a round counts for nobody; "
        f"{price.honest:,} honest clients are in every sum at least"
    )


def method_name(method: Sequence[Any]) -> str:
    """The list in a study as one word.

    >>> method_name(["psfed", {"topk": {"ratio": 0.1}}])
    'psfed+topk'
    """
    return "+".join(entry if isinstance(entry, str) else next(iter(entry)) for entry in method)


def print_result(result: "Result", folder: str, console: Console) -> None:
    """What a run came to, and where it lies."""
    rows = {
        "accuracy": f"{percent(result.accuracy)} (best {percent(result.best_accuracy)})",
        "personalized accuracy": f"{percent(result.personal_accuracy)} (worst decile {percent(result.worst_decile)})",
        "upload": f"{megabytes_text(result.up_bytes)} MB",
        "download": f"{megabytes_text(result.down_bytes)} MB",
        "time": f"{result.rounds} rounds, {result.seconds:.1f} s",
    }
    if result.ranked_by != "accuracy":
        better = "higher" if result.higher_is_better else "lower"
        known = {"": result.score, "personalized ": result.personal_score}
        said = ", ".join(f"{whose}{value:.4g}" for whose, value in known.items() if value == value)
        rows = {result.ranked_by: f"{said} ({better} is better)"} | rows
    if result.accuracy != result.accuracy:
        rows = {name: text for name, text in rows.items() if "accuracy" not in name}
    if result.epsilon == result.epsilon:
        rows["privacy loss"] = f"epsilon {result.epsilon:.4g}"
    if result.privacy:
        rows["privacy"] = result.privacy
    if result.stopped:
        rows["stopped early"] = result.stopped
    rows["run folder"] = folder
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(name, value)
    console.print(f"[bold]{result.method}[/] on {result.task}", highlight=False)
    console.print(grid)


def print_methods(names: KnownNames, console: Console) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for entry in names.methods.values():
        grid.add_row(entry.name, entry.about)
        if entry.options:
            grid.add_row(
                "",
                "  ".join(f"{name}={_default_text(value)}" for name, value in entry.options.items()),
                style="cyan",
            )
        if entry.paper:
            grid.add_row("", entry.paper, style="dim")
    console.print(grid, highlight=False)
    console.print("\nBuilding blocks of these methods, in sparing.parts:\n", style="bold")
    parts = Table.grid(padding=(0, 2))
    parts.add_column(style="bold", no_wrap=True)
    parts.add_column()
    for name, about in names.parts.items():
        parts.add_row(name, about)
    console.print(parts, highlight=False)
    console.print(_METHODS_HINT, highlight=False, markup=False)


def _default_text(value: Any) -> str:
    """A default as it is written in a study file."""
    return value if isinstance(value, str) else json.dumps(value)
