"""Checkpoints: a run's tensors and what it knows about itself, in one safetensors file that is whole or refused.

The file is streamed in both directions, so a checkpoint costs no second copy of its tensors. Two SHA-256 digests
stand in its header: `data` over the bytes of all tensors, and `head` over the header itself (names, shapes, meta and
`data`), which stands first so that nothing is interpreted before it is known to be unaltered.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(f"{folder}/last.safetensors", {"w": torch.ones(2)}, {"round": 7})
    ...     load_checkpoint(f"{folder}/last.safetensors")
    ({'w': tensor([1., 1.])}, {'round': 7})
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sparing.core.errors import CheckpointError
from sparing.core.tree import Tree
from sparing.storage.atomic import replace_file

_FORMAT_VERSION = "4"
_BLANK_DIGEST = "0" * 64
_HEADER_OPENING = b'{"__metadata__":{"head":"'
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def save_checkpoint(path: str | Path, tensors: Tree, meta: dict[str, Any]) -> None:
    """Replaces the checkpoint at `path`; on return it is durably there.

    `meta` is plain JSON: its keys are text, its tuples come back as lists.
    """
    entries = _tensor_entries(tensors)
    text = _meta_as_json(meta)
    try:
        with replace_file(path) as file:
            file.write(_checkpoint_header(entries, text, _BLANK_DIGEST))  # its length is final, its digests are not
            digest = hashlib.sha256()
            for name in _names_by_offset(entries):
                data = _tensor_bytes(tensors[name].detach().cpu().contiguous())
                digest.update(data)
                file.write(data)
            file.seek(0)
            file.write(_checkpoint_header(entries, text, digest.hexdigest()))
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {path} could not be written ({error.strerror}); the one before it is untouched: "
            "free some space or choose another folder, then resume"
        ) from error


def load_checkpoint(path: str | Path) -> tuple[Tree, dict[str, Any]]:
    """The tensors, on the CPU and in the order they were given, and the meta. Every bit is checked."""
    try:
        with open(path, "rb") as file:
            return _read_checkpoint(file, path)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {path}; check the folder, or start the run afresh") from None
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be read ({error.strerror}); check its permissions and its disk"
        ) from error


def _read_checkpoint(file: BinaryIO, path: str | Path) -> tuple[Tree, dict[str, Any]]:
    head = read_checkpoint_header(file, path)
    known = head.pop("__metadata__")
    if known["version"] != _FORMAT_VERSION:
        raise CheckpointError(
            f"the checkpoint {path} has format {known['version']}, this release reads format {_FORMAT_VERSION}; "
            "resume with the release that wrote it"
        )
    size = max((entry["data_offsets"][1] for entry in head.values()), default=0)
    found = os.fstat(file.fileno()).st_size - file.tell()
    if found != size:
        raise _altered_checkpoint(path, f"{found} bytes of tensors where {size} were written")
    digest = hashlib.sha256()
    tensors = {}
    for name in _names_by_offset(head):
        tensors[name] = torch.empty(head[name]["shape"], dtype=_DTYPES[head[name]["dtype"]])
        data = _tensor_bytes(tensors[name])
        file.readinto(data)  # type: ignore[attr-defined]
        digest.update(data)
    if digest.hexdigest() != known["data"]:
        raise _altered_checkpoint(path, "the tensors do not match their digest")
    return {name: tensors[name] for name in head}, json.loads(known["meta"])


def read_checkpoint_header(file: BinaryIO, path: str | Path) -> dict[str, Any]:
    """The header, parsed only after its digest agreed."""
    size = int.from_bytes(file.read(8), "little")
    if size > os.fstat(file.fileno()).st_size:
        raise _altered_checkpoint(path, "the header is cut off")
    head = file.read(size)
    start, end = len(_HEADER_OPENING), len(_HEADER_OPENING) + len(_BLANK_DIGEST)
    if not head.startswith(_HEADER_OPENING) or len(head) != size:
        raise _altered_checkpoint(path, "the header is not one that sparing writes")
    if hashlib.sha256(head[:start] + _BLANK_DIGEST.encode() + head[end:]).hexdigest().encode() != head[start:end]:
        raise _altered_checkpoint(path, "the header does not match its digest")
    return json.loads(head)


def _checkpoint_header(entries: dict[str, Any], meta: str, data: str) -> bytes:
    """Length and JSON header, padded so that the tensors are aligned; the same length whatever the digests."""
    known = {"head": _BLANK_DIGEST, "data": data, "version": _FORMAT_VERSION, "meta": meta}
    text = json.dumps({"__metadata__": known, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = hashlib.sha256(text).hexdigest().encode()
    start, end = len(_HEADER_OPENING), len(_HEADER_OPENING) + len(_BLANK_DIGEST)
    return len(text).to_bytes(8, "little") + text[:start] + head + text[end:]


def _tensor_entries(tensors: Tree) -> dict[str, Any]:
    """Dtype, shape and place of every tensor in the data; wide dtypes first, so that each is aligned."""
    entries: dict[str, Any] = dict.fromkeys(tensors)
    end = 0
    for name in sorted(tensors, key=lambda name: -tensors[name].element_size()):
        x = tensors[name]
        if name == "__metadata__":
            raise CheckpointError(f"safetensors keeps the name {name!r} for itself; give that tensor another one")
        if x.dtype not in _DTYPE_CODES:
            raise CheckpointError(
                f"tensor {name!r} has dtype {x.dtype}, which a checkpoint cannot hold; known: {', '.join(_DTYPES)}"
            )
        start, end = end, end + x.numel() * x.element_size()
        entries[name] = {"dtype": _DTYPE_CODES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    return entries


def _names_by_offset(entries: dict[str, Any]) -> list[str]:
    return sorted(entries, key=lambda name: entries[name]["data_offsets"])


def _tensor_bytes(x: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    return x.reshape(-1).view(torch.uint8).numpy().data if x.numel() else memoryview(bytearray())


def _meta_as_json(meta: dict[str, Any]) -> str:
    try:
        return json.dumps(meta)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"a checkpoint's meta must be plain JSON ({error}); put tensors in `tensors`") from error


def _altered_checkpoint(path: str | Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} is cut short or altered: {what}; resume from another copy of it, or start afresh"
    )
