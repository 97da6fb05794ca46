"""Tell a SuperLink that a SuperNode is gone, with its own key: one that was killed is taken for connected for a minute.

.venv-flower/bin/python benchmarks/federation_release.py ADDRESS CA KEY NODE_ID        (with the Python of flwr 1.41)
"""

import contextlib
import sys
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor


def main(address: str, authority: str, key_file: str, node_id: str) -> None:
    key = load_ssh_private_key(Path(key_file).read_bytes(), None)
    signed = NodeAuthHttpInterceptor(key, key.public_key())
    client = FleetHttpClient.from_server_address(address, False, authority, interceptors=[signed])
    with client, contextlib.suppress(httpx.HTTPStatusError):  # where it was not connected
        client.DeactivateNode(DeactivateNodeRequest(node_id=int(node_id)))


if __name__ == "__main__":
    main(*sys.argv[1:])
