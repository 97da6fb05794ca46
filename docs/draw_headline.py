"""Draw README's picture from the table of MNIST by writer in results.md: `python docs/draw_headline.py`."""

import re
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
TABLE = "**writers**: MNIST by writer, 100 clients, 20 a round, LeNet-5 (62k)"
ROW = re.compile(
    r"^\| (?P<name>[^|]+) \| [^|]* \| [^|]* \| (?P<mean>[\d.]+) ± (?P<std>[\d.]+) \|[^|]*\| (?P<up>[\d,.]+) \|", re.M
)
OURS = ("low rank", "budget", "ecsq")
RIGHT, LEFT = {"top-k 3 %, 8 bits", "STC 1 %, both ways"}, {"ecsq, both ways"}
BELOW = {"fp16, both ways", "PowerSGD 4", "low rank 0.5, down 0.9", "budget 5kB, down 0.95"}


class Point(NamedTuple):
    name: str
    mean: float
    std: float
    up: float  # megabytes


def points() -> list[Point]:
    """Rows of several seeds."""
    section = (DOCS / "results.md").read_text().split(TABLE)[1].split("\n**")[0]
    return [
        Point(m["name"], float(m["mean"]), float(m["std"]), float(m["up"].replace(",", "")))
        for m in ROW.finditer(section)
    ]


def words_of(name: str) -> str:
    return name.removesuffix(", both ways").partition(", down")[0]


def main() -> None:
    figure, axes = plt.subplots(figsize=(7.6, 3.6), dpi=160)
    for name, mean, std, up in points():
        colour = "#0b6e4f" if name.startswith(OURS) else "#222222" if name == "FedAvg" else "#8a8a8a"
        axes.errorbar(up, mean, std, fmt="o", color=colour, markersize=5, capsize=2, linewidth=1)
        place, shift, side = (up, mean + std), (0, 5), "center"
        if name in BELOW:
            place, shift = (up, mean - std), (0, -14)
        elif name in RIGHT:
            place, shift, side = (up, mean), (6, -4), "left"
        elif name in LEFT:
            place, shift, side = (up, mean), (-6, -4), "right"
        axes.annotate(words_of(name), place, shift, textcoords="offset points", ha=side, fontsize=8, color=colour)
    axes.set(xscale="log", xlabel="megabytes uploaded by all clients (log scale)", ylabel="test accuracy, %")
    axes.set_xlim(left=1)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(DOCS / "pictures" / "headline.png")


if __name__ == "__main__":
    main()
