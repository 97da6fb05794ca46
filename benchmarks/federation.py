"""A federation on this machine, from the first certificate to the last process: `make federation`.

python benchmarks/federation.py [--nodes 4] [--flower .venv-flower/bin] [--sizes 1000 45000000]
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from federation_processes import Federation

ROOT = Path(__file__).parents[1]
STUBS = ROOT / "tests" / "net" / "flower_stubs.py"


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--nodes", type=int, default=4)
    options.add_argument("--flower", type=Path, default=ROOT / ".venv-flower" / "bin")
    options.add_argument("--sizes", nargs="+", default=["1000", "1000", "45000000"])
    args = options.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def serve(federation: Federation) -> list[str]:
        return [sys.executable, str(STUBS), "serve", str(federation.server_socket), str(args.nodes), *args.sizes]

    def join(federation: Federation, number: int) -> list[str]:
        return [sys.executable, str(STUBS), "node", str(federation.node_socket(number))]

    with (
        tempfile.TemporaryDirectory(prefix="fed-", ignore_cleanup_errors=True) as folder,
        Federation(Path(folder), args.flower, serve, join) as federation,
    ):
        federation.begin(args.nodes)
        status = federation.wait_for_server(timeout=600)
        print(federation.log("server").read_text(), end="")
    sys.exit(status)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
