"""A contestant in a process of its own: it waits for a number of rounds on its input, does them, says what they took.

PYTHONPATH=benchmarks python -m peers.child SPEC        SPEC is a Spec as JSON
"""

import importlib
import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peers.shapes import Shape
from torch import Tensor

Model = dict[str, Tensor]
Rounds = Callable[[int], Any]
Serve = Callable[..., None]
"""What a contestant calls when it is ready: with how it does n rounds, how its model is read, and what else to tell."""


class Spec(NamedTuple):
    by: str  # the module
    shape: Shape
    device: str
    seed: int
    threads: int
    method: Any = None
    plan: dict[str, Any] | None = None


def serve(device: str, say: Callable[[dict], None], rounds: Rounds, model: Callable[[], Model], **told: Any) -> None:
    say({**told, "start_mb": host_mb("VmRSS")})
    for line in sys.stdin:
        ask = json.loads(line)
        if "save" in ask:
            torch.save({name: x.detach().cpu().clone() for name, x in model().items()}, ask["save"])
            say({})
            continue
        settle(device)
        used, began = processor(), time.perf_counter()
        rounds(ask["rounds"])
        settle(device)
        seconds = time.perf_counter() - began
        say({"seconds": seconds, "cpu": processor() - used, "peak_mb": host_mb(), "gpu_mb": gpu_mb(device)})


def settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def below() -> list[Any]:
    """The processes a contestant started: Flower's workers."""
    try:
        import psutil
    except ImportError:
        return []
    return psutil.Process().children(recursive=True)


def processor() -> float:
    """Seconds of processor time so far."""
    return time.process_time() + sum(sum(p.cpu_times()[:2]) for p in below())


def host_mb(kind: str = "VmHWM") -> float:
    """The most memory this process has held (VmRSS: that it holds), and what the processes below it hold now."""
    try:  # Linux counts what the parent held in ru_maxrss
        own = 1024 * int(re.findall(rf"{kind}:\s*(\d+)", Path("/proc/self/status").read_text())[0])
    except (OSError, IndexError):
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return (own + sum(p.memory_info().rss for p in below())) / 1e6


def gpu_mb(device: str) -> float:
    return 0.0 if device == "cpu" else torch.cuda.max_memory_allocated() / 1e6


def main() -> None:
    """Answers go to the true output, whatever a contestant prints to its errors."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict) -> None:
        print(json.dumps(answer), file=out, flush=True)

    values = json.loads(sys.argv[1])
    shape = Shape(**values["shape"])
    spec = Spec(**{**values, "shape": shape._replace(image=tuple(shape.image))})
    torch.set_num_threads(spec.threads)
    try:
        enter = importlib.import_module(f"peers.{spec.by}").enter
    except ImportError as error:
        return say({"missing": str(error)})
    enter(spec, partial(serve, spec.device, say))
    return None


if __name__ == "__main__":
    main()
