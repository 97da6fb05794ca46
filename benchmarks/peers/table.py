"""What `speed.py` prints and draws of its results."""

import statistics
from pathlib import Path
from typing import Any

OURS, HALF, ANCHOR = "sparing", "sparing, bf16", "one model compiled and captured"
Results = dict[str, Any]


def lines(results: Results) -> str:
    parts = [about(results)]
    parts += [shape_table(name, shape) for name, shape in results["shapes"].items()]
    if results["cohorts"]:
        parts.append(cohort_table(results["cohorts"]))
    return "\n\n".join(parts)


def about(results: Results) -> str:
    on = results["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return (
        f"{on['processor']}, {on['cores']} cores, device {on['device']}, load {results['load']:.1f} before; "
        f"Python {on['python']}, {versions}; seed {results['seed']}."
    )


def shape_table(name: str, shape: Results) -> str:
    rows, size, able = shape["rows"], shape["shape"], shape["able"]
    first = rows[OURS]["seconds"]
    on_gpu = any(row["gpu_mb"] for row in rows.values())
    head = ["", "s per round", "min - max", f"time vs {OURS}", "CPU s", "% of the limit", "peak MB"]
    head += ["GPU MB"] if on_gpu else []
    table = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for who, row in rows.items():
        seconds, median = row["seconds"], statistics.median(row["seconds"])
        ratio = statistics.median(a / b for a, b in zip(seconds, first, strict=True))
        cells = [who, f"{median:.4g}", f"{min(seconds):.4g} - {max(seconds):.4g}", f"{ratio:.3g}x"]
        cells += [f"{statistics.median(row['cpu']):.4g}", f"{shape['floor'] / median:.1%}", f"{row['peak_mb']:,.0f}"]
        cells += [f"{row['gpu_mb']:,.0f}"] if on_gpu else []
        table.append("| " + " | ".join(cells) + " |")
    plans = {who: rows[who]["plan"] for who in (OURS, HALF) if who in rows}
    away = ", ".join(f"{who} {far:.0e}" for who, far in shape["apart"].items())
    return "\n".join(
        [
            f"{name}: {size['cohort']} of {size['clients']:,} clients x {size['samples']} samples a round, "
            f"batch {size['batch']}; medians of {len(first)} x {shape['rounds']} rounds or more.",
            f"Limit: {shape['floor']:.3g} s for {shape['flops'] / 1e9:.3g} GFLOP, a large matrix product running at "
            f"{able['flops'] / 1e9:,.0f} GFLOP/s and a copy at {able['bytes'] / 1e9:,.0f} GB/s.",
            *(
                f"Plan of {who}: {', '.join(f'{key} {value}' for key, value in plan.items())}."
                for who, plan in plans.items()
            ),
            f"Same model: largest difference {away}.",
            "",
            *table,
        ]
    )


def cohort_table(rows: list[Results]) -> str:
    head = ["cohort", "ms per client", "s per round", "peak MB", "increase, MB", "GPU MB", "budget, MB"]
    table = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        seconds = statistics.median(row["seconds"])
        cells = [f"{row['cohort']:,}", f"{1e3 * seconds / row['cohort']:.3g}", f"{seconds:.4g}"]
        more = row["peak_mb"] - row["start_mb"]
        cells += [f"{mb:,.0f}" for mb in (row["peak_mb"], more, row["gpu_mb"], row["budget_mb"])]
        table.append("| " + " | ".join(cells) + " |")
    return "\n".join(["mlp, FedAvg, growing cohorts:", "", *table])


def plot(results: Results, path: Path) -> None:
    """Seconds a round of every contestant, a panel per shape; the whiskers are the fastest and slowest repetition."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shapes = results["shapes"]
    figure, axes = plt.subplots(1, len(shapes), figsize=(5.2 * len(shapes), 4.2), squeeze=False)
    for ax, (name, shape) in zip(axes[0], shapes.items(), strict=True):
        for who, row in reversed(shape["rows"].items()):
            seconds, middle = row["seconds"], statistics.median(row["seconds"])
            reach = [[middle - min(seconds)], [max(seconds) - middle]]
            colour = "C0" if who == OURS else "C9" if "plan" in row else "0.4"
            ax.errorbar(middle, who, xerr=reach, fmt="o", color=colour, capsize=3)
        ax.axvline(shape["floor"], color="C3", lw=1, ls=":")
        ax.set(xscale="log", xlabel="seconds per round", title=name)
        ax.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
