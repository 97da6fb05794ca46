import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparing.core.errors import CheckpointError, MethodError
from sparing.runs.files.checkpoint import load_checkpoint, save_checkpoint
from sparing.storage import bank as bank_file
from sparing.storage.bank import MemoryBank, open_bank
from sparing.storage.slot_file import SlotBank

CLIENTS = 12
TEMPLATE = {
    "w": torch.tensor([[1.0, 2.0, 3.0]]),
    "count": torch.tensor([5]),
    "seen": torch.tensor([[[True], [False]]]),
    "half": torch.tensor([[0.5]]).bfloat16(),
    "none": torch.empty(1, 0, 2),
}
KINDS = ["memory", "disk"]


def made(kind, folder, template=TEMPLATE, clients=CLIENTS):
    return open_bank(template, clients, path=folder / "clients.slots" if kind == "disk" else None)


def rows_of(numbers):
    """Rows that can be told apart, one for each number."""
    x = torch.tensor(numbers, dtype=torch.int64)
    return {
        "w": x[:, None] + torch.tensor([0.0, 0.25, 0.5]),
        "count": x,
        "seen": torch.stack([x % 2 == 0, x % 3 == 0], 1)[:, :, None],
        "half": (x[:, None] % 64).bfloat16(),
        "none": torch.empty(len(numbers), 0, 2),
    }


def expected(model, ids):
    rows = [rows_of([model[i]]) if i in model else TEMPLATE for i in ids]
    return {name: torch.cat([row[name] for row in rows] or [x[:0]]) for name, x in TEMPLATE.items()}


def assert_rows(bank, model, ids=range(CLIENTS)):
    got, want = bank.read(torch.tensor(list(ids), dtype=torch.int64)), expected(model, ids)
    assert list(got) == list(want)
    for name in want:
        assert got[name].dtype == want[name].dtype
        assert torch.equal(got[name], want[name]), name


def garble(bank, table):
    """The worst a crash can do: every record that the valid table does not refer to is lost."""
    if bank.path.exists():
        records = np.fromfile(bank.path, np.uint8)
        records = records[: len(records) // bank.size * bank.size].reshape(-1, bank.size)
        safe = set(table["slots"].tolist()) if table else set()
        for slot in range(1, len(records) + 1):
            if slot not in safe:
                records[slot - 1] = 0xA5
        records.tofile(bank.path)


COHORT = st.lists(st.integers(0, 5), unique=True, max_size=4)  # few, so that they meet again
STEPS = st.lists(
    st.tuples(st.just("write"), COHORT)
    | st.tuples(st.sampled_from(["read", "state", "land", "told", "commit", "crash", "rollback"]), COHORT),
    min_size=15,  # it takes a few steps to get into trouble
    max_size=40,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(steps=STEPS)
def test_behaves_as_a_dict_whatever_happens(kind, steps, tmp_path_factory):
    """state: a table is given out; land: its checkpoint is in place; told: and the bank knows; commit: all three."""
    folder = tmp_path_factory.mktemp("bank")
    bank, model, number = made(kind, folder), {}, 0
    given_out = durable = (None, {})
    for step, ids in steps:
        if step == "write":
            numbers = list(range(number + 1, number + 1 + len(ids)))
            number += len(ids)
            bank.write(torch.tensor(ids, dtype=torch.int64), rows_of(numbers))
            model.update(zip(ids, numbers, strict=True))
        elif step == "read":
            assert_rows(bank, model, ids)
        elif step in ("state", "commit"):
            given_out = ({name: x.clone() for name, x in bank.state().items()}, dict(model))
        if step in ("land", "told", "commit"):
            durable = given_out
        if step in ("told", "commit") and durable[0] is not None:
            bank.committed()
        if step in ("crash", "rollback"):
            bank, model = reopened(kind, folder, bank, durable, crash=step == "crash"), dict(durable[1])
            given_out = durable
    assert_rows(bank, model)
    bank.close()


def reopened(kind, folder, bank, durable, crash):
    if crash:
        bank.close()
        if kind == "disk":
            garble(bank, durable[0])
    if crash or durable[0] is None:
        bank.close()
        bank = made(kind, folder)
    if durable[0] is not None:
        bank.restore(durable[0])
    return bank


@pytest.mark.parametrize("kind", KINDS)
def test_through_a_checkpoint_file(kind, tmp_path):
    bank = made(kind, tmp_path)
    bank.write(torch.tensor([3, 9]), rows_of([1, 2]))
    save_checkpoint(tmp_path / "c", bank.state(), {})
    bank.committed()
    bank.close()
    bank = made(kind, tmp_path)
    bank.restore(load_checkpoint(tmp_path / "c")[0])
    assert_rows(bank, {3: 1, 9: 2})


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_leads_to_the_same_state(kind, tmp_path):
    states = []
    for crash in (False, True):
        folder = tmp_path / str(crash)
        folder.mkdir()
        bank, draw = made(kind, folder), torch.Generator().manual_seed(0)
        for number in range(20):
            bank.write(torch.randperm(CLIENTS, generator=draw)[:3], rows_of([number] * 3))
            saved = {name: x.clone() for name, x in bank.state().items()}
            bank.committed()
            if crash and number == 7:
                bank.close()
                bank = made(kind, folder)
                bank.restore(saved)
        states.append(bank.state())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_callers_own(kind, tmp_path):
    bank = made(kind, tmp_path)
    given_rows = rows_of([7])
    bank.write(torch.tensor([0]), given_rows)
    given_rows["w"].zero_()
    got = bank.read(torch.tensor([0, 1]))
    got["w"].zero_()
    assert_rows(bank, {0: 7})


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_leaf_goes_to_every_client(kind, tmp_path):
    bank = made(kind, tmp_path)
    bank.write(torch.tensor([2, 4, 6]), rows_of([8]))
    assert_rows(bank, {2: 8, 4: 8, 6: 8})


@pytest.mark.parametrize("kind", KINDS)
def test_strided_and_grad_rows(kind, tmp_path):
    bank = made(kind, tmp_path)
    rows = rows_of([3, 4])
    rows["w"] = rows["w"].t().contiguous().t().requires_grad_()
    bank.write(torch.tensor([5, 1], dtype=torch.int32), rows)
    assert_rows(bank, {5: 3, 1: 4})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [{}, {"none": torch.empty(1, 0)}])
def test_no_state_costs_nothing(kind, template, tmp_path):
    bank = made(kind, tmp_path, template, clients=1_000_000)
    ids = torch.arange(1000)
    bank.write(ids, {name: x.expand(1000, 0) for name, x in template.items()})
    assert {name: x.shape for name, x in bank.read(ids).items()} == dict.fromkeys(template, (1000, 0))
    saved = bank.state()
    assert not template or kind == "memory" or saved == {}
    bank.committed()
    bank.restore(saved)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_cannot_be_meant(kind, tmp_path):
    bank = made(kind, tmp_path)
    for ids, said in [
        (torch.tensor([1, 3, 1]), "client 1 is asked for twice"),
        (torch.tensor([0, 12]), "no client 12; this run has clients 0 to 11"),
        (torch.tensor([-1]), "no client -1"),
        (torch.tensor([0.0]), "whole numbers"),
        (torch.tensor(3), "whole numbers"),
    ]:
        with pytest.raises(MethodError, match=said):
            bank.read(ids)
        with pytest.raises(MethodError, match=said):
            bank.write(ids, rows_of([1] * ids.numel()))
    assert_rows(bank, {})


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_the_templates(kind, tmp_path):
    bank = made(kind, tmp_path)
    good = rows_of([1, 2])
    for bad, said in [
        ({"w": good["w"]}, "must keep its names"),
        (good | {"more": torch.zeros(2)}, "must keep its names"),
        (good | {"w": torch.zeros(2, 4)}, r"'w' must come back as torch.float32 \[2, 3\], not torch.float32 \[2, 4\]"),
        (good | {"w": torch.zeros(3, 3)}, r"not torch.float32 \[3, 3\]"),
        (good | {"w": torch.zeros(2, 3, dtype=torch.float64)}, "not torch.float64"),
        (good | {"count": torch.tensor(1)}, "'count' must come back"),
    ]:
        with pytest.raises(MethodError, match=said):
            bank.write(torch.tensor([0, 1]), bad)
    assert_rows(bank, {})


def test_a_template_has_one_row():
    with pytest.raises(MethodError, match=r"'w' starts as \[3\]"):
        MemoryBank({"w": torch.zeros(3)}, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_something_else_is_refused(kind, tmp_path):
    bank, other = made(kind, tmp_path), made("disk" if kind == "memory" else "memory", tmp_path)
    bank.write(torch.tensor([11]), rows_of([1]))
    saved = {name: x.clone() for name, x in bank.state().items()}
    with pytest.raises(CheckpointError, match="kind of bank"):
        other.restore(saved)
    with pytest.raises(CheckpointError, match="kind of bank"):
        bank.restore({})
    with pytest.raises(CheckpointError, match="no client 11"):
        made(kind, tmp_path, clients=5).restore(saved)
    wider = TEMPLATE | {"w": torch.zeros(1, 4)}
    with pytest.raises(CheckpointError, match=r"not fit this run|other names, shapes"):
        made(kind, tmp_path, wider).restore(saved)
    with pytest.raises(CheckpointError, match="kind of bank"):
        made(kind, tmp_path, {}).restore(saved)


FLOATS = {"a": torch.tensor([[1.0, -2.0]]), "b": torch.full((1, 3, 5), 0.5), "none": torch.empty(1, 0)}


def float_rows(k, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(k, *x.shape[1:], generator=draw) for name, x in FLOATS.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_mixture_is_the_weighted_sum(kind, dtype, tmp_path):
    bank = made(kind, tmp_path, {name: x.to(dtype) for name, x in FLOATS.items()})
    bank.write(torch.tensor([9, 2, 5]), {name: x.to(dtype) for name, x in float_rows(3).items()})
    ids = torch.tensor([2, 3, 5, 9])  # client 3 was never written: its row is the template
    weight = torch.tensor([[0.5, 0.25, 0.0, 0.25], [0, 0, 0, 0], [0, 0, -3, 0]], dtype=torch.float64)
    got, rows = bank.mix(ids, weight), bank.read(ids)
    for name, x in rows.items():
        assert got[name].dtype == dtype
        wanted = torch.einsum("km,m...->k...", weight, x.double())
        assert torch.allclose(got[name].double(), wanted, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 1e-6)


def test_mixtures_from_memory_and_from_disk_have_the_same_bits(tmp_path):
    banks = [made(kind, tmp_path, FLOATS, 200) for kind in KINDS]
    for bank in banks:
        bank.write(torch.randperm(200, generator=torch.Generator().manual_seed(1))[:150], float_rows(150))
    weight = torch.rand(7, 200, dtype=torch.float64)
    weight[weight < 0.6] = 0
    memory, disk = (bank.mix(torch.arange(200), weight) for bank in banks)
    for name in FLOATS:
        assert torch.equal(memory[name], disk[name])
        for k in range(7):
            who = weight[k].nonzero()[:, 0]
            alone = banks[1].mix(who, weight[k : k + 1, who])[name]
            assert torch.equal(alone[0], disk[name][k]), "whoever else is served"


def test_open_bank_tells_the_kinds_apart(tmp_path):
    assert isinstance(made("memory", tmp_path), MemoryBank)
    assert isinstance(made("disk", tmp_path), SlotBank)


@pytest.mark.parametrize("reserved", [0, 1 << 21])
def test_memory_grows_with_the_clients_written(reserved, monkeypatch):
    """What is reserved ahead is address space, of which no page was touched."""
    monkeypatch.setattr(bank_file, "RESERVED", reserved)
    bank = MemoryBank({"w": torch.zeros(1, 1000)}, clients=1_000_000)
    for start in range(0, 300, 10):
        bank.write(torch.arange(start, start + 10) * 3000, {"w": torch.ones(10, 1000)})
    assert bank.rows["w"].shape[0] <= max(1.5 * 301, reserved // 4000)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", [*KINDS, "host"])
def test_rows_on_a_gpu(kind, tmp_path):
    home = "cpu" if kind == "host" else None
    bank = open_bank(TEMPLATE, CLIENTS, "cuda", tmp_path / "s" if kind == "disk" else None, home)
    rows = {name: x.cuda() for name, x in rows_of([5, 6]).items()}
    bank.write(torch.tensor([3, 1], device="cuda"), rows)
    for x in rows.values():
        x.zero_()  # the caller's again
    got = bank.read(torch.tensor([1, 2, 3]))
    assert all(x.is_cuda for x in got.values())
    want = expected({3: 5, 1: 6}, [1, 2, 3])
    assert all(torch.equal(got[name].cpu(), want[name]) for name in want)
    bank.write(torch.tensor([2, 3]), {name: x.cuda() for name, x in rows_of([7, 8]).items()})
    again = open_bank(TEMPLATE, CLIENTS, "cuda", tmp_path / "t" if kind == "disk" else None, home)
    if kind != "disk":  # whose records stay in its file
        again.restore(bank.state())
        want = expected({1: 6, 2: 7, 3: 8}, [1, 2, 3])
        got = again.read(torch.tensor([1, 2, 3]))
        assert all(torch.equal(got[name].cpu(), want[name]) for name in want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_mixtures_on_a_gpu_have_the_same_bits():
    wide = FLOATS | {"wide": torch.zeros(1, 70, 33)}
    here, *others = MemoryBank(wide, 200), MemoryBank(wide, 200, "cuda"), MemoryBank(wide, 200, "cuda", "cpu")
    rows = {name: torch.randn(150, *x.shape[1:]) for name, x in wide.items()}
    ids = torch.randperm(200)[:150]
    here.write(ids, rows)
    for there in others:
        there.write(ids, {name: x.cuda() for name, x in rows.items()})
    weight = torch.rand(20, 200, dtype=torch.float64)
    weight[weight < 0.6] = 0
    wanted = here.mix(torch.arange(200), weight)
    for there in others:
        got = there.mix(torch.arange(200), weight)
        for name, x in wanted.items():
            assert got[name].is_cuda
            assert torch.equal(got[name].cpu(), x)


def test_ids_changed_in_place_are_read_anew():
    bank, ids = MemoryBank({"w": torch.zeros(1, 2)}, 9), torch.tensor([1, 2])
    bank.write(ids, {"w": torch.ones(2, 2)})
    ids += 2
    assert bank.read(ids)["w"].tolist() == [[0, 0], [0, 0]]


def test_a_bank_needs_no_more_address_space_than_its_rows(monkeypatch):
    """Where a process may have little of it, or a machine promises no memory that it lacks."""
    reserve, most = torch.empty, 0

    def limited(size: int, *shape: int, **kwargs) -> torch.Tensor:
        nonlocal most
        most = max(most, size)
        if size > 9:
            raise RuntimeError("can't allocate memory")
        return reserve(size, *shape, **kwargs)

    monkeypatch.setattr(torch, "empty", limited)
    bank = MemoryBank({"w": torch.zeros(1, 3), "v": torch.zeros(1)}, clients=1000)
    for i in range(6):
        bank.write(torch.tensor([i]), {"w": torch.full((1, 3), i + 1.0), "v": torch.full((1,), -1.0)})
    assert most > 9
    assert bank.read(torch.arange(7))["w"][:, 0].tolist() == [1, 2, 3, 4, 5, 6, 0]
    with pytest.raises(RuntimeError, match="can't allocate"):
        bank.write(torch.arange(20, 40), {"w": torch.ones(1, 3), "v": torch.ones(1)})


def test_a_bank_grows_as_it_is_written_where_torch_fills_new_tensors():
    torch.use_deterministic_algorithms(True)
    try:
        bank = MemoryBank({"w": torch.zeros(1, 3)}, clients=1000)
        bank.write(torch.arange(4), {"w": torch.ones(1, 3)})
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(bank.rows["w"]) == 5
