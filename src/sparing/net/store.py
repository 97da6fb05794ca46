"""What a node keeps of one client, in one file that is whole or not there.

A round counts for a client, or it never happened to it. So the file holds the client's state after its last training,
the state before it, and the upload; which of the two states stands is decided by the next letter. Everything is on disk
before the upload leaves.

    idle       settled: the last round that counts, and the state after it
    trained    the same, and beside it a pending round: digest of the letter, state after it, the upload

    >>> import tempfile
    >>> kept = Kept(bytes(16), client=0, n=5, state={"up/w": torch.zeros(1, 2)})
    >>> pending = Pending(round=1, digest=bytes(16), upload=b"abc", state={"up/w": torch.ones(1, 2)})
    >>> kept._replace(pending=pending).resolved(1).state["up/w"].tolist()
    [[1.0, 1.0]]
    >>> kept._replace(pending=pending).resolved(0).state["up/w"].tolist()
    [[0.0, 0.0]]
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparing.core.errors import CheckpointError
from sparing.core.tree import Tree, prefixed, under
from sparing.core.versions import NEVER
from sparing.runs.files.checkpoint import load_checkpoint, save_checkpoint
from sparing.runs.files.lock import FolderLock
from sparing.runs.privacy.secret import ClientSecret
from sparing.storage.atomic import owner_only


class Pending(NamedTuple):
    """A round that this client has trained, and of which it does not know yet whether it counts."""

    round: int
    digest: bytes  # of the letter that asked for it
    upload: bytes
    state: Tree  # after it
    copy: Tree = {}  # noqa: RUF012
    terms: bytes = b""  # of the sum that the upload is for, where uploads are summed under masks


class Kept(NamedTuple):
    """All that is known of one client of a run."""

    run: bytes
    client: int
    n: int
    terms: bytes = b""  # as the server sent them
    secret: ClientSecret | None = None
    settled: int = 0
    state: Tree | None = None  # after round `settled`; None: it has never taken part
    copy: Tree = {}  # noqa: RUF012  the model as it came down in round `held`, where the server broadcasts
    held: int = NEVER
    pending: Pending | None = None

    @property
    def is_untouched(self) -> bool:
        """Whether it has joined and done nothing yet, so that nothing is lost with it."""
        return self.pending is None and self.settled == 0

    def resolved(self, settled: int) -> "Kept":
        """Once the server has said which round of this client counts last."""
        if self.pending is None:
            return self
        if self.pending.round != settled:
            return self._replace(pending=None)
        kept = self._replace(settled=settled, state=self.pending.state, pending=None)
        return kept._replace(copy=self.pending.copy, held=settled) if self.pending.copy else kept


class Store:
    """The folder of one node process, used by it alone: a file for each of its clients."""

    def __init__(self, folder: Path):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot write to {folder} ({error.strerror}); choose another --state") from None
        self.folder, self.lock = folder, FolderLock(folder)

    def close(self) -> None:
        self.lock.release()

    def path(self, client: int) -> Path:
        return self.folder / f"client-{client}.safetensors"

    def clients(self) -> list[int]:
        """Those of which there is something."""
        names = (path.name.removeprefix("client-").removesuffix(".safetensors") for path in self.folder.iterdir())
        return sorted(int(name) for name in names if name.isdecimal())

    def load(self, client: int) -> Kept | None:
        path = self.path(client)
        if not path.exists():
            return None
        kept = _kept_from(*load_checkpoint(path))
        if kept.client != client:
            raise CheckpointError(f"{path} holds the state of client {kept.client}; give it back its name")
        return kept

    def save(self, kept: Kept) -> None:
        """On return it is durably there; a full disk leaves what was there before."""
        self.lock.check()
        tensors, meta = _tensors_of(kept)
        with owner_only():
            save_checkpoint(self.path(kept.client), tensors, meta)


def _tensors_of(kept: Kept) -> tuple[Tree, dict[str, Any]]:
    tensors = prefixed("state", kept.state or {}) | prefixed("copy", kept.copy) | {"terms": _as_tensor(kept.terms)}
    meta: dict[str, Any] = {
        "run": kept.run.hex(),
        "client": kept.client,
        "n": kept.n,
        "settled": kept.settled,
        "met": kept.state is not None,
        "held": kept.held,
    }
    if kept.secret is not None:
        tensors |= {f"secret/{name}": _as_tensor(key) for name, key in kept.secret._asdict().items()}
    if kept.pending is not None:
        there = kept.pending
        meta["pending"] = {"round": there.round, "digest": there.digest.hex()}
        tensors |= prefixed("after", there.state) | prefixed("after copy", there.copy)
        tensors |= {"upload": _as_tensor(there.upload), "sum": _as_tensor(there.terms)}
    return tensors, meta


def _kept_from(tensors: Tree, meta: dict[str, Any]) -> Kept:
    secret = {name: _as_bytes(key) for name, key in under("secret", tensors).items()}
    pending = None
    if "pending" in meta:
        pending = Pending(
            meta["pending"]["round"],
            bytes.fromhex(meta["pending"]["digest"]),
            _as_bytes(tensors["upload"]),
            under("after", tensors),
            under("after copy", tensors),
            _as_bytes(tensors["sum"]) if "sum" in tensors else b"",
        )
    return Kept(
        bytes.fromhex(meta["run"]),
        meta["client"],
        meta["n"],
        _as_bytes(tensors["terms"]),
        ClientSecret(**secret) if secret else None,
        meta["settled"],
        under("state", tensors) if meta["met"] else None,
        under("copy", tensors),
        meta["held"],
        pending,
    )


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _as_bytes(x: Tensor) -> bytes:
    return x.numpy().tobytes()
