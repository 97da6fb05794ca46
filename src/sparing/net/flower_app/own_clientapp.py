"""`flwr-clientapp` for a SuperNode of sparing: runs the shim beside this file, whatever app the SuperLink sends.

Flower's own command installs and imports the app of the run, so that whoever may submit a run has their code run on
every node. First on the SuperNode's PATH, this one never unpacks it. It also starts in half the time, as it imports
less. It replaces names of flwr 1.41 from outside, and ends where one of them is missing.
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from flwr.common.args import add_args_flwr_app_common, try_obtain_flwr_app_token
from flwr.supercore.tls import validate_and_resolve_root_certificates

HERE = Path(__file__).resolve().parent


def main() -> None:
    if Path(sys.argv[0]).name != "flwr-clientapp":
        sys.exit(f"{Path(sys.argv[0]).name}: this SuperNode answers letters of sparing and runs no app of others")
    parser = argparse.ArgumentParser()
    parser.add_argument("--runtime-api-address", required=True)
    add_args_flwr_app_common(parser)
    args = parser.parse_args()
    runtime = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    replace_name(runtime, "install_from_fab", lambda *_, **__: None)
    replace_name(runtime, "get_project_dir", lambda *_: HERE)
    replace_name(runtime, "get_load_client_app_fn", lambda **_: load_shim)
    trusted = validate_and_resolve_root_certificates(args.root_certificates, args.insecure)
    token = try_obtain_flwr_app_token(args)
    runtime.run_clientapp(args.runtime_api_address, token, args.insecure, trusted, args.parent_pid)


def replace_name(module: object, name: str, by: Callable) -> None:
    if not hasattr(module, name):
        sys.exit(f"flwr has no {name} any more, which keeps apps of others out: install flwr 1.41.0")
    setattr(module, name, by)


def load_shim(*_: str) -> object:
    sys.path.insert(0, str(HERE))
    return importlib.import_module("shim").app


if __name__ == "__main__":
    main()
