"""How many threads work within one operation, for a while, and work done side by side."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Done = TypeVar("Done")


@contextmanager
def intra_op(threads: int) -> Iterator[None]:
    """So many threads within one operation. With one, sums have the same bits on any machine of its kind."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def deal_by_load(load: Tensor, hands: int) -> list[Tensor]:
    """Places of `load [n]` dealt out to so many hands: the heaviest first, every other turn from the last hand back.

    >>> [hand.tolist() for hand in deal_by_load(torch.tensor([5, 9, 1, 7]), 2)]
    [[1, 2], [3, 0]]
    """
    order = torch.argsort(load, stable=True).flip(0)
    turn, place = torch.arange(len(order)) // hands, torch.arange(len(order)) % hands
    whose = torch.where(turn % 2 == 0, place, hands - 1 - place)
    return [order[whose == one] for one in range(hands)]


def run_aside(work: Callable[[], Done]) -> Callable[[], Done]:
    """Work on a thread of its own, which ends with it; what this gives waits for it.

    >>> run_aside(lambda: 2 + 2)()
    4
    """
    pool = ThreadPoolExecutor(1)
    under_way = pool.submit(work)
    pool.shutdown(wait=False)
    return under_way.result


def work_side_by_side(
    items: Iterable[Item], work: Callable[[Item], Done], take: Callable[[Done], None], threads: int
) -> None:
    """`take(work(item))` for each item: works on so many threads at once, items and takes on this one, in their order.

    Works record no gradients, unless they say so. With several threads, each has one for its operations, and one item
    more than there are threads is waiting or done. Whatever goes wrong in the first item that fails is raised here,
    once the works under way have ended; so is Ctrl-C. A second Ctrl-C is raised at once.

    >>> work_side_by_side(range(3), lambda x: x * x, print, threads=2)
    0
    1
    4
    """

    here = threading.Condition()
    busy, stopping = 0, False

    def quietly(item: Item) -> Done:
        with torch.no_grad():  # every thread has its own mode
            return work(item)

    def counted(item: Item) -> Done:
        nonlocal busy
        with here:
            if stopping:
                raise CancelledError
            busy += 1
        try:
            return quietly(item)
        finally:
            with here:
                busy -= 1
                here.notify()

    if threads == 1:
        for item in items:
            take(quietly(item))
        return
    under_way: deque[Future[Done]] = deque()
    pool = ThreadPoolExecutor(threads)

    def take_first() -> None:
        take(under_way[0].result())
        under_way.popleft()

    with intra_op(1):
        try:
            for item in items:
                under_way.append(pool.submit(counted, item))
                if len(under_way) > threads:
                    take_first()
            while under_way:
                take_first()
        finally:
            with here:  # not for futures or threads: Ctrl-C may come before the pool itself knows what it has begun
                stopping = True
                here.wait_for(lambda: not busy)
            pool.shutdown(cancel_futures=True)
