"""Spread over seeds means one thing everywhere: the standard deviation with n - 1, and one seed has none."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BY_N = re.compile(r"pstdev|pvariance|np\.std\((?!.*ddof=1)|(?<!std)\.std\((?!.*ddof=1)")


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_what_benchmarks_print():
    from over_seeds import deviation, mean_spread

    assert mean_spread([94.0, 96.0]) == "95.0 ± 1.4"
    assert mean_spread([94.0, 96.0, 98.0], digits=2, sign="+") == "+96.00 ± 2.00"
    assert mean_spread([94.0]) == "94.0", "one seed has no spread"
    assert deviation([94.0]) is None


def test_nothing_divides_by_n():
    files = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "src").rglob("*.py")]
    found = [
        f"{path.name}: {line.strip()}" for path in files for line in path.read_text().splitlines() if BY_N.search(line)
    ]
    assert found == []
