"""What a run ran on, for environment.json: versions and hardware, no names of people or places."""

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

_PACKAGE_FOLDER = Path(__file__).parents[1]


def describe_environment(device: str) -> dict[str, Any]:
    """
    >>> sorted(describe_environment("cpu"))
    ['commit', 'cores', 'device', 'numpy', 'platform', 'python', 'sparing', 'torch']
    """
    return {
        "sparing": version("sparing"),
        "commit": package_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
    }


@cache
def package_commit() -> str | None:
    """The commit of this copy of sparing, with + where files were changed since; None outside its repository."""
    found = _git_output("log", "-1", "--format=%H", "--", ".")
    return f"{found}+" if found and _git_output("status", "--porcelain", "--", ".") else found or None


def _git_output(*words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", _PACKAGE_FOLDER, *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
