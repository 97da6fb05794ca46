"""One writer per run folder, however it ends, and whatever else opens the file of its lock."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import sparing
from sparing.core.errors import CheckpointError, SparingError
from sparing.runs.files.lock import _LOCK_FILE, FolderLock

STUDY = {"rounds": 3, "sample": 2, "seed": 1, "local": {"steps": 1}}
TASK = {"clients": 4, "model": "mlp"}
HOLD = "import sys; from pathlib import Path; "
HOLD += "from sparing.runs.files.lock import FolderLock; lock = FolderLock(Path(sys.argv[1])); "


def holder(folder, then):
    child = subprocess.Popen([sys.executable, "-c", HOLD + then, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    return child


def test_a_second_lock_is_refused_and_names_the_holder(tmp_path):
    with holder(tmp_path, "print('held', flush=True); sys.stdin.read()") as child:
        with pytest.raises(CheckpointError, match=f"is in use by another run \\(process {child.pid}\\)"):
            FolderLock(tmp_path)
        child.send_signal(signal.SIGKILL)
    FolderLock(tmp_path).release()


def test_two_locks_of_one_process_are_refused_too(tmp_path):
    first = FolderLock(tmp_path)
    with pytest.raises(CheckpointError, match="in use"):
        FolderLock(tmp_path)
    first.release()
    FolderLock(tmp_path).release()


def test_another_descriptor_of_the_file_does_not_drop_it(tmp_path):
    first = FolderLock(tmp_path)
    (tmp_path / _LOCK_FILE).read_bytes()
    shutil.copytree(tmp_path, tmp_path.parent / "copy")
    with pytest.raises(CheckpointError, match="in use"):
        FolderLock(tmp_path)
    first.release()


def test_a_forked_child_does_not_keep_it(tmp_path):
    then = "import os; os.fork() or (print('held', flush=True), __import__('time').sleep(60)); sys.stdin.read()"
    with holder(tmp_path, then) as child:
        child.send_signal(signal.SIGKILL)
        child.wait()
        FolderLock(tmp_path).release()  # though the grandchild lives on for a while
        subprocess.run(["pkill", "-f", str(tmp_path)], check=False)


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


@pytest.mark.parametrize("bank", ["memory", "file"])
def test_who_comes_second_changes_nothing(tmp_path, bank):
    """While a run is under way, as its logger sees it, another one is refused before it reads or cuts anything."""
    folder, seen = tmp_path / "a", []

    def intrude(record):
        if record.round != 2:
            return
        before = contents(folder)
        with pytest.raises(CheckpointError, match="in use by another run"):
            sparing.resume(folder)
        with pytest.raises(SparingError, match="already holds a run"):
            sparing.run(TASK, "topk+memory", out=folder, **STUDY)
        assert contents(folder) == before
        seen.append(record.round)

    plan = {"plan": {"bank": bank}}
    alone = sparing.run(TASK, "topk+memory", **STUDY, **plan)
    watched = sparing.run(TASK, "topk+memory", out=folder, loggers=[intrude], **STUDY, **plan)
    assert seen == [2]
    assert watched.model_sha256 == alone.model_sha256
    assert sparing.resume(folder).model_sha256 == alone.model_sha256


@pytest.mark.parametrize("gone", ["lock", "folder"])
def test_a_run_whose_folder_was_taken_from_it_stops(tmp_path, gone):
    folder = tmp_path / "a"

    def remove(record):
        if record.round == 1:
            (folder / _LOCK_FILE).unlink() if gone == "lock" else shutil.rmtree(folder)

    with pytest.raises(CheckpointError, match="was removed or replaced while this run held it"):
        sparing.run(TASK, out=folder, loggers=[remove], **STUDY)
    assert not folder.exists() if gone == "folder" else len((folder / "rounds.csv").read_text().splitlines()) == 2


def test_two_that_begin_at_once_in_an_empty_folder(tmp_path):
    lock = FolderLock(tmp_path)
    with pytest.raises(CheckpointError, match="in use by another run"):
        sparing.run(TASK, out=tmp_path, **STUDY)
    assert os.listdir(tmp_path) == [_LOCK_FILE]
    lock.release()
    sparing.run(TASK, out=tmp_path, **STUDY)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_refused_in_words(tmp_path):
    sparing.run(TASK, out=tmp_path / "a", **STUDY)
    for path in (*(tmp_path / "a").iterdir(), tmp_path / "a"):
        path.chmod(0o555)
    with pytest.raises(CheckpointError, match="cannot write to"):
        sparing.resume(tmp_path / "a")
    (tmp_path / "a").chmod(0o755)


def test_a_lock_that_cannot_be_made_is_refused_in_words(tmp_path):
    (tmp_path / _LOCK_FILE).mkdir()
    with pytest.raises(CheckpointError, match="a run needs a folder it may write to"):
        FolderLock(tmp_path)
