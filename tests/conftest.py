import itertools
import math
import os
import sys
from pathlib import Path

import pytest
import torch

from sparing.runs.plan import settle

sys.path.insert(0, str(Path(__file__).parent))
settle.LONG_RUN_SECONDS = math.inf  # plans are chosen by rule: no test depends on what was measured


@pytest.fixture(scope="session")
def new_state_home(tmp_path_factory):
    """Paths at which nothing is yet, one after the other: pytest's own search among all that it has made."""
    folder = tmp_path_factory.mktemp("state")
    return map(folder.joinpath, map(str, itertools.count()))


@pytest.fixture(autouse=True)
def no_trust(new_state_home, monkeypatch):
    """No test runs code because somebody trusts it, nor makes them."""
    monkeypatch.setenv("XDG_STATE_HOME", str(next(new_state_home)))


def pytest_collection_modifyitems(items):
    if os.environ.get("SPARING_PLAIN", "0") not in ("", "0"):
        for item in items:
            if "accel" in item.keywords or Path(__file__).parent / "accel" in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="SPARING_PLAIN is set: no accelerators"))
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no GPU here"))
