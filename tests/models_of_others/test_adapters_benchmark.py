"""benchmarks/adapters.py runs from end to end, tiny, beside the loop with peft."""

import json
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("peft")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.filterwarnings("ignore::UserWarning")  # of peft
def test_a_case_of_each_is_measured_once(tmp_path, monkeypatch):
    out = tmp_path / "adapters.json"
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for words in (["plain, batch 1, rank 4"], ["stacked, batch 1, rank 2-4"], ["nothing"]):
        line = ["adapters.py", "--tiny", "--out", str(out), "--seconds", "60", "--only", *words]
        monkeypatch.setattr(sys, "argv", line)
        runpy.run_path(str(BENCHMARKS / "adapters.py"), run_name="__main__")
    held = json.loads(out.read_text())
    assert held["plain, batch 1, rank 4"]["plain"].startswith("peft")
    ours = held["stacked, batch 1, rank 2-4"]
    assert "failed" not in ours
    assert 0 < ours["share"] < 1
    assert ours["chunk"] == 4
    assert 0 < ours["up"] < ours["base"] / 10
    assert set(held) == {"peak", "on", "plain, batch 1, rank 4", "stacked, batch 1, rank 2-4"}
