"""What a method does, in words and a table."""

from rich.console import Console
from rich.table import Table

from sparing.cli.wording import size_text
from sparing.runs.explanation import DirectionCost, Explanation

_MEMORY_WORDS = {
    "own": "its own copy of layers",
    "up/residual": "what it could not send yet",
    "local/velocity": "its momentum",
    "local/control": "its control variates",
}
_POSITION_WORDS = {
    "none": "",
    "free": "; both ends know which, so their positions cost nothing",
    "paid": "; the data decides which are written, so their positions travel too",
}


def print_explanation(e: Explanation, console: Console) -> None:
    shape = "x".join(map(str, e.shape))
    console.print(
        f"[bold]{e.method}[/] on {e.model} ({e.parameters:,} parameters; samples {shape}, {e.classes} classes)\n"
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for part in e.parts:
        grid.add_row(part["name"], f"{part['about']} [dim]{part['paper']}[/]")
    grid.add_row("", "")
    largest = e.sizes[0]
    grid.add_row("goes down", _travel_text(largest.down, e.parameters) + _updates_text(e))
    grid.add_row("goes up", _travel_text(largest.up, e.parameters) + _stages_text(e))
    grid.add_row("stays home", _stays_home_text(e))
    grid.add_row("a client keeps", _memory_text(e.client_bytes) or "nothing between rounds")
    kept = _memory_text(e.server_bytes)
    rows = f"; {size_text(e.row_bytes)} of each client" if e.row_bytes else ""
    grid.add_row("the server keeps", "the model" + (f"; {kept}" if kept else "") + rows)
    if e.probe:
        grid.add_row("the server needs", "labelled samples of its own (task.probe), for a gradient each round")
    grid.add_row("blends", f"by {e.weighing}" + (f", then {', then '.join(e.steps)}" if e.steps else ""))
    console.print(grid, highlight=False)
    console.print()
    console.print(_cost_table(e), highlight=False)
    if not all(way.exact for size in e.sizes for way in (size.down, size.up)):
        console.print("≤: at most; about: what an update of normally distributed numbers takes", style="dim")
    console.print("per client, in a round after any warm-up that is no full sync", style="dim")
    if most := _most_text(e):
        console.print(most, style="dim")
    if any(size.other_parameters for size in e.sizes):
        console.print("\nwere factored convolutions k x k ones to the same rank, then 1 x 1 ones:", highlight=False)
        console.print(_other_cost_table(e), highlight=False)


def _travel_text(way: DirectionCost, everything: int) -> str:
    if not way.parameters and not way.buffers:
        return "nothing"
    what = "all" if way.parameters == everything else f"{way.parameters:,} of {everything:,}"
    text = f"{what} parameters"
    if way.sent < way.parameters:
        text += f", at most {way.sent:,} of them written"
    if way.buffers:
        text += f" and {way.buffers:,} buffer values"
    return text + _POSITION_WORDS[way.positions]


def _stages_text(e: Explanation) -> str:
    text = f"; written by {', then '.join(e.stages)}" if e.stages else ""
    return text + ("; what is lost on the way is added to the next update" if e.memory else "")


def _updates_text(e: Explanation) -> str:
    if not e.broadcast:
        return ""
    by = ", then ".join(e.broadcast)
    if e.updates:
        return f"; or the updates since a client's last visit, written by {by}, where that is less"
    return f"; the server's update is written by {by}, but clients get values, since they hold only parts of the model"


def _stays_home_text(e: Explanation) -> str:
    said = []
    if e.private:
        said.append(
            f"{_layer_names_text(e.private, e.layers)} never leave{'s' if len(e.private) == 1 else ''} the client"
        )
    if e.values:
        said.append(
            f"{_layer_names_text(e.values, e.layers)} stays the client's own, but goes up for the server to compare"
        )
    if e.own and e.own != e.values:
        said.append(f"clients keep their own copy of {_layer_names_text(e.own, e.layers)} and overwrite what comes")
    return "; ".join(said) or "nothing but the data"


def _layer_names_text(some: list[str], every: list[str]) -> str:
    if some == every:
        return "all layers"
    return ", ".join(some) if len(some) <= 6 else f"{len(some)} of {len(every)} layers"


def _memory_text(state: dict[str, int]) -> str:
    return "; ".join(f"{_MEMORY_WORDS.get(kind, kind)} ({size_text(size)})" for kind, size in state.items())


def _cost_table(e: Explanation) -> Table:
    table = Table("clients", box=None, pad_edge=False, header_style="bold")
    for name in ("parameters", "multiply-adds a sample", "down", "up", "first contact"):
        table.add_column(name, justify="right")
    for size in e.sizes:
        cells = [f"{size.parameters:,}", f"{size.multiply_adds:,}", _bytes_text(size.down), _bytes_text(size.up)]
        table.add_row(size.name, *cells, size_text(size.first_bytes))
    return table


def _other_cost_table(e: Explanation) -> Table:
    table = Table("clients", box=None, pad_edge=False, header_style="bold")
    for name in ("parameters", "multiply-adds a sample"):
        table.add_column(name, justify="right")
    for size in e.sizes:
        if size.other_parameters is not None:
            table.add_row(size.name, f"{size.other_parameters:,}", f"{size.other_multiply_adds:,}")
    return table


def _bytes_text(way: DirectionCost) -> str:
    if way.exact:
        return size_text(way.bytes)
    about = "" if way.about >= way.bytes else f"about {size_text(way.about)}, "
    return f"{about}≤ {size_text(way.bytes)}"


def _most_text(e: Explanation) -> str:
    """What other rounds cost, where that is more."""
    said = []
    for name in ("down", "up"):
        ways = [getattr(size, name) for size in e.sizes]
        most = max(way.most for way in ways)
        if most > 1.01 * max(way.bytes for way in ways):
            said.append(f"{size_text(most)} {name}")
    return f"in any other round at most {' and '.join(said)}" if said else ""
