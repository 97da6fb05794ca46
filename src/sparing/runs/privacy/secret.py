"""The secret of a run: 256 bits from the operating system, and for every draw a stream of its own.

    key   = HKDF-SHA256(secret, salt: the run, info: round, client, tag, SHA-256 of the values that get the noise)
    words = ChaCha20(key)

The same values get the same noise, so that a resumed run ends at the same bits. Other values get unrelated noise:
the same noise on two different sums would come off by subtraction. A client draws from a secret of its own, in a
simulation derived from the run's. What a receiver must draw again, without knowing the values, comes from a key that
the server derives from the run's secret and gives to that client.

The secret lies in a file that only its owner may read, and is deleted when the run ends. A checkpoint holds a
commitment to it, from which nothing of it can be learned; the commitment also names the run.
"""

import hashlib
import hmac
import json
import os
import secrets
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparing.core.context import EVERYONE, Ctx
from sparing.core.errors import CheckpointError, ConfigError
from sparing.core.tree import flat
from sparing.runs.files.lock import FolderLock
from sparing.storage.atomic import os_errors_as_checkpoint_error, sync_folder

SECRET_FILE = "secret.key"
_SECRET_BYTES = 32


class Secret:
    """Gives secret words, and remembers for which values, until the round is released."""

    def __init__(self, key: bytes | None = None):
        self.key = secrets.token_bytes(_SECRET_BYTES) if key is None else key
        if len(self.key) != _SECRET_BYTES:
            raise ConfigError(
                f"a secret has {_SECRET_BYTES} bytes, but {len(self.key)} were given; use secrets.token_bytes"
            )
        self.commitment = hashlib.sha256(b"sparing/secret/" + self.key).hexdigest()
        self.drawn: dict[tuple[int, int], dict[str, str]] = {}  # (round, client) -> tag -> digest of the values

    def words(self, ctx: Ctx, tag: str, n: int, values: Tensor | None = None) -> Tensor:
        """`[K, n]` for these values `[K, ...]`; without values, what both ends can draw."""
        ids = ctx.ids.tolist()
        rows = [None] * len(ids) if values is None else flat(values).detach().cpu().contiguous().numpy()
        words = np.stack([self.row(ctx.round, who, tag, n, row) for who, row in zip(ids, rows, strict=True)])
        return torch.from_numpy(words.view(np.int64)).to(ctx.device)

    def row(self, t: int, who: int, tag: str, n: int, values: np.ndarray | None) -> np.ndarray:
        digest = "" if values is None else hashlib.sha256(values.data).hexdigest()
        if digest:
            self.drawn.setdefault((t, who), {})[tag] = digest
        if who != EVERYONE:
            return self.of_client(who).row(t, who, tag, n, digest)
        return _key_stream(self.derived(self.key, t, who, tag, digest), n)

    def of_client(self, who: int) -> "ClientSecret":
        """What this client draws from in a simulation."""
        own, shared = (self.derived(self.key, whose, who) for whose in ("client", "client and server"))
        return ClientSecret(own, shared, bytes.fromhex(self.commitment))

    def cohort(self, t: int, n: int) -> np.ndarray:
        """n words by which the clients of round t are chosen."""
        return _key_stream(self.derived(self.key, t, EVERYONE, "cohort", ""), n)

    def derived(self, key: bytes, *about: str | int) -> bytes:
        return _derived_key(key, bytes.fromhex(self.commitment), *about)

    def released(self, t: int) -> dict[int, str]:
        """By client, one digest of all values that got noise in round t; they are forgotten here.

        It is keyed: from a plain one, whoever can guess the values before the noise could tell that the guess is right.
        """
        whose = sorted(who for round, who in self.drawn if round == t)
        told = {who: json.dumps(sorted(self.drawn.pop((t, who)).items())) for who in whose}
        key = self.derived(self.key, "releases")
        return {who: hmac.new(key, text.encode(), hashlib.sha256).hexdigest() for who, text in told.items()}


class ClientSecret(NamedTuple):
    """What one client draws from: a key of its own, and one that the server has too."""

    own: bytes
    shared: bytes
    salt: bytes

    def words(self, ctx: Ctx, tag: str, n: int, values: Tensor | None = None) -> Tensor:
        """As `Secret.words`, for this client alone (K = 1)."""
        digest = ""
        if values is not None:
            digest = hashlib.sha256(flat(values).detach().cpu().contiguous().numpy()[0].data).hexdigest()
        words = self.row(ctx.round, int(ctx.ids[0]), tag, n, digest)
        return torch.from_numpy(words.view(np.int64)[None]).to(ctx.device)

    def row(self, t: int, who: int, tag: str, n: int, digest: str) -> np.ndarray:
        """By the digest of the values; without one, what the server can draw too: it does not know this salt."""
        key, salt = (self.own, self.salt) if digest else (self.shared, b"")
        return _key_stream(_derived_key(key, salt, t, who, tag, digest), n)


def new_client_secret(shared: bytes) -> ClientSecret:
    """Of a client on a machine of its own; `shared` came from the server."""
    own = secrets.token_bytes(_SECRET_BYTES)
    return ClientSecret(own, shared, hashlib.sha256(b"sparing/secret/" + own).digest())


def _derived_key(key: bytes, salt: bytes, *about: str | int) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), _SECRET_BYTES, salt=salt, info=json.dumps(about).encode()).derive(key)


def _key_stream(key: bytes, n: int) -> np.ndarray:
    """The first n words of 64 bits of a key's stream; every key is used for one stream only."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    data = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * n))
    return np.frombuffer(data, "<u8").astype(np.uint64)


def write_secret(folder: Path, secret: Secret) -> None:
    """Write it, durably, where only this user can read it."""
    path = folder / SECRET_FILE
    with os_errors_as_checkpoint_error(path):
        path.unlink(missing_ok=True)  # of a run that never began
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(secret.key)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)


def read_secret(folder: Path) -> bytes | None:
    """The secret in a run folder, if it is there."""
    path = folder / SECRET_FILE
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); only the owner of the run may") from None
    if len(key) != _SECRET_BYTES:
        raise CheckpointError(f"{path} has {len(key)} bytes where a secret has {_SECRET_BYTES}; restore it from a copy")
    return key


def delete_secret(folder: Path) -> bool:
    """Whether there was one to delete."""
    path = folder / SECRET_FILE
    if not path.exists():
        return False
    with os_errors_as_checkpoint_error(path):
        path.unlink()
        sync_folder(folder)
    return True


def forget_secret(folder: str | Path) -> bool:
    """Delete the secret of a run that is not under way."""
    lock = FolderLock(Path(folder))
    try:
        return delete_secret(Path(folder))
    finally:
        lock.release()


def refuse_other_secret(secret: Secret, key: bytes | None, commitment: str, folder: Path) -> None:
    """A run goes on with the secret it began with, or not at all: other noise on the same values would take it off."""
    if key is None:
        raise CheckpointError(
            f"{folder / SECRET_FILE} is missing, and without it this run cannot go on; restore it, or start a new run"
        )
    if secret.commitment != commitment:
        raise CheckpointError(
            f"{folder / SECRET_FILE} is not the secret that this run began with; restore that one, or start a new run"
        )
