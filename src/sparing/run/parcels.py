"""Parcels kept as files, to be looked at: the bytes as they travelled, and beside them what a receiver knew.

parcels/round-0003/client-00017-up.spar            the parcel
parcels/round-0003/client-00017-up.schema          its schema, in the safetensors format: free scopes, the rest as JSON
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sparing.core.errors import DataError
from sparing.core.keys import Ctx
from sparing.core.parcel import Schema, Spec
from sparing.engines.engine import Post


def keeping(folder: Path) -> Post:
    """Every parcel of a run goes into this folder."""

    def post(ctx: Ctx, way: str, data: bytes, schema: Schema) -> None:
        home = folder / f"round-{ctx.round:04d}"
        home.mkdir(parents=True, exist_ok=True)
        save(home / f"client-{int(ctx.ids[0]):05d}-{way}.spar", data, schema)

    return post


def save(path: Path, data: bytes, schema: Schema) -> None:
    path.write_bytes(data)
    scopes = {name: spec.scope for name, spec in schema.leaves.items() if spec.scope is not None and not spec.told}
    leaves = {
        name: spec._replace(scope=None, dtype=str(spec.dtype).removeprefix("torch."))._asdict()  # pyright: ignore
        for name, spec in schema.leaves.items()
    }
    text = json.dumps({"leaves": leaves, "notes": schema.notes, "about": schema.about})
    save_file({name: mask.cpu().contiguous() for name, mask in scopes.items()}, beside(path), {"schema": text})


def load(path: Path) -> tuple[bytes, Schema | None]:
    """The bytes in a file, and the schema where one lies beside it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; give the file of a parcel") from error
    return data, schema_in(beside(path)) if beside(path).exists() else None


def schema_in(path: Path) -> Schema:
    try:
        with safe_open(path, "pt") as file:
            text = json.loads(file.metadata()["schema"])
            scopes = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        leaves = {
            name: Spec(
                **{
                    **about,
                    "shape": tuple(about["shape"]),
                    "grains": tuple(map(tuple, about["grains"])),
                    "dtype": getattr(torch, about["dtype"]),
                    "scope": scopes.get(name),
                }
            )
            for name, about in text["leaves"].items()
        }
        return Schema(leaves, text["notes"], text["about"])
    except (SafetensorError, OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(
            f"{path} is not the schema of a parcel ({error}); delete it to see the parcel without"
        ) from error


def beside(path: Path) -> Path:
    return path.with_suffix(".schema")
