"""Who is not let in: a SuperNode with an unknown key, none, a revoked one, another authority, or no TLS.

python benchmarks/federation_refusals.py [--flower .venv-flower/bin]
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from federation_keys import write_authority, write_node_key
from federation_processes import Federation

ROOT = Path(__file__).parents[1]
NOBODY = [sys.executable, "-c", "import time; time.sleep(3600)"]
PATIENCE = 25.0  # seconds in which an honest node has long been connected


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--flower", type=Path, default=ROOT / ".venv-flower" / "bin")
    args = options.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="fed-", ignore_cleanup_errors=True) as folder,
        Federation(Path(folder), args.flower, lambda _: NOBODY, lambda *_: NOBODY) as federation,
    ):
        federation.start_superlink()
        federation.register(0)
        federation.start_supernode(0)
        print(f"an honest node        connected: {connects(federation, 'supernode0', 0)}")
        refused = [not attempt(federation, what, make) for what, make in strangers(federation).items()]
        refused.append(not revoked(federation))
    print(f"{sum(refused)} of {len(refused)} refused")
    return 0 if all(refused) else 1


def strangers(federation: Federation) -> dict[str, Callable[[], list[str]]]:
    keys = federation.folder / "keys"
    other = keys / "other"
    other.mkdir()
    write_authority(other)
    wrong = write_node_key(keys, "wrong")
    plain = federation.supernode_command(7)
    at = plain.index("--root-certificates")
    without_key = plain[: plain.index("--auth-supernode-private-key")] + plain[plain.index("--superlink") :]
    return {
        "wrong key": lambda: federation.supernode_command(7, key=wrong),
        "missing key": lambda: without_key,
        "wrong authority": lambda: federation.supernode_command(7, key=federation.key(0), ca="other/ca.pem"),
        "plaintext": lambda: [*without_key[:at], "--insecure", *without_key[at + 2 :]],
    }


def attempt(federation: Federation, what: str, make: Callable[[], list[str]]) -> bool:
    federation.start("supernode7", make())
    let_in = connects(federation, "supernode7", PATIENCE)
    print(f"{what:21} connected: {let_in}   {federation.last_line('supernode7')[:90]}", flush=True)
    federation.kill("supernode7")
    return let_in


def revoked(federation: Federation) -> bool:
    """The honest node, once its key counts no more."""
    federation.unregister(0)
    federation.processes["supernode0"].wait(60)
    federation.start("supernode0", federation.supernode_command(0))
    let_in = connects(federation, "supernode0", PATIENCE)
    print(f"{'revoked key':21} connected: {let_in}   {federation.last_line('supernode0')[:90]}", flush=True)
    return let_in


def connects(federation: Federation, name: str, patience: float) -> bool:
    end = time.monotonic() + patience
    while "SuperNode ID" not in federation.said(name):
        if time.monotonic() > end or federation.processes[name].poll() is not None:
            return "SuperNode ID" in federation.said(name)
        time.sleep(0.3)
    return True


if __name__ == "__main__":
    sys.exit(main())
