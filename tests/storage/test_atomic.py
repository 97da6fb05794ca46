import json
import os
import signal
import subprocess
import sys
import time

import pytest

from sparing.storage import atomic
from sparing.storage.atomic import read_at, replace_file, write_at, write_atomic, write_json


def test_writes_and_replaces(tmp_path):
    path = tmp_path / "a.bin"
    for data in (b"one", b"", b"three" * 1000):
        write_atomic(path, data)
        assert path.read_bytes() == data
    assert os.listdir(tmp_path) == ["a.bin"]


def test_json_is_readable(tmp_path):
    write_json(tmp_path / "a.json", {"round": 3, "names": ["a", "é"]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"round": 3, "names": ["a", "é"]}


def test_an_error_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "a.bin"
    write_atomic(path, b"old")

    def fails_halfway():
        with replace_file(path) as file:
            file.write(b"half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails_halfway()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_nothing_is_visible_before_the_end(tmp_path):
    path = tmp_path / "a.bin"
    with replace_file(path) as file:
        file.write(b"new")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == b"new"


def test_bytes_are_durable_before_the_rename_and_the_name_after(tmp_path, monkeypatch):
    steps = []
    sync, rename, folder = os.fsync, os.replace, atomic.sync_folder
    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append(("fsync", os.fstat(fd).st_size)), sync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (steps.append("rename"), rename(a, b)))
    monkeypatch.setattr(atomic, "sync_folder", lambda path: (steps.append("folder"), folder(path)))
    write_atomic(tmp_path / "a.bin", b"12345")
    assert steps[:3] == [("fsync", 5), "rename", "folder"]


def test_a_leftover_of_a_crash_is_overwritten(tmp_path):
    (tmp_path / ".a.bin.part").write_bytes(b"a long leftover of a killed run")
    write_atomic(tmp_path / "a.bin", b"new")
    assert os.listdir(tmp_path) == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == b"new"


def test_short_reads_and_writes_are_continued(tmp_path, monkeypatch):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:3], at))
    monkeypatch.setattr(os, "preadv", lambda fd, outs, at: read(fd, [outs[0][:2]], at))
    fd = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    write_at(fd, memoryview(b"0123456789"), 4)
    out = bytearray(12)
    assert read_at(fd, memoryview(out), 4) == 10
    assert out == b"0123456789\0\0"
    os.close(fd)


WRITER = """
import sys
from atomic import write_atomic  # alone, without the package around it: it starts at once
n = 0
while True:
    n += 1
    write_atomic(sys.argv[1], bytes([n % 251]) * 300_000)
"""


def test_killed_writers_leave_whole_files(tmp_path):
    path = tmp_path / "a.bin"
    environment = os.environ | {"PYTHONPATH": os.path.dirname(atomic.__file__)}
    for pause in (0.02, 0.05, 0.11):
        path.unlink(missing_ok=True)
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], env=environment)
        while not path.exists():
            assert writer.poll() is None, "the process ended by itself"
            time.sleep(0.005)
        time.sleep(pause)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        data = path.read_bytes()
        assert len(data) == 300_000
        assert len(set(data)) == 1
