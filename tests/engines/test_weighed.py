"""Of every round, one client's upload is really written: a wrong count does not go unnoticed."""

import pytest
import torch
from torch import nn

import sparing
from sparing.core.errors import SparingError
from sparing.engines import upload_check
from sparing.wire import frame
from support import make_ctx


def task() -> sparing.Task:
    g = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(6, 5, generator=g), torch.randint(3, (6,), generator=g)) for _ in range(6)]
    return sparing.Task(lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), pairs)


def run(method, **plan):
    return sparing.run(task(), method, rounds=3, sample=4, local={"epochs": 1, "batch": 3}, plan=plan, seed=1)


@pytest.mark.parametrize("method", ["fedavg", "topk+int8+memory", "psfed", "topk+tight"])
@pytest.mark.parametrize("chunk", [1, 4])
def test_one_client_a_round_is_written(method, chunk, monkeypatch):
    seen = []

    def watched(parcel, k, about=""):
        seen.append(k)
        return frame.to_bytes(parcel, k, about)

    monkeypatch.setattr(upload_check, "to_bytes", watched)
    run(method, path="loop", chunk=chunk, threads=1)
    assert len(seen) == (1 if method == "fedavg" else 3), "sizes of plain values follow from their shapes"


def test_a_wrong_count_stops_the_run(monkeypatch):
    right = frame._added_up
    monkeypatch.setattr(frame, "_added_up", lambda *words: {n: x + (n == "value") for n, x in right(*words).items()})
    with pytest.raises(SparingError, match=r"counted \d+ bytes for client \d in round 1, but it wrote \d+"):
        run("topk", path="loop", chunk=2, threads=1)


def test_everybody_is_weighed_in_time():
    cohort = make_ctx(list(range(5)))
    found = {upload_check.client_to_check(cohort._replace(round=t)) for t in range(1, 60)}
    assert found == set(range(5))
    assert upload_check.client_to_check(make_ctx([])) is None
