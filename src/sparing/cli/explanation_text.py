"""What a method does, in words and a table."""

from rich.console import Console
from rich.table import Table

from sparing.cli.wording import lost_text, size_text
from sparing.runs.explanation import DirectionCost, Explanation, SizeExplanation
from sparing.runs.secure_price import SecurePrice

_MEMORY_WORDS = {
    "own": "own copy of layers",
    "up/residual": "error-feedback residual",
    "local/velocity": "momentum",
    "local/control": "control variates",
    "its last download": "last download",
    "the share": "sharing",
    "what updates could not say": "error-feedback residual",
}
_POSITION_WORDS = {
    "none": "",
    "free": "; both ends know which, so their positions cost no bytes",
    "paid": "; the data decides which, so their positions are sent too",
}


def print_explanation(e: Explanation, console: Console) -> None:
    shape = "x".join(map(str, e.shape))
    count = f"{e.parameters:,} parameters" + (f" train, {e.frozen:,} are frozen" if e.frozen else "")
    console.print(f"[bold]{e.method}[/] on {e.model} ({count}; samples {shape}, {e.classes} classes)\n")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for part in e.parts:
        grid.add_row(part["name"], f"{part['about']} [dim]{part['paper']}[/]")
    grid.add_row("", "")
    largest = e.sizes[0]
    grid.add_row("download", _travel_text(largest.down, e.parameters) + _updates_text(e))
    grid.add_row("upload", _travel_text(largest.up, e.parameters) + _stages_text(e))
    grid.add_row("stays local", _stays_home_text(e))
    grid.add_row("client state", _memory_text(e.client_bytes) or "none between rounds")
    kept = _memory_text(e.server_bytes)
    rows = f"; {size_text(e.row_bytes)} per client" if e.row_bytes else ""
    grid.add_row("server state", "the model" + (f"; {kept}" if kept else "") + rows)
    if e.probe:
        grid.add_row("server data", "labelled samples of its own (task.probe), for a gradient each round")
    grid.add_row(
        "aggregation", f"client weights: {e.weighing}" + (f", then {', then '.join(e.steps)}" if e.steps else "")
    )
    console.print(grid, highlight=False)
    console.print()
    console.print(_cost_table(e), highlight=False)
    if not all(way.exact for size in e.sizes for way in (size.down, size.up)):
        console.print("≤: upper bound; about: expected for a normally distributed update", style="dim")
    console.print("bytes per client and round, after any warm-up and outside full syncs", style="dim")
    if most := _most_text(e):
        console.print(most, style="dim")
    if e.secure is not None:
        console.print(f"\nwith secure aggregation of {e.secure.cohort:,} clients, 100 samples each:", highlight=False)
        console.print(_secure_table(e.secure, largest), highlight=False)
        console.print(f"{e.secure.words:,} words of {e.secure.bits} bits; {lost_text(e.secure)}", style="dim")
    if any(size.other_parameters for size in e.sizes):
        console.print("\nif convolutions were factored as k x k down to that rank, then 1 x 1:", highlight=False)
        console.print(_other_cost_table(e), highlight=False)


def _travel_text(way: DirectionCost, everything: int) -> str:
    if not way.parameters and not way.buffers:
        return "nothing"
    what = "all" if way.parameters == everything else f"{way.parameters:,} of {everything:,}"
    text = f"{what} parameters"
    if way.sent < way.parameters:
        text += f", at most {way.sent:,} of them sent"
    if way.buffers:
        text += f" and {way.buffers:,} buffer values"
    return text + _POSITION_WORDS[way.positions]


def _stages_text(e: Explanation) -> str:
    text = f"; compressed by {', then '.join(e.stages)}" if e.stages else ""
    return text + ("; error feedback adds what is lost to the next update" if e.memory else "")


def _updates_text(e: Explanation) -> str:
    if not e.broadcast:
        return ""
    by = ", then ".join(e.broadcast)
    if e.updates:
        return f"; or, where smaller, the updates since a client's last round, compressed by {by}"
    return f"; the server's update is compressed by {by}, but clients download values: they hold part of the model"


def _stays_home_text(e: Explanation) -> str:
    said = []
    if e.private:
        said.append(
            f"{_layer_names_text(e.private, e.layers)} never leave{'s' if len(e.private) == 1 else ''} the client"
        )
    if e.values:
        said.append(
            f"{_layer_names_text(e.values, e.layers)} stays the client's own, but is uploaded for the server to compare"
        )
    if e.own and e.own != e.values:
        said.append(
            f"clients keep their own copy of {_layer_names_text(e.own, e.layers)} and overwrite what they download"
        )
    return "; ".join(said) or "nothing but the data"


def _layer_names_text(some: list[str], every: list[str]) -> str:
    if some == every:
        return "all layers"
    return ", ".join(some) if len(some) <= 6 else f"{len(some)} of {len(every)} layers"


def _memory_text(state: dict[str, int]) -> str:
    return "; ".join(f"{_MEMORY_WORDS.get(kind, kind)} ({size_text(size)})" for kind, size in state.items())


def _cost_table(e: Explanation) -> Table:
    table = Table("\nclients", box=None, pad_edge=False, header_style="bold")
    for name in ("\nparameters", "MACs per\nsample", "\ndownload", "\nupload", "first\ndownload"):
        table.add_column(name, justify="right")
    for size in e.sizes:
        cells = [f"{size.parameters:,}", f"{size.multiply_adds:,}", _bytes_text(size.down), _bytes_text(size.up)]
        table.add_row(size.name, *cells, size_text(size.first_bytes))
    return table


def _secure_table(price: SecurePrice, size: SizeExplanation) -> Table:
    """What a client sends and gets in all, beside the same without masks."""
    table = Table("", box=None, pad_edge=False, header_style="bold")
    for name in ("values", "keys", "shares", "unmask", "in all", "without", "times"):
        table.add_column(name, justify="right")
    down, up = size.down.bytes, size.up.bytes
    rows = {
        "download": (down, price.down_keys, price.down_shares, price.down_unmask, down + price.down, down),
        "upload": (price.up_values, price.up_keys, price.up_shares, price.up_unmask, price.up, up),
    }
    for name, cells in rows.items():
        table.add_row(name, *map(size_text, cells), f"{cells[-2] / cells[-1]:.2f}")
    return table


def _other_cost_table(e: Explanation) -> Table:
    table = Table("\nclients", box=None, pad_edge=False, header_style="bold")
    for name in ("\nparameters", "MACs per\nsample"):
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
    for name, word in (("down", "download"), ("up", "upload")):
        ways = [getattr(size, name) for size in e.sizes]
        most = max(way.most for way in ways)
        if most > 1.01 * max(way.bytes for way in ways):
            said.append(f"{size_text(most)} {word}")
    return f"any other round: at most {' and '.join(said)}" if said else ""
