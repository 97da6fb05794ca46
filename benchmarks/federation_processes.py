"""A whole federation on this machine: a SuperLink with TLS, node keys and a database, SuperNodes, what is resident.

    with Federation(Path("/tmp/fed"), flower=Path(".venv-flower/bin"), serve=..., join=...) as federation:
        federation.begin(nodes=4)
        federation.wait_for_server(timeout=600)

Everything listens on 127.0.0.1 alone. Every process started here has a log in `logs/` and carries the folder's name in
its environment, and so have those that Flower starts from it: `stop` ends what is left of them by their ids.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from federation_keys import write_authority, write_node_key, write_server_certificate

from sparing.net.flower import check_socket, write_app, write_node_commands

MARK = "SPARING_FEDERATION"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}


class Federation:
    """Processes by name: `superlink`, `supernode0`, ..., `node0`, ... and `server`, the resident ones.

    `serve(federation)` and `join(federation, number)` give the command lines of the resident processes, which listen on
    `federation.server_socket` and `federation.node_socket(number)`.
    """

    def __init__(
        self,
        folder: Path,
        flower: Path,
        serve: Callable[["Federation"], list[str]],
        join: Callable[["Federation", int], list[str]],
        most_bytes: int = 2**31,
    ) -> None:
        self.folder, self.flower = Path(folder).absolute(), Path(flower).absolute()
        self.serve, self.join, self.most_bytes = serve, join, most_bytes
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports: dict[str, int] = {}
        self.node_ids: dict[int, str] = {}
        self.began: dict[str, int] = {}
        self.server_socket = check_socket(self.folder / "serve.sock")
        self._write_keys()

    def __enter__(self) -> "Federation":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def node_socket(self, number: int) -> Path:
        return self.folder / f"node{number}.sock"

    def key(self, number: int) -> Path:
        return self.folder / "keys" / f"node{number}"

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port('superlink')}"

    def begin(self, nodes: int) -> str:
        """All of it, in order; the number of the run at the SuperLink."""
        self.start_superlink()
        for number in range(nodes):
            self.register(number)
        for number in range(nodes):
            self.start_node(number)
            self.start_supernode(number, wait=False)
        for number in range(nodes):
            self.wait_for_supernode(number)
        self.start_server()
        return self.submit()

    def start_superlink(self) -> None:
        keys, port = self.folder / "keys", self.port("superlink")
        tls = ["--ssl-ca-certfile", "ca.pem", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
        tls = [word if word.startswith("--") else str(keys / word) for word in tls]
        where = ["--host", "127.0.0.1", "--port", str(port), "--database", str(self.folder / "superlink.db")]
        command = [str(self.flower / "flower-superlink"), *tls, *where, "--enable-supernode-auth"]
        self.start("superlink", command)
        self._wait("the SuperLink", 60, lambda: self._listens(port), "superlink")

    def register(self, number: int) -> str:
        """The node id that Flower gives to this node's key."""
        if not self.key(number).exists():
            write_node_key(self.folder / "keys", f"node{number}")
        said = self.flwr("supernode", "register", f"{self.key(number)}.pub", "federation")
        self.node_ids[number] = str(said["node-id"])
        return self.node_ids[number]

    def unregister(self, number: int) -> None:
        """The node's key counts no more, whatever its SuperNode does."""
        self.flwr("supernode", "unregister", self.node_ids[number], "federation")

    def start_supernode(self, number: int, wait: bool = True, patience: float = 90.0) -> None:
        """After a SIGKILL the SuperLink takes a node for connected for up to a minute, and refuses it until then."""
        self.start(f"supernode{number}", self.supernode_command(number))
        if wait:
            self.wait_for_supernode(number, patience)

    def supernode_command(self, number: int, key: Path | None = None, ca: str = "ca.pem") -> list[str]:
        settings = f'socket="{self.node_socket(number)}" most_bytes={self.most_bytes}'
        trust = ["--root-certificates", str(self.folder / "keys" / ca)]
        trust += ["--auth-supernode-private-key", str(key or self.key(number))]
        where = ["--superlink", self.address, "--host", "127.0.0.1", "--port", str(self.port(f"supernode{number}"))]
        return [str(self.flower / "flower-supernode"), *trust, *where, "--node-config", settings]

    def wait_for_supernode(self, number: int, patience: float = 90.0) -> None:
        """Until it is connected; one that ended, as it was refused, is started again."""
        name, limit = f"supernode{number}", time.monotonic() + patience
        while "SuperNode ID" not in self.said(name):
            if time.monotonic() > limit:
                raise TimeoutError(f"{name} is not connected after {patience:.0f} s: {self.last_line(name)}")
            if self.processes[name].poll() is not None:
                time.sleep(2.0)
                self.start(name, self.supernode_command(number))
            time.sleep(0.2)

    def release(self, number: int) -> None:
        """After a SIGKILL of its SuperNode: the SuperLink learns that it is gone, and takes it again at once."""
        script = Path(__file__).with_name("federation_release.py")
        where = [self.address, str(self.folder / "keys" / "ca.pem"), str(self.key(number)), self.node_ids[number]]
        command = [str(self.flower / "python"), str(script), *where]
        subprocess.run(command, env=self.environment("cli"), capture_output=True, timeout=60, check=True)

    def start_node(self, number: int) -> None:
        self.start(f"node{number}", self.join(self, number))

    def start_server(self) -> None:
        self.start("server", self.serve(self))

    def submit(self) -> str:
        """Hand the app to the SuperLink: the number of the run."""
        app = write_app(self.folder / "app", self.server_socket, self.most_bytes)
        return str(self.flwr("run", str(app), "federation")["run-id"])

    def wait_for_server(self, timeout: float) -> int:
        """The exit status of the resident server."""
        return self.processes["server"].wait(timeout)

    def flwr(self, *words: str) -> dict:
        """What a command of `flwr` says, as it says it with --format json."""
        command = [str(self.flower / "flwr"), *words, "--format", "json"]
        done = subprocess.run(command, env=self.environment("cli"), capture_output=True, text=True, timeout=120)
        try:
            said = json.loads(done.stdout)
        except json.JSONDecodeError:
            said = {}
        if done.returncode or not said.get("success", True):
            raise RuntimeError(f"flwr {' '.join(words[:2])} failed: {said.get('error-message') or done.stderr[-500:]}")
        return said

    def start(self, name: str, command: list[str]) -> None:
        """A process in a session of its own, so that Ctrl-C reaches it only through `stop`."""
        self.log(name).parent.mkdir(exist_ok=True)
        with open(self.log(name), "ab") as log:
            self.began[name] = log.tell()
            self.processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(name),
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """SIGKILL, as a machine that fails; what Flower started from it notices within a second."""
        self.processes[name].kill()
        self.processes[name].wait()

    def end(self, name: str, patience: float = 10.0) -> None:
        """SIGTERM, then SIGKILL."""
        self.processes[name].terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[name].wait(patience)
            return
        self.kill(name)

    def stop(self, patience: float = 10.0) -> None:
        """Everything that was started from here ends, children of children too: SIGTERM, then SIGKILL by their ids."""
        try:
            for process in self.processes.values():
                process.terminate()
            limit = time.monotonic() + patience
            while self.left_over() and time.monotonic() < limit:
                time.sleep(0.1)
        finally:
            while left := self.left_over():
                for number in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(number, signal.SIGKILL)
                time.sleep(0.1)

    def left_over(self) -> list[int]:
        """Ids of processes that carry this folder's mark; without /proc, those started from here."""
        running = [process.pid for process in self.processes.values() if process.poll() is None]
        if not Path("/proc/self/environ").exists():
            return running
        mark = f"{MARK}={self.folder}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
        return found

    def cpu_seconds(self) -> float:
        """Of all processes of the federation, those that have ended and were waited for by one of them included."""
        ticks = 0
        for number in self.left_over():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def environment(self, name: str) -> dict[str, str]:
        """Flower's folder is one per process, and nothing asks for the world outside."""
        kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        home = self.folder / "home" / name
        home.mkdir(parents=True, exist_ok=True)
        if name == "cli":
            (home / "config.toml").write_text(self._connection())
        own = [write_node_commands(self.folder / "commands", self.flower)] if name.startswith("supernode") else []
        path = os.pathsep.join(map(str, [*own, self.flower, kept.get("PATH", "")]))
        return {**kept, **QUIET, MARK: str(self.folder), "FLWR_HOME": str(home), "PATH": path}

    def port(self, name: str) -> int:
        """A port of 127.0.0.1 that was free when it was first asked for."""
        if name not in self.ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.ports[name] = probe.getsockname()[1]
        return self.ports[name]

    def said(self, name: str) -> str:
        """What the log holds since the process was last started."""
        return self.log(name).read_bytes()[self.began[name] :].decode(errors="replace")

    def last_line(self, name: str) -> str:
        lines = [line for line in self.said(name).splitlines() if line.strip()]
        return lines[-1] if lines else "its log is empty"

    def _connection(self) -> str:
        ca = self.folder / "keys" / "ca.pem"
        where = f'address = "{self.address}"\nroot-certificates = "{ca}"\n'
        return f'[superlink]\ndefault = "federation"\n\n[superlink.federation]\n{where}'

    def _write_keys(self) -> None:
        keys = self.folder / "keys"
        if not (keys / "server.key").exists():
            keys.mkdir(parents=True, exist_ok=True)
            write_server_certificate(keys, write_authority(keys))

    def _listens(self, port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def _wait(self, what: str, timeout: float, ready: Callable[[], bool], name: str) -> None:
        limit = time.monotonic() + timeout
        while not ready():
            if self.processes[name].poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"{what} did not start: {self.last_line(name)} (all of it in {self.log(name)})")
            time.sleep(0.1)
