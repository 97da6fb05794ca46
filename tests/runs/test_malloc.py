"""Memory kept between rounds: less work for the system, the same results, and harmless where there is no glibc."""

import ctypes
import subprocess
import sys

import pytest

from sparing.runs import malloc

FAULTS = """
import resource, sys, threading, torch
from sparing.runs.malloc import (return_freed_memory, keep_freed_memory)

def held():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def work():
    for i in range(60):
        if i == 40:
            seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        torch.empty(SIZE << 18).fill_(1)
    seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

seen, few = [], held()
keep_freed_memory()
thread = threading.Thread(target=work)
thread.start()
thread.join()
kept = held() - few
return_freed_memory()
print((seen[1] - seen[0]) * resource.getpagesize() >> 20, kept >> 20, held() - few >> 20)
"""


@pytest.mark.skipif(not malloc._glibc() or not sys.platform.startswith("linux"), reason="glibc alone is told")
@pytest.mark.parametrize("size", [8, 30])
def test_blocks_are_used_again_and_given_back_in_the_end(size):
    code = FAULTS.replace("SIZE", str(size))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    cleared, kept, left = map(int, done.stdout.split())  # in megabytes
    assert cleared < size, "each of the last twenty would be cleared else"
    assert kept < 20 * size
    assert left < 3 * size


def test_harmless_without_glibc(monkeypatch):
    def missing(name):
        raise OSError("there is none")

    for other in (missing, lambda name: object()):
        monkeypatch.setattr(ctypes, "CDLL", other)
        assert malloc._glibc() is None
        malloc.keep_freed_memory()
        malloc.return_freed_memory()
