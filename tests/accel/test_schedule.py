"""The batches of many clients side by side are those of each alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

import sparing.accel.train_stacked.schedule as schedule
from sparing.accel.train_stacked.schedule import reported_losses, step_table
from sparing.core.context import Ctx, context
from sparing.core.errors import TrainingError
from sparing.core.keys import hashes
from sparing.core.method import Phase
from sparing.data.augment import _random_flip
from sparing.data.clients import Clients
from sparing.train.batches import batch_table, counted_from, shuffle_keys
from sparing.train.keyed_layers import dropout_keys
from support import changed

CPU = torch.device("cpu")


def clients(counts: list[int]) -> Clients:
    count = torch.tensor(counts)
    x, y, start = torch.zeros(sum(counts), 1, 2, 2), torch.zeros(sum(counts)), count.cumsum(0) - count
    return Clients(x, y, start, count, augment=(_random_flip,))


def round_of(data: Clients, ids: list[int]) -> Ctx:
    who = torch.tensor(ids)
    return context(seed=3, round=2, rounds=9, ids=who, n=data.count[who], clients=len(data), samples=len(data.y))


batch = st.sampled_from([1, 3, 10, 100])
phases = st.one_of(
    st.tuples(st.integers(1, 4), batch).map(lambda both: Phase(epochs=both[0], batch=both[1])),
    st.tuples(st.integers(1, 20), batch).map(lambda both: Phase(steps=both[0], batch=both[1])),
)


def check(counts: list[int], ids: list[int], phase: Phase) -> None:
    data = clients(counts)
    ctx, n = round_of(data, ids), [counts[i] for i in ids]
    table = step_table(data, phase, 1, ctx, CPU)
    shuffles = shuffle_keys(ctx, 1, phase, n)
    tables = [batch_table(shuffles[:, k], phase, n[k]) for k in range(len(ids))]
    order = table.order.tolist()
    assert order == sorted(range(len(ids)), key=lambda k: -len(tables[k]))
    assert len(table.alive) == max(map(len, tables))
    assert [int(m) for m in table.alive] == [sum(len(t) > s for t in tables) for s in range(len(table.alive))]
    for place, k in enumerate(order):
        for t, wanted in enumerate(tables[k]):
            wanted = pad(wanted, (0, table.places.shape[2] - len(wanted)), value=-1)
            visited = wanted[wanted >= 0]
            assert table.real[t, place].tolist() == (wanted >= 0).tolist()
            padded = torch.where(wanted >= 0, wanted, wanted[0])
            assert torch.equal(table.places[t, place] - data.start[ids[k]], padded)
            assert table.counts[t, place] == (len(visited) if t >= counted_from(phase, n[k]) else 0)
        assert not table.counts[len(tables[k]) :, place].any()
        assert not table.real[len(tables[k]) :, place].any()
        drops, views = dropout_keys(ctx, 1)[k : k + 1], ctx.keys("augment/1")[k : k + 1]
        assert torch.equal(table.keys[:, place], hashes(drops, len(table.alive))[0])
        assert torch.equal(table.views[:, place], hashes(views, len(table.alive))[0])
    for t, m in enumerate(table.alive):
        sizes = table.real[t, :m].sum(1)
        assert table.width[t] == int(sizes.max())
        assert table.full[t] == bool((sizes == sizes.max()).all())
    assert table.places.shape[2] == min(phase.batch, max(n)), "no room that nobody's samples fill"
    assert int(table.places.min()) >= 0
    assert int(table.places.max()) < len(data.y)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 45), min_size=1, max_size=7), phases, st.randoms())
def test_a_plan_holds_everyone_s_own_batches(counts, phase, random):
    ids = random.sample(range(len(counts)), random.randint(1, len(counts)))
    check(counts, ids, phase)


@pytest.mark.parametrize("phase", [Phase(epochs=2, batch=10**18), Phase(steps=3, batch=10**18)])
def test_a_batch_has_no_more_places_than_its_client_samples(phase):
    check([20, 1, 33], [2, 0, 1], phase)
    assert batch_table(torch.tensor([7, 8, 9]), phase, n=5).shape[1] == 5


def test_shuffles_too_many_to_sort_at_once_are_sorted_in_parts(monkeypatch):
    monkeypatch.setattr(schedule, "WORDS", 50)
    check([20, 1, 33, 7, 60], [4, 0, 3, 1, 2], Phase(epochs=3, batch=8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("few", [0, schedule.FEW])
def test_samples_are_shuffled_alike_wherever_they_are(few, monkeypatch):
    monkeypatch.setattr(schedule, "FEW", few)
    data = clients([20, 1, 33, 7, 60])
    ctx, phase = round_of(data, [4, 0, 3, 1, 2]), Phase(epochs=3, batch=8)
    here, far = step_table(data, phase, 1, ctx, CPU), changed(ctx, device="cuda")
    there = step_table(data.to("cuda"), phase, 1, far, torch.device("cuda"))
    assert there.places.is_cuda
    for name in ("places", "real", "keys", "views", "counts", "order"):
        assert torch.equal(getattr(there, name).cpu(), getattr(here, name)), name


def test_words_beyond_a_client_s_samples_do_not_disturb_its_order():
    """A sample whose word is the largest there is still comes before those that do not exist."""
    words = torch.tensor([[5, schedule.LAST, 3, 0]])
    beyond = torch.tensor([[False, False, False, True]])
    assert words.masked_fill(beyond, schedule.LAST).argsort(dim=1, stable=True).tolist() == [[2, 0, 1, 3]]


def test_losses_come_back_in_the_order_of_the_clients():
    data, phase = clients([5, 25]), Phase(epochs=2, batch=10)
    ctx = round_of(data, [0, 1])
    table = step_table(data, phase, 0, ctx, CPU)
    assert table.order.tolist() == [1, 0]
    seen = torch.zeros(6, 2, dtype=torch.float64)
    seen[3:, 0] = torch.tensor([1.0, 2.0, 4.0])  # the last epoch of client 1: 10, 10 and 5 samples
    seen[:2, 1] = torch.tensor([7.0, 3.0])
    assert torch.allclose(reported_losses(seen, table, phase, 0, ctx), torch.tensor([3.0, 2.0], dtype=torch.float64))
    seen[4, 0] = float("nan")
    with pytest.raises(TrainingError, match="client 1, round 2: the training loss became nan at step 5 of phase 1"):
        reported_losses(seen, table, phase, 0, ctx)
