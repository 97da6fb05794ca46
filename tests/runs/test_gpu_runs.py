"""Whole runs on a GPU, where the next round starts before the host has read how the last one went."""

import pytest
import torch
from torch import nn

import sparing
from sparing.core.errors import TrainingError
from sparing.data.clients import Clients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def task() -> sparing.Task:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(80, 3, 8, 8, generator=g), torch.randint(4, (80,), generator=g)
    count = torch.full((10,), 8)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4)
    )
    return sparing.Task(net, Clients(x, y, count.cumsum(0) - count, count), test=(x, y))


def run(device: str, lr: float = 0.05, method: str = "fedavg", **more):
    local = {"epochs": 1, "batch": 4, "lr": lr}
    return sparing.run(task(), method, rounds=7, sample=4, local=local, device=device, **more)


@pytest.mark.parametrize("every", [1, 3, 100])
def test_every_round_is_told_as_on_the_cpu(every, tmp_path):
    gpu, cpu = (run(device, evaluate={"every": every}, out=tmp_path / device) for device in ("cuda", "cpu"))
    assert [r.round for r in gpu.table] == list(range(1, 8))
    for a, b in zip(gpu.table, cpu.table, strict=True):
        assert (a.up_bytes, a.down_bytes) == (b.up_bytes, b.down_bytes)
        assert a.train_loss == pytest.approx(b.train_loss, rel=1e-3)
    assert gpu.accuracy == pytest.approx(cpu.accuracy, abs=0.03)


@pytest.mark.parametrize("method", ["psfed", "pfedsim", "topk+memory"])
def test_where_clients_state_lives_makes_no_difference(method, tmp_path):
    found = {
        bank: run("cuda", method=method, plan={"bank": bank}, out=tmp_path / bank)
        for bank in ("memory", "host", "file")
    }
    assert len({result.model_sha256 for result in found.values()}) == 1
    assert len({result.up_bytes for result in found.values()}) == 1


def test_a_loss_that_is_no_number_stops_the_run_with_the_client_s_name():
    with pytest.raises(TrainingError, match=r"client \d+.*round \d"):
        run("cuda", lr=1e12, evaluate={"every": 100})
