"""Draw README's picture from the table in early-results.md: `python docs/draw_headline.py`."""

import re
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
TITLE = "MNIST by writer: "
SHORT = {
    "fp16, both ways": "fp16",
    "QSGD 8 bits": "QSGD 8",
    "QSGD 4 bits": "QSGD 4",
    "EDEN 2 bits": "EDEN 2 bits",
    "top-k 3 %, 8 bits": "top-k 3 %, 8 bits",
    "STC 1 %, both ways": "STC 1 %",
    "low rank 0.9, down 0.98": "low rank 0.9",
    "low rank 0.75, down 0.95": "low rank 0.75",
    "low rank 0.5, down 0.9": "low rank 0.5",
}
RIGHT = {"top-k 3 %, 8 bits", "top-k 1 %"}
BELOW = {"QSGD 8 bits", "EDEN 2 bits", "low rank 0.75, down 0.95"}


def rows() -> list[tuple[str, float, float, float]]:
    """(scheme, accuracy, its deviation, megabytes up) of the first table of that section, rows of all seeds."""
    section = (DOCS / "early-results.md").read_text().split("## What FedAvg's accuracy costs in bytes")[1]
    table = section.split(TITLE)[1].split("CIFAR-100")[0] if TITLE in section else section
    row = re.compile(r"^\| (?P<name>[^|]+) \| (?P<mean>[\d.]+) ± (?P<std>[\d.]+) \|[^|]*\| (?P<up>[\d,.]+) \|", re.M)
    found = [
        (m["name"], float(m["mean"]), float(m["std"]), float(m["up"].replace(",", ""))) for m in row.finditer(table)
    ]
    return [one for one in found if "seeds" not in one[0]]


def main() -> None:
    figure, axes = plt.subplots(figsize=(7.6, 3.6), dpi=160)
    for name, mean, std, up in rows():
        ours = name.startswith("low rank")
        colour = "#0b6e4f" if ours else "#222222" if name == "FedAvg" else "#8a8a8a"
        axes.errorbar(up, mean, std, fmt="o", color=colour, markersize=5, capsize=2, linewidth=1)
        place, shift, side = (up, mean + std), (0, 5), "center"
        if name in BELOW:
            place, shift = (up, mean - std), (0, -14)
        elif name in RIGHT:
            place, shift, side = (up, mean), (6, -4), "left"
        words = SHORT.get(name, name)
        axes.annotate(words, place, shift, textcoords="offset points", ha=side, fontsize=8, color=colour)
    axes.set(xscale="log", xlabel="megabytes uploaded by all clients (log scale)", ylabel="test accuracy, %")
    axes.set_xlim(7, 16000)
    axes.set_ylim(94.2, 97.0)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(DOCS / "pictures" / "headline.png")


if __name__ == "__main__":
    main()
