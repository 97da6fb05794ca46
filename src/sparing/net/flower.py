"""Flower as the carrier: writes the app folder that `flwr run` submits. Nothing here imports flwr.

The files of the app run in an environment of Flower's own and pass opaque bytes: relay.py (the ServerApp) between
the SuperLink and `sparing serve`, shim.py (the ClientApp) between a SuperNode and `sparing join`.
"""

import json
import os
from importlib.resources import files
from pathlib import Path

from sparing.core.errors import ConfigError
from sparing.net.local_sockets import LONGEST_PATH
from sparing.storage.atomic import write_atomic

APP_FILES = ("pieces.py", "relay.py", "shim.py")
TASK_COMMANDS = ("clientapp", "agentapp", "connector", "model", "serverapp", "simulation")
MOST_BYTES = 2**31


def write_app(
    folder: str | Path,
    socket: str | Path,
    most_bytes: int = MOST_BYTES,
    pullers: int = 4,
    node_sockets: str | None = None,
) -> Path:
    """The Flower app in `folder`, whose relay connects to `sparing serve` at `socket`; `flwr run FOLDER` submits it.

    `pullers` replies are fetched at a time, none above `most_bytes`. `node_sockets`, such as `run/node{}.sock`, is for
    Flower's own simulation: where the node of each client listens.
    """
    folder, template = Path(folder), files("sparing.net") / "flower_app"
    settings = {"socket": str(check_socket(socket)), "most_bytes": int(most_bytes), "pullers": int(pullers)}
    if node_sockets is not None:
        if "{}" not in node_sockets:
            raise ConfigError(f"the nodes' sockets are {node_sockets!r}, without {{}} for the number of the client")
        settings["node-sockets"] = str(check_socket(node_sockets))
    _refuse_foreign(folder, template.joinpath("pyproject.toml").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    for name in APP_FILES:
        write_atomic(folder / name, template.joinpath(name).read_bytes())
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in settings.items()]
    whole = template.joinpath("pyproject.toml").read_text() + "".join(lines)
    write_atomic(folder / "pyproject.toml", whole.encode())
    return folder


def write_node_commands(folder: str | Path, flower: str | Path) -> Path:
    """Commands that a SuperNode finds first where `folder` stands first in its PATH: it runs the shim and no other app.

    `flower` is the folder of Flower's own commands, of which the Python is used.
    """
    folder, template, python = Path(folder), files("sparing.net") / "flower_app", Path(flower).absolute() / "python"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("pieces.py", "shim.py"):
        write_atomic(folder / name, template.joinpath(name).read_bytes())
    whole = f"#!{python}\n{template.joinpath('own_clientapp.py').read_text()}"
    for name in TASK_COMMANDS:
        write_atomic(folder / f"flwr-{name}", whole.encode())
        (folder / f"flwr-{name}").chmod(0o755)
    return folder


def check_socket(path: str | Path) -> Path:
    """The absolute path of a unix socket, refused where the system cannot bind it.

    >>> check_socket("/tmp/serve.sock").name
    'serve.sock'
    """
    path = Path(path).expanduser().absolute()
    length = len(os.fsencode(path))
    if length > LONGEST_PATH:
        raise ConfigError(
            f"the socket {path} has a path of {length} bytes, and a unix socket takes {LONGEST_PATH}: "
            "choose a shorter folder"
        )
    return path


def _refuse_foreign(folder: Path, template: str) -> None:
    """Only a folder that is empty, or an app of ours, is written to."""
    project = folder / "pyproject.toml"
    if project.exists() and project.read_text().splitlines()[:1] != template.splitlines()[:1]:
        raise ConfigError(f"{project} belongs to another project: name a folder that is empty or not there yet")
