"""Law: chunks side by side give the bits of one after the other, whatever the method remembers or blends."""

import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparing
from sparing.accel.train_cpu import outer_sgd as outer
from sparing.core.context import context
from sparing.core.errors import TrainingError
from sparing.core.threads import work_side_by_side
from sparing.engines.engine import chunks_by_thread
from sparing.tasks.task import Task

SIZES = (6, 3, 11, 4, 8, 5, 13, 9, 7, 2)
WAYS = ((1, 64), (2, 64), (3, 4))
METHODS = [
    "fedavg",
    "topk+int8+memory",
    [{"psfed": {"per_client": True}}, {"topk": {"ratio": 0.2}}, "memory", "fedavgm"],
    [{"norm-bound": {"bound": 0.5}}, "sign", "memory"],
    "median",
    "pfedsim",
    "scaffold",
    "broadcast",
]


class Small(nn.Module):
    def __init__(self, draws: bool = False):
        super().__init__()
        self.conv, self.pool, self.drop = nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.Dropout(0.3)
        self.dense, self.head, self.draws = nn.Linear(36, 12), nn.Linear(12, 3), draws

    def forward(self, x):
        x = self.drop(self.dense(self.pool(self.conv(x).relu()).flatten(1)).relu())
        return self.head(F.dropout(x, 0.2, self.training) if self.draws else x)


def task(draws: bool = False, wild: tuple[int, ...] = ()) -> Task:
    g = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n, 1, 8, 8, generator=g), torch.randint(3, (n,), generator=g)) for n in SIZES]
    for i in wild:
        pairs[i][0].mul_(1e30)
    return Task(lambda: Small(draws), train=pairs, test=[(x[:3], y[:3]) for x, y in pairs])


STUDY = {
    "rounds": 2,
    "sample": 7,
    "seed": 3,
    "fleet": {"dropout": 0.3},
    "local": {"epochs": 1, "batch": 5, "lr": 0.1},
    "evaluate": {"every": 2, "who": ["after"]},
}


def play(method, threads: int, chunk: int, on: Task | None = None, bank: str = "memory", **more):
    plan = {"path": "loop", "threads": threads, "chunk": chunk, "bank": bank}
    return sparing.run(on or task(), method, plan=plan, **STUDY | more)


def told(result) -> list:
    """All that a run says, but how long it took."""
    rows = [{k: v for k, v in asdict(record).items() if k != "seconds"} for record in result.table]
    return [result.model_sha256, result.up_bytes, result.down_bytes, repr(rows)]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_same_bits_on_any_number_of_threads_and_in_chunks_of_any_size(method, monkeypatch):
    monkeypatch.setattr(outer, "LARGE", 100)
    plain = play(method, 1, 1, engine="debug")
    for threads, chunk in WAYS:
        fast = play(method, threads, chunk)
        assert told(fast)[:3] == told(plain)[:3], (threads, chunk)


@pytest.mark.parametrize("method", ["psfed+topk", "fedscr"])
def test_whatever_is_reported_too(method):
    """Where chunks are the same; `stale_divergence` is a plain sum, chunk by chunk."""
    one = play(method, 1, 1)
    assert told(one) == told(play(method, 3, 1)) == told(play(method, 2, 1))
    if method != "fedscr":
        assert one.table[1].metrics == play(method, 1, 1, engine="debug").table[1].metrics
        assert one.table[1].metrics["stale_divergence"] > 0


def test_a_model_that_draws_from_torchs_generator():
    before = torch.get_rng_state()
    assert len({told(play("topk+memory", threads, chunk, task(draws=True)))[0] for threads, chunk in WAYS}) == 1
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("method", ["topk+memory", "pfedsim"])
def test_banks_in_files(method):
    assert told(play(method, 3, 2, bank="file"))[:3] == told(play(method, 1, 64))[:3]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_first_client_in_order_that_fails_is_named(threads):
    before = torch.get_num_threads(), threading.active_count()
    for _ in range(3):
        with pytest.raises(TrainingError, match="client 4, round 1"):
            play("fedavg", threads, 1, task(wild=(4, 6)), sample=10)
    assert (torch.get_num_threads(), threading.active_count()) == before


def test_ctrl_c_waits_for_what_is_under_way_and_starts_nothing_new(monkeypatch):
    began, ended, asked, before = [], [], [], (torch.get_num_threads(), threading.active_count())
    go_on, cancel = threading.Event(), Future.cancel

    def cancelled(future: Future) -> bool:
        asked.append(cancel(future))
        if len(asked) == 2:
            go_on.set()
        return asked[-1]

    def work(i: int) -> None:
        began.append(i)
        if i == 1:
            time.sleep(0.1)  # the third waits by now
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        go_on.wait(5)
        ended.append(i)

    monkeypatch.setattr(Future, "cancel", cancelled)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # the workers of a test run ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            work_side_by_side(range(9), work, lambda i: None, 2)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert sorted(began) == sorted(ended) == [0, 1]
    assert (torch.get_num_threads(), threading.active_count()) == before


def test_a_second_ctrl_c_leaves_threads_that_are_waited_for_at_exit():
    """An interrupted `Thread.join` takes the thread for ended; a process that then ends cuts it off and aborts."""
    go_on, raised, workers = threading.Event(), [], []

    def interrupt(*_):
        raised.append(True)
        if len(raised) <= 2:
            raise KeyboardInterrupt

    def press() -> None:
        while len(raised) < 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.05)

    def work(i: int) -> None:
        workers.append(threading.current_thread())
        go_on.wait(60)

    handler = signal.signal(signal.SIGINT, interrupt)
    pressing = threading.Thread(target=press)
    try:
        with pytest.raises(KeyboardInterrupt):
            work_side_by_side(items_that_start(pressing), work, lambda i: None, 2)
        assert workers
        assert all(worker.is_alive() for worker in workers)
    finally:
        go_on.set()
        pressing.join()
        signal.signal(signal.SIGINT, handler)
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()


def items_that_start(thread: threading.Thread):
    yield 0
    thread.start()
    yield 1


def test_works_on_threads_items_and_takes_on_this_one_in_order():
    here, seen, at_once = threading.get_ident(), [], []
    lock = threading.Lock()

    def items():
        for i in range(12):
            assert threading.get_ident() == here
            assert i <= len(seen) + 3, "no more items than there are threads, and one"
            yield i

    def work(i: int) -> int:
        assert threading.get_ident() != here
        assert torch.get_num_threads() == 1
        assert not torch.is_grad_enabled()
        with lock:
            at_once.append(i)
        time.sleep(0.002 * (i % 3))
        return i

    def take(i: int) -> None:
        assert threading.get_ident() == here
        seen.append(i)

    work_side_by_side(items(), work, take, 3)
    assert seen == list(range(12))


@pytest.mark.parametrize(
    ("threads", "chunk", "path", "sizes"),
    [
        (1, 4, "loop", [4, 3, 3]),
        (1, 64, "loop", [10]),
        (2, 64, "loop", [5, 5]),
        (3, 64, "loop", [4, 3, 3]),
        (3, 1, "loop", [1] * 10),
        (2, 6, "stacked", [3, 3, 2, 2]),
        (2, 64, "stacked", [5, 5]),
        (3, 2, "stacked", [1] * 10),
    ],
)
def test_threads_get_equally_many_chunks_and_no_more_clients_at_once(threads, chunk, path, sizes):
    n = torch.tensor(SIZES)
    ctx = context(0, 1, 1, torch.arange(len(n)), n, len(n), int(n.sum()))
    job = SimpleNamespace(aside=threads, chunk=chunk, path=path, method=SimpleNamespace(fit=None))
    found = list(chunks_by_thread(job, ctx))  # pyright: ignore[reportArgumentType]
    assert [len(part.ids) for part in found] == sizes
    assert sorted(torch.cat([part.n for part in found]).tolist()) == sorted(SIZES)


def test_threads_of_path_loop_get_equally_much_data():
    n = torch.tensor([1, 90, 5, 60, 20, 50, 10, 7])
    ctx = context(0, 1, 1, torch.arange(len(n)), n, len(n), int(n.sum()))
    job = SimpleNamespace(aside=2, chunk=64, path="loop", method=SimpleNamespace(fit=None))
    found = list(chunks_by_thread(job, ctx))  # pyright: ignore[reportArgumentType]
    assert [part.n.tolist() for part in found] == [[60, 50, 7, 5], [90, 20, 10, 1]]
