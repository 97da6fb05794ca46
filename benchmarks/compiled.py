"""Images a second of local training by path `compiled` on a GPU, for several numbers of streams, beside other paths.

    python benchmarks/compiled.py resnet18 --batch 50 [--streams 1 5 8] [--paths stacked] [--profile FILE]

20 clients take 5 steps of one epoch. `--lock FILE`: compile at once, but time one process after the other.
"""

import argparse
import fcntl
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peers.shapes import MODELS, Shape

from sparing.accel.train_cuda import captured, client_streams, compiled_step
from sparing.core.context import context
from sparing.core.method import Local, Phase
from sparing.core.optimiser import Optimiser
from sparing.core.tree import tree_of
from sparing.data.clients import Clients
from sparing.train.local import train
from sparing.train.losses import cross_entropy

STEPS, CLIENTS = 5, 20


def main() -> None:
    args = options().parse_args()
    if args.options:
        compiled_step.COMPILER["options"] = dict.fromkeys(args.options, True)
    play = player(args)
    began = time.perf_counter()
    play("compiled")
    say(args, f"compiled and captured in {time.perf_counter() - began:.0f} s")
    with alone(args.lock):
        for path in ["compiled", *args.paths]:
            say(args, f"{path}, as it is: {speed(args, lambda path=path: play(path)):,.0f} images/s")
        if args.profile:
            profile(args, lambda: play("compiled"))
        for streams in args.streams:
            for way in (steady, searched, loose):
                client_streams.STREAMS = range(streams, streams + 1)
                captured.RECORDS.clear()
                with way():
                    found = speed(args, lambda: play("compiled"))
                many = f"{found:,.0f} images/s, {replays(args):,.0f} in replays"
                say(args, f"{streams} streams, {way.__name__}: {many}")


@contextmanager
def steady() -> Iterator[None]:
    """Convolutions as they are in a run: the same bits every time."""
    yield


@contextmanager
def searched() -> Iterator[None]:
    """The fastest of these algorithms, by trial."""
    torch.backends.cudnn.benchmark = True
    yield
    torch.backends.cudnn.benchmark = False


@contextmanager
def loose() -> Iterator[None]:
    """The fastest of all algorithms, by trial."""
    usual, captured.multiplying_as = captured.multiplying_as, lambda precision: searched()
    yield
    captured.multiplying_as = usual


def options() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("model", choices=MODELS)
    found.add_argument("--batch", type=int, default=50)
    found.add_argument("--streams", type=int, nargs="*", default=[1, 5, 10], help="of 20 clients")
    found.add_argument("--paths", nargs="*", default=[])
    found.add_argument("--precision", default="bf16")
    found.add_argument("--options", nargs="*", default=[], help="of inductor that are set to True")
    found.add_argument("--lock", type=Path)
    found.add_argument("--profile", type=Path)
    return found


def player(args: argparse.Namespace) -> Callable[[str], None]:
    shape = Shape(args.model, (3, 32, 32), CLIENTS, STEPS * args.batch, CLIENTS, batch=args.batch)
    x, y = (part.flatten(0, 1).cuda() for part in shape.data(0))
    count = torch.full((CLIENTS,), shape.samples)
    data, model = Clients(x, y, count.cumsum(0) - count, count), shape.model()
    start = {name: value.cuda() for name, value in tree_of(model).items()}
    local = Local((Phase(epochs=1, batch=args.batch, optimiser=Optimiser(lr=0.01)),))

    def play(path: str) -> None:
        ids = torch.arange(CLIENTS)
        ctx = context(0, 1, 9, ids, count, clients=CLIENTS, samples=int(count.sum()), device="cuda")
        train(model, cross_entropy, data, local, start, ctx, path, precision=args.precision, graph=True)

    return play


def speed(args: argparse.Namespace, play: Callable[[], None], turns: int = 5) -> float:
    """Images a second, the median."""
    play()
    seconds = []
    for _ in range(turns):
        torch.cuda.synchronize()
        began = time.perf_counter()
        play()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return CLIENTS * STEPS * args.batch / statistics.median(seconds)


def replays(args: argparse.Namespace) -> float:
    """The same of the recorded steps alone."""
    streams = next(one for known in captured.RECORDS.values() for _, one in known)
    assert isinstance(streams, client_streams.ClientStreams)
    assert streams.graph is not None

    def play() -> None:
        streams.sheet.t.zero_()
        for _ in range(STEPS):
            streams.graph.replay()  # type: ignore[union-attr]

    return speed(args, play)


def profile(args: argparse.Namespace, play: Callable[[], None]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        play()
        torch.cuda.synchronize()
    args.profile.write_text(seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=60))


def say(args: argparse.Namespace, words: str) -> None:
    print(f"{args.model} x {args.batch}, {args.precision} {' '.join(args.options)}: {words}", flush=True)


@contextmanager
def alone(path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    main()
