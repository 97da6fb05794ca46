"""Which recording a chunk of clients is trained by: soon no new one is made, whoever comes."""

from types import SimpleNamespace

import torch
from torch import nn

from sparing.accel.train_cuda import captured
from sparing.core.method import Local, Phase
from sparing.train.call import PathCall


def table(steps: int, k: int) -> SimpleNamespace:
    places = torch.zeros(steps, k, 4, dtype=torch.int64)
    return SimpleNamespace(
        order=torch.arange(k), alive=[k] * steps, full=[True] * steps, width=[4] * steps, places=places
    )


def rooms(cohorts: list[tuple[int, int]]) -> tuple[list, list]:
    """The room, steps and clients, of every recording made for such chunks, and of the one that each was given."""
    made = []

    def record(lesson, phase, table, k, steps, padded, state):
        made.append((steps, k))
        return SimpleNamespace(k=k, steps=steps, padded=padded)

    start = {"w": torch.zeros(1, 2)}
    lesson = PathCall(nn.Linear(2, 2), len, None, Local(), start, None, {}, precision="bf16")
    used = []
    for steps, k in cohorts:
        one = captured.find_player(record, lesson, Phase(), table(steps, k), start)
        assert one.k >= k
        assert one.steps >= steps
        used.append((one.steps, one.k))
    return made, used


def test_a_cohort_that_never_changes_gets_no_more_than_it_needs():
    assert rooms([(5, 50)] * 9)[0] == [(5, 50)]


def test_parts_of_a_cohort_need_few():
    torch.manual_seed(0)
    sizes = torch.distributions.Binomial(50, torch.tensor(0.25)).sample((2000,)).clamp(min=1).int().tolist()
    made, used = rooms([(5, k) for k in sizes])
    assert len(made) <= 6
    assert sum(k for _, k in used) < 1.5 * sum(sizes)


def test_steps_and_clients_vary():
    torch.manual_seed(0)
    pairs = torch.stack([torch.randint(4, 40, (2000,)), torch.randint(3, 20, (2000,))], 1).tolist()
    assert len(rooms(pairs)[0]) <= captured.KEPT


def test_few_clients_are_not_trained_as_if_they_were_many():
    assert rooms([(5, 50), (5, 2), (5, 50), (5, 2)])[0] == [(5, 50), (5, 2)]


def test_what_is_used_is_kept():
    made, _ = rooms([(5, 10), *((5, 10 * 2**i) for i in range(1, captured.KEPT)), (5, 10), (5, 9999), (5, 9)])
    assert len(made) == captured.KEPT + 1
