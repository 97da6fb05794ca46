"""Threads of the host that work while a GPU goes on."""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache


@cache
def host_workers() -> ThreadPoolExecutor:
    """One for each core that this process may use. Whoever works there waits for nothing that is submitted later."""
    return ThreadPoolExecutor(os.cpu_count() or 1, "host-worker")
