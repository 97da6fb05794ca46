"""The examples run as a user would run them."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_parts_of_ones_own():
    done = subprocess.run([sys.executable, EXAMPLES / "my_part.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()[1:]
    assert len(rows) == 5
    assert all(row.endswith("yes") for row in rows)
