"""Run folders made up for tests: the numbers in them are given, nothing was trained."""

import json
import math
from pathlib import Path
from typing import Any

from sparing.run.config import study_from
from sparing.run.folder import LEDGER, METRICS, ROUNDS, SUMMARY, Folder
from sparing.run.results import COLUMNS, WHOLE, Record, metrics_text, row_text


def record(t: int, **values: Any) -> Record:
    usual = {name: 0 if name in WHOLE else math.nan for name in COLUMNS}
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
) -> Path:
    """One value a round; 100 bytes up and down a round unless `columns` say more; `values` of those up are values."""
    config = {"method": method, "seed": seed, "rounds": len(accuracy), "device": "cpu"} | (study or {})
    with Folder.create(path, "cpu") as folder:
        folder.publish(study_from(config).model_dump())
    usual: dict[str, list[Any]] = {"up_bytes": [100] * len(accuracy), "down_bytes": [100] * len(accuracy)}
    columns = {**usual, "accuracy": accuracy, **(columns or {})}
    table = [record(t + 1, **{k: v[t] for k, v in columns.items()}) for t in range(len(accuracy))]
    with open(path / ROUNDS, "a") as rounds, open(path / LEDGER, "a") as ledger, open(path / METRICS, "a") as metrics:
        for one in table:
            rounds.write(row_text(one))
            metrics.write(metrics_text(one))
            ledger.write(f"{one.round},0,down,{one.down_bytes - 20},0,0,20,0\n")
            ledger.write(f"{one.round},0,up,{values},{one.up_bytes - values},0,0,0\n")
    if finished:
        (path / SUMMARY).write_text(json.dumps({"rounds": len(accuracy)}))
    return path
