"""Runs of several ranks on this machine: started, played one after the other, and looked at.

python players.py FOLDER     as one rank: plays what FOLDER/studies.json lists
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    named = {name: str(value) for name, value in place.items()}
    return os.environ | named | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}


def start_ranks(world: int, command: list[str], **other: Any) -> list[subprocess.Popen]:
    port = free_port()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes["preexec_fn"] = _hear_ctrl_c
    return [
        subprocess.Popen([sys.executable, *command], env=rank_environment(rank, world, port), **(pipes | other))
        for rank in range(world)
    ]


def _hear_ctrl_c() -> None:
    """Also where whoever started the tests ignores it, as a shell does for what runs in its background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_of(processes: list[subprocess.Popen], seconds: float = 300) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each."""
    try:
        said = [process.communicate(timeout=seconds) for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        raise AssertionError(f"after {seconds} s: {[process.communicate() for process in processes]}") from None
    return [(process.returncode, *some) for process, some in zip(processes, said, strict=True)]


def play_on_ranks(world: int, folder: Path, studies: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Summaries by name; each study's run lies in folder/name. A study with `resume` goes on with what lies there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "studies.json").write_text(json.dumps(studies))
    for code, _, said in end_of(start_ranks(world, [str(Path(__file__)), str(folder)])):
        assert code == 0, said
    return json.loads((folder / "results.json").read_text())


def play_as_rank(folder: Path) -> None:
    import warnings

    import sparing

    warnings.simplefilter("ignore")
    results = {}
    for name, study in json.loads((folder / "studies.json").read_text()).items():
        if "resume" in study:
            result = sparing.resume(study["resume"])
        else:
            key = bytes.fromhex(study.pop("secret")) if "secret" in study else None
            task, method = study.pop("task"), study.pop("method")
            result = sparing.run(task, method, out=folder / name, secret=key, **study)
        results[name] = {"sha256": result.model_sha256, "metrics": [record.metrics for record in result.table]}
    if os.environ["RANK"] == "0":
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    play_as_rank(Path(sys.argv[1]))
