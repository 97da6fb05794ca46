import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparing.core.errors import CheckpointError
from sparing.runs.files.checkpoint import load_checkpoint, save_checkpoint
from sparing.storage import slot_file, weighted_sums
from sparing.storage.slot_file import SlotBank

TEMPLATE = {"w": torch.zeros(1, 6), "n": torch.zeros(1, dtype=torch.int64)}


def rows_of(k, number):
    return {"w": torch.full((k, 6), float(number)), "n": torch.full((k,), number)}


def cohort(clients, k, draw):
    return torch.randperm(clients, generator=draw)[:k]


def records(bank):
    return os.path.getsize(bank.path) / bank.size


def committed(bank):
    saved = bank.state()
    bank.committed()
    return saved


@pytest.mark.parametrize("long", [False, True])
def test_an_altered_row_is_named(tmp_path, long, monkeypatch):
    monkeypatch.setattr(slot_file, "_LONG_RECORD", 0 if long else 1 << 20)
    bank = SlotBank(tmp_path / "clients.slots", TEMPLATE, 100)
    bank.write(torch.arange(40, 50), rows_of(10, 3))
    saved = committed(bank)
    bank.close()
    at = int(saved["slots"][saved["ids"].tolist().index(47)] - 1) * bank.size
    with open(bank.path, "r+b") as file:
        file.seek(at + 5)
        byte = file.read(1)[0]
        file.seek(at + 5)
        file.write(bytes([byte ^ 4]))
    bank = SlotBank(bank.path, TEMPLATE, 100)
    bank.restore(saved)
    bank.read(torch.tensor([40, 46, 48]))
    with pytest.raises(CheckpointError, match=r"client 47 in .*clients\.slots \(slot 8\) was altered"):
        bank.read(torch.tensor([40, 47]))


def test_a_short_or_missing_file_is_named(tmp_path):
    bank = SlotBank(tmp_path / "clients.slots", TEMPLATE, 100)
    bank.write(torch.arange(10), rows_of(10, 3))
    saved = committed(bank)
    bank.close()
    os.truncate(bank.path, 9 * bank.size + 1)
    with pytest.raises(CheckpointError, match=r"clients\.slots has \d+ bytes where the checkpoint refers to \d+"):
        SlotBank(bank.path, TEMPLATE, 100).restore(saved)
    os.remove(bank.path)
    with pytest.raises(CheckpointError, match=r"clients\.slots cannot be opened \(No such file"):
        SlotBank(bank.path, TEMPLATE, 100).restore(saved)


@pytest.mark.parametrize("long", [False, True])
def test_a_file_that_shrinks_while_in_use_is_noticed(tmp_path, monkeypatch, long):
    monkeypatch.setattr(slot_file, "_LONG_RECORD", 0 if long else 1 << 20)
    bank = SlotBank(tmp_path / "clients.slots", TEMPLATE, 100)
    bank.write(torch.arange(10), rows_of(10, 3))
    os.truncate(bank.path, 9 * bank.size + 1)
    with pytest.raises(CheckpointError, match="client 9 in"):
        bank.read(torch.arange(10))


def test_a_slot_of_the_last_checkpoint_is_never_touched(tmp_path):
    bank, draw = SlotBank(tmp_path / "s", TEMPLATE, 50), torch.Generator().manual_seed(0)
    for number in range(40):
        bank.write(cohort(50, 8, draw), rows_of(8, number))
        saved = committed(bank)
        before = bank.path.read_bytes()
        for extra in range(3):
            bank.write(cohort(50, 8, draw), rows_of(8, 1000 + extra))
        after = bank.path.read_bytes()
        for slot in saved["slots"].tolist():
            place = slice((slot - 1) * bank.size, slot * bank.size)
            assert before[place] == after[place]
        bank.restore(saved)


@pytest.mark.parametrize("every", [1, 4])
def test_the_file_does_not_grow_without_bound(tmp_path, every):
    clients, k = 60, 10
    bank, draw, met = SlotBank(tmp_path / "s", TEMPLATE, clients), torch.Generator().manual_seed(0), set()
    for number in range(100):
        ids = cohort(clients, k, draw)
        met |= set(ids.tolist())
        bank.write(ids, rows_of(k, number))
        if number % every == 0:
            committed(bank)
        assert records(bank) <= len(met) + every * k
    assert len(met) == clients


def test_crash_after_crash_does_not_grow_the_file(tmp_path):
    bank, draw = SlotBank(tmp_path / "s", TEMPLATE, 60), torch.Generator().manual_seed(0)
    bank.write(torch.arange(60), rows_of(60, 0))
    saved = committed(bank)
    for number in range(20):
        bank.write(cohort(60, 10, draw), rows_of(10, number))
        bank.close()
        bank = SlotBank(bank.path, TEMPLATE, 60)
        bank.restore(saved)
    assert records(bank) == 70


def test_checkpoints_that_never_land_keep_their_rows(tmp_path):
    """A save that failed may still have reached the disk, so its slots stay until a later one is committed."""
    bank, draw = SlotBank(tmp_path / "s", TEMPLATE, 30), torch.Generator().manual_seed(0)
    given_out = []
    for number in range(5):
        ids = cohort(30, 5, draw)
        bank.write(ids, rows_of(5, number))
        given_out.append(({name: x.clone() for name, x in bank.state().items()}, bank.read(torch.arange(30))))
    bank.close()
    for saved, rows in given_out:
        again = SlotBank(bank.path, TEMPLATE, 30)
        again.restore(saved)
        assert torch.equal(again.read(torch.arange(30))["n"], rows["n"])


def test_rows_written_while_a_checkpoint_is_saved_stay(tmp_path):
    bank = SlotBank(tmp_path / "s", TEMPLATE, 30)
    bank.write(torch.arange(5), rows_of(5, 1))
    saved = bank.state()
    bank.write(torch.arange(3), rows_of(3, 2))
    bank.committed()
    bank.write(torch.arange(10, 20), rows_of(10, 3))
    assert bank.read(torch.arange(5))["n"].tolist() == [2, 2, 2, 1, 1]
    bank.restore(saved)
    assert bank.read(torch.arange(5))["n"].tolist() == [1] * 5


def test_rows_are_durable_before_the_table_is_given_out(tmp_path, monkeypatch):
    bank = SlotBank(tmp_path / "s", TEMPLATE, 30)
    bank.write(torch.arange(5), rows_of(5, 1))
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    bank.state()
    assert synced == [os.stat(bank.path).st_ino]


@pytest.mark.parametrize("long", [False, True])
def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch, long):
    monkeypatch.setattr(slot_file, "_LONG_RECORD", 0 if long else 1 << 20)
    bank = SlotBank(tmp_path / "clients.slots", TEMPLATE, 30)
    bank.write(torch.arange(5), rows_of(5, 1))
    saved = committed(bank)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match=r"clients\.slots cannot be written \(No space left on device\)"):
        bank.write(torch.arange(5), rows_of(5, 2))
    monkeypatch.undo()
    bank.restore(saved)
    assert bank.read(torch.arange(5))["n"].tolist() == [1] * 5


def test_a_fresh_run_empties_an_old_file(tmp_path):
    (tmp_path / "s").write_bytes(bytes(100_000))
    bank = SlotBank(tmp_path / "s", TEMPLATE, 30)
    bank.write(torch.arange(5), rows_of(5, 1))
    assert records(bank) == 5


def test_writing_after_close_keeps_what_was_committed(tmp_path):
    bank = SlotBank(tmp_path / "s", TEMPLATE, 30)
    bank.write(torch.arange(5), rows_of(5, 1))
    committed(bank)
    bank.close()
    bank.write(torch.tensor([9]), rows_of(1, 2))
    assert bank.read(torch.tensor([4, 9]))["n"].tolist() == [1, 2]


@settings(max_examples=60, deadline=None)
@given(
    stage=st.integers(1, 400), long=st.booleans(), picks=st.lists(st.lists(st.integers(0, 39), unique=True), max_size=6)
)
def test_any_size_of_stage_gives_the_same_rows(tmp_path_factory, stage, long, picks):
    old, slot_file._STAGE_BYTES = slot_file._STAGE_BYTES, stage
    try:
        bank = SlotBank(tmp_path_factory.mktemp("s") / "s", TEMPLATE, 40)
    finally:
        slot_file._STAGE_BYTES = old
    bank.long = long
    model = torch.zeros(40, dtype=torch.int64)
    for ids in picks:
        index = torch.tensor(ids, dtype=torch.int64)
        numbers = model[index] + index + 1
        model[index] = numbers
        bank.write(index, {"w": numbers[:, None].expand(-1, 6).float(), "n": numbers})
        committed(bank)
    got = bank.read(torch.arange(40))
    assert torch.equal(got["n"], model)
    assert torch.equal(got["w"], model[:, None].expand(-1, 6).float())


def test_neighbouring_slots_go_in_one_call(tmp_path, monkeypatch):
    calls, write = [], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: (calls.append(at), write(fd, data, at))[1])
    bank = SlotBank(tmp_path / "s", TEMPLATE, 1000)
    bank.write(torch.randperm(1000), rows_of(1000, 1))
    assert calls == [0]


WIDE = {"w": torch.zeros(1, 3001)}


def wide_bank(path):
    bank = SlotBank(path, WIDE, 40)
    bank.write(torch.randperm(40, generator=torch.Generator().manual_seed(0)), {"w": torch.randn(40, 3001)})
    return bank, torch.rand(5, 40, dtype=torch.float64)


@pytest.mark.parametrize(
    "sizes",
    [
        {"_BATCH_BYTES": 1},
        {"_BATCH_BYTES": 50_000},
        {"_STRIPE_FLOATS": 7},
        {"_PANEL_FLOATS": 1000},
        {"_PANEL_FLOATS": 999, "_BATCH_BYTES": 30_000},
        {"_DIRECT_FROM": 0},
        {"_DIRECT_FROM": 0, "_CACHED_BYTES": 0},
    ],
    ids=str,
)
def test_a_mixture_does_not_depend_on_how_it_is_read(tmp_path, monkeypatch, sizes):
    bank, weight = wide_bank(tmp_path / "s")
    wanted = bank.mix(torch.arange(40), weight)["w"]
    for name, value in sizes.items():
        monkeypatch.setattr(weighted_sums, name, value)
    assert torch.equal(bank.mix(torch.arange(40), weight)["w"], wanted)
    rows = bank.read(torch.arange(40))["w"]
    assert torch.allclose(wanted.double(), weight @ rows.double(), atol=1e-4)
    bank.write(torch.tensor([3]), {"w": torch.ones(1, 3001)})
    assert float(bank.mix(torch.tensor([3]), torch.ones(1, 1))["w"][0, 0]) == 1, "writing works as before"


@pytest.mark.parametrize("where", ["open", "preadv"])
def test_a_file_system_may_refuse_to_leave_out_the_cache(tmp_path, monkeypatch, where):
    bank, weight = wide_bank(tmp_path / "s")
    wanted = bank.mix(torch.arange(40), weight)["w"]
    monkeypatch.setattr(weighted_sums, "_DIRECT_FROM", 0)
    monkeypatch.setattr(weighted_sums, "_CACHED_BYTES", 0)
    opened, plain = [], {name: getattr(os, name) for name in ("open", "preadv")}

    def refusing(first, second, *rest):
        if where == "open" or (first != bank.fd and first in opened):
            raise OSError(22, "Invalid argument")
        return plain["preadv"](first, second, *rest)

    def noting(*args):
        opened.append(plain["open"](*args))
        return opened[-1]

    monkeypatch.setattr(weighted_sums.os, "open", refusing if where == "open" else noting)
    if where == "preadv":
        monkeypatch.setattr(weighted_sums.os, "preadv", refusing)
    assert torch.equal(bank.mix(torch.arange(40), weight)["w"], wanted)
    assert len(opened) == (where == "preadv")
    for fd in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_share_of_a_large_file_comes_through_the_cache(tmp_path, monkeypatch):
    bank, weight = wide_bank(tmp_path / "s")
    wanted = bank.mix(torch.arange(40), weight)["w"]
    monkeypatch.setattr(weighted_sums, "_DIRECT_FROM", 0)
    monkeypatch.setattr(weighted_sums, "_CACHED_BYTES", os.path.getsize(bank.path) // 4)
    monkeypatch.setattr(weighted_sums, "_STRETCH_BYTES", 8 * bank.size)
    used, read = [], weighted_sums.read_record

    def looking(fd, room, offset, size):
        used.append((offset, fd))
        return read(fd, room, offset, size)

    monkeypatch.setattr(slot_file, "read_record", looking)
    assert torch.equal(bank.mix(torch.arange(40), weight)["w"], wanted)
    assert {fd for offset, fd in used if offset // bank.size % 8 < 2} == {bank.fd}
    late = {fd for offset, fd in used if offset // bank.size % 8 >= 2}
    assert len(late) == 1
    assert late != {bank.fd} or weighted_sums._open_past_cache(bank.path) is None


def test_a_mixture_reads_each_row_once_and_only_those_used(tmp_path, monkeypatch):
    bank, weight = wide_bank(tmp_path / "s")
    weight[:, ::2] = 0
    offsets, read = [], weighted_sums.read_record

    def looking(fd, room, offset, size):
        offsets.append(offset // bank.size + 1)
        return read(fd, room, offset, size)

    monkeypatch.setattr(slot_file, "read_record", looking)
    bank.mix(torch.arange(40), weight)
    assert sorted(offsets) == sorted(bank.slot_of[1::2].tolist())


def test_a_row_altered_between_two_runs_is_noticed_by_a_mixture(tmp_path):
    bank, weight = wide_bank(tmp_path / "s")
    saved = committed(bank)
    slot = int(bank.slot_of[7])
    bank.close()
    with open(bank.path, "r+b") as file:
        file.seek((slot - 1) * bank.size + 9)
        byte = file.read(1)[0]
        file.seek((slot - 1) * bank.size + 9)
        file.write(bytes([byte ^ 4]))
    bank = SlotBank(bank.path, WIDE, 40)
    bank.restore(saved)
    bank.write(torch.tensor([3]), {"w": torch.ones(1, 3001)})
    with pytest.raises(CheckpointError, match=rf"client 7 in .* \(slot {slot}\) was altered"):
        bank.mix(torch.arange(40), weight)
    os.truncate(bank.path, 3 * bank.size)
    with pytest.raises(CheckpointError, match="was altered"):
        bank.mix(torch.arange(40), weight)


ROUNDS = """
import sys, torch
from sparing.runs.files.checkpoint import (load_checkpoint, save_checkpoint)
from sparing.storage.slot_file import SlotBank
torch.set_num_threads(1)
folder, clients, k = sys.argv[1], 200, 20
bank, number = SlotBank(folder + "/clients.slots", {"w": torch.zeros(1, 3000), "n": torch.zeros(1, dtype=torch.int64)},
                        clients), 0
if sys.argv[2] == "resume":
    saved, meta = load_checkpoint(folder + "/last")
    bank.restore(saved)
    number = meta["round"]
print("ready", flush=True)
while True:
    number += 1
    ids = torch.randperm(clients, generator=torch.Generator().manual_seed(number))[:k]
    rows = bank.read(ids)
    bank.write(ids, {"w": rows["w"] + number, "n": rows["n"] + 1})
    save_checkpoint(folder + "/last", bank.state(), {"round": number})
    bank.committed()
"""


def rounds(folder, how):
    """A process that goes through rounds until it is killed."""
    source = os.path.dirname(os.path.dirname(os.path.dirname(slot_file.__file__)))
    return subprocess.Popen(
        [sys.executable, "-c", ROUNDS, str(folder), how],
        env=os.environ | {"PYTHONPATH": source},
        stdout=subprocess.PIPE,
    )


def wait_for(path, run):
    while not path.exists():
        assert run.poll() is None, "the process ended by itself"
        time.sleep(0.001)


def replayed(last):
    """What round `last` must have left behind, worked out in memory."""
    w, n = torch.zeros(200), torch.zeros(200, dtype=torch.int64)
    for number in range(1, last + 1):
        ids = torch.randperm(200, generator=torch.Generator().manual_seed(number))[:20]
        w[ids] += number
        n[ids] += 1
    return w, n


def test_killed_at_any_moment_the_last_checkpoint_comes_back(tmp_path):
    template = {"w": torch.zeros(1, 3000), "n": torch.zeros(1, dtype=torch.int64)}
    draw, last = random.Random(time.time_ns()), 0
    for attempt in range(3):
        with rounds(tmp_path, "resume" if attempt else "fresh") as run:
            assert run.stdout is not None
            assert run.stdout.readline() == b"ready\n"
            wait_for(tmp_path / "last", run)
            time.sleep(draw.uniform(0, 0.25))
            run.send_signal(signal.SIGKILL)
        saved, meta = load_checkpoint(tmp_path / "last")
        assert meta["round"] >= last
        last = meta["round"]
        bank = SlotBank(tmp_path / "clients.slots", template, 200)
        bank.restore(saved)
        got, (w, n) = bank.read(torch.arange(200)), replayed(last)
        assert torch.equal(got["w"], w[:, None].expand(-1, 3000))
        assert torch.equal(got["n"], n)
        assert records(bank) <= int((n > 0).sum()) + 2 * 20
        bank.close()
    assert last > 4


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads memory in use from /proc")
def test_time_and_memory_of_a_round_do_not_depend_on_the_clients(tmp_path, one_thread):
    spent = {}
    for clients in (1_000, 100_000):
        bank = SlotBank(tmp_path / str(clients), {"w": torch.zeros(1, 250)}, clients)
        draw, times, before = torch.Generator().manual_seed(0), [], resident()
        for number in range(200):
            ids = torch.randint(clients, (400,), generator=draw).unique()[:100]
            start = time.perf_counter()
            rows = bank.read(ids)
            bank.write(ids, {"w": rows["w"] + 1})
            times.append(time.perf_counter() - start)
            if number % 10 == 0:
                save_checkpoint(tmp_path / "last", bank.state(), {})
                bank.committed()
        spent[clients] = sorted(times)[100]
        assert sorted(times[-50:])[25] < 4 * sorted(times[:50])[25] + 1e-3
        assert resident() - before < 64 << 20
    assert spent[100_000] < 4 * spent[1_000] + 1e-3


@pytest.fixture
def one_thread():
    """Threads that wait for each other on a busy machine are not what is timed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_table_is_small(tmp_path):
    """The table is three whole numbers for each client met, however wide the rows are."""
    bank = SlotBank(tmp_path / "s", {"w": torch.zeros(1, 10_000)}, 1_000_000)
    bank.write(torch.tensor([999_999, 5]), {"w": torch.ones(2, 10_000)})
    save_checkpoint(tmp_path / "last", bank.state(), {})
    assert os.path.getsize(tmp_path / "last") < 1000
    assert load_checkpoint(tmp_path / "last")[0]["ids"].tolist() == [5, 999_999]
