"""Parcels kept as files, to be looked at: the bytes as they travelled, and beside them what a receiver knew.

parcels/round-0003/client-00017-up.spar            the parcel; a download may be several, one behind the other
parcels/round-0003/client-00017-up.schema          their schemas, in the safetensors format: free scopes, NUMBER/NAME,
                                                   the rest as JSON
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sparing.core.context import Ctx
from sparing.core.errors import DataError
from sparing.core.parcel import Schema, Spec
from sparing.core.tree import Tree, under
from sparing.engines.engine import Post


def keep_parcels(folder: Path, release: Callable[[int], None] = lambda t: None) -> Post:
    """Every parcel of a run goes into this folder; `release(round)` is told before one does."""

    def post(ctx: Ctx, way: str, data: bytes, schemas: list[Schema]) -> None:
        release(ctx.round)
        home = folder / f"round-{ctx.round:04d}"
        home.mkdir(parents=True, exist_ok=True)
        _save_parcel(home / f"client-{int(ctx.ids[0]):05d}-{way}.spar", data, schemas)

    return post


def _save_parcel(path: Path, data: bytes, schemas: list[Schema]) -> None:
    path.write_bytes(data)
    scopes = {
        f"{i}/{name}": spec.scope.cpu().contiguous()
        for i, schema in enumerate(schemas)
        for name, spec in schema.leaves.items()
        if spec.scope is not None and not spec.told
    }
    save_file(scopes, _schema_path(path), {"schemas": json.dumps([_schema_as_json(schema) for schema in schemas])})


def _schema_as_json(schema: Schema) -> dict[str, Any]:
    """All of a schema but its scopes, as JSON has it."""
    leaves = {
        name: spec._replace(scope=None, dtype=str(spec.dtype).removeprefix("torch."))._asdict()  # pyright: ignore
        for name, spec in schema.leaves.items()
    }
    return {"leaves": leaves, "notes": schema.notes, "about": schema.about}


def load_parcel(path: Path) -> tuple[bytes, list[Schema] | None]:
    """The bytes in a file, and the schemas of its parcels where they lie beside it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; give the file of a parcel") from error
    return data, _read_schemas(_schema_path(path)) if _schema_path(path).exists() else None


def _read_schemas(path: Path) -> list[Schema]:
    try:
        with safe_open(path, "pt") as file:
            texts = json.loads(file.metadata()["schemas"])
            scopes = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return [_schema_from_json(text, under(str(i), scopes)) for i, text in enumerate(texts)]
    except (SafetensorError, OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(
            f"{path} is not the schema of a parcel ({error}); delete it to see the parcel without"
        ) from error


def _schema_from_json(text: dict[str, Any], scopes: Tree) -> Schema:
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


def _schema_path(path: Path) -> Path:
    return path.with_suffix(".schema")
