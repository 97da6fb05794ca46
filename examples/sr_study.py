"""The SR-FedAvg study: FedAvg, SR-FedAvg, and SR-FedAvg with top-k, compared over seeds.

    python examples/sr_study.py                                           # embedded digits, seconds
    python examples/sr_study.py --mnist                                   # configs/sr-light.yaml, minutes
    python examples/sr_study.py --mnist configs/sr-research.yaml --out research    # 50 rounds

Writes H5 files, comparison.csv, and the figures of accuracy and stability to results/, run folders to runs/; called
again, it goes on where it was stopped.
SR-FedAvg was said to beat FedAvg; this prints what is so, whichever it is.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

import sparing
from sparing.reports.comparison import compare_groups
from sparing.reports.comparison_tables import comparison_csv, print_comparison
from sparing.reports.figure_files import write_figures
from sparing.reports.h5_files import write_h5_files
from sparing.reports.html_page import report_figures
from sparing.reports.run_folders import group_runs, holds_study, read_run_folder
from sparing.runs.start import start_run
from sparing.runs.study import load_study

LIGHT = Path(__file__).parents[1] / "configs" / "sr-light.yaml"
DIGITS = ["task.data=digits", "task.model=mlp", "local.lr=0.3"]  # to suit 1,797 samples


def main() -> None:
    parser = argparse.ArgumentParser(description="Reproduce the SR-FedAvg study.")
    parser.add_argument("study", type=Path, nargs="?", default=LIGHT)
    parser.add_argument("--mnist", action="store_true", help="as the study says, on MNIST")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()
    study = load_study(args.study, [] if args.mnist else DIGITS)
    options = study.method[0]["sr-fedavg"]
    plain_sr = {key: value for key, value in options.items() if key != "topk"}
    methods = {"FedAvg": ["fedavg"], "SR-FedAvg": [{"sr-fedavg": plain_sr}], "SR-FedAvg_topk": study.method}
    data, results = study.task.data, args.out / "results"
    folders = []
    for name, method in methods.items():
        tables = []
        for seed in range(args.seeds):
            one = study.model_copy(update={"method": method, "seed": seed})
            folder = args.out / "runs" / f"{data}_{name}_{seed}"
            there = holds_study(one, folder, "choose another place with --out")
            tables.append((sparing.resume(folder) if there else start_run(one, out=folder)).table)
            folders.append(folder)
        algorithm, _, topk = name.partition("_")
        write_h5_files(results, str(data), algorithm, "study" + topk, tables)
    groups, _ = group_runs([read_run_folder(folder) for folder in folders])
    found = compare_groups(groups, warmup=options["warmup"])
    (results / "comparison.csv").write_text(comparison_csv(found))
    made = dict(report_figures(groups))
    write_figures([made["Accuracy by round"], made["Stability"]], results, ["png"])
    print_comparison(found, Console())
    print(f"H5 files, comparison.csv and figures are in {results}")


if __name__ == "__main__":
    try:
        main()
    except sparing.SparingError as error:
        sys.exit(f"sr_study: {error}")
