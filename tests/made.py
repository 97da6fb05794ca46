"""Run folders made up for tests: the numbers in them are given, nothing was trained."""

import json
import math
from pathlib import Path
from typing import Any

from sparing.runs.files.run_folder import LEDGER_FILE, METRICS_FILE, ROUNDS_FILE, SUMMARY_FILE, RunFolder
from sparing.runs.results import INTEGER_COLUMNS, ROUND_COLUMNS, Record, metric_rows, round_row
from sparing.runs.study import study_from


def record(t: int, **values: Any) -> Record:
    usual = {name: 0 if name in INTEGER_COLUMNS else math.nan for name in ROUND_COLUMNS}
    return Record(**usual | {"round": t} | values)


def made_run(
    path: Path,
    accuracy: list[float],
    method: Any = "fedavg",
    seed: int = 0,
    finished: bool = True,
    columns: dict[str, list[Any]] | None = None,
    values: int = 80,
    study: dict[str, Any] | None = None,
    summary: dict[str, Any] | None = None,
) -> Path:
    """One value a round; 100 bytes up and down a round unless `columns` say more; `values` of those up are values."""
    config = {"method": method, "seed": seed, "rounds": len(accuracy), "device": "cpu"} | (study or {})
    with RunFolder.create(path, "cpu") as folder:
        folder.publish(study_from(config).model_dump())
    usual: dict[str, list[Any]] = {"up_bytes": [100] * len(accuracy), "down_bytes": [100] * len(accuracy)}
    columns = {**usual, "accuracy": accuracy, **(columns or {})}
    table = [record(t + 1, **{k: v[t] for k, v in columns.items()}) for t in range(len(accuracy))]
    with (
        open(path / ROUNDS_FILE, "a") as rounds,
        open(path / LEDGER_FILE, "a") as ledger,
        open(path / METRICS_FILE, "a") as metrics,
    ):
        for one in table:
            rounds.write(round_row(one))
            metrics.write(metric_rows(one))
            ledger.write(f"{one.round},0,down,{one.down_bytes - 20},0,0,20,0\n")
            ledger.write(f"{one.round},0,up,{values},{one.up_bytes - values},0,0,0\n")
    if finished:
        (path / SUMMARY_FILE).write_text(json.dumps({"rounds": len(accuracy)} | (summary or {})))
    return path
