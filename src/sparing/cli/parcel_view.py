"""What a parcel holds, section by section."""

from typing import Any

from rich.console import Console
from rich.table import Table

from sparing.core.errors import DataError
from sparing.core.parcel import Parcel, Schema, parcel_row, sent_mask
from sparing.wire import from_bytes, parcel_sizes, split_parcels
from sparing.wire.frame import read_frame
from sparing.wire.index import Reader


def describe_parcels(data: bytes, schemas: list[Schema] | None) -> dict[str, Any]:
    """All there is to say, as plain values; of each parcel, if a file holds several, one behind the other."""
    parts = split_parcels(data)
    if schemas is not None and len(schemas) != len(parts):
        raise DataError(f"{len(parts)} parcels, but schemas of {len(schemas)} lie beside them; put back what belongs")
    said = [
        _describe_parcel(bytes(part), schema)
        for part, schema in zip(parts, schemas or [None] * len(parts), strict=True)
    ]
    return said[0] if len(said) == 1 else {"bytes": len(data), "parcels": said}


def _describe_parcel(data: bytes, schema: Schema | None) -> dict[str, Any]:
    """Without a schema only lengths are known: no name crosses the wire."""
    reader = Reader(memoryview(data))
    version, seen = read_frame(reader)
    said: dict[str, Any] = {"bytes": len(data), "version": version, "schema": seen.hex()}
    lengths = []
    while reader.left:
        part = reader.section("section")
        lengths.append(part.left)
    if schema is None:
        return said | {"sections": lengths}
    got = from_bytes(data, schema)
    leaves = [_describe_leaf(name, got, length) for name, length in zip(got.leaves, lengths, strict=False)]
    return said | {
        "about": schema.about,
        "leaves": leaves,
        "notes": {name: note.flatten().tolist() for name, note in got.notes.items()},
        "totals": {kind: int(size[0]) for kind, size in parcel_sizes(got).items()},
        "entries": sum(leaf["entries"] for leaf in leaves),
    }


def _describe_leaf(name: str, parcel: Parcel, length: int) -> dict[str, Any]:
    leaf = parcel_row(parcel, 0).leaves[name]
    entries, mask = leaf.value[0].numel(), sent_mask(leaf)
    alone = parcel_sizes(Parcel({name: leaf}, {}))
    return {
        "name": name,
        "shape": list(leaf.value.shape[1:]),
        "dtype": str(leaf.value.dtype).removeprefix("torch."),
        "entries": entries,
        "sent": entries if mask is None else int(mask.expand_as(leaf.value).sum()),
        "tight": leaf.tight,
        **{kind: int(alone[kind][0]) for kind in ("index", "scale", "value")},
        "bytes": length,
        "bits_per_entry": round(8 * length / max(entries, 1), 4),
    }


def print_parcels(said: dict[str, Any], console: Console) -> None:
    if "parcels" in said:
        parts = said["parcels"]
        console.print(f"{said['bytes']:,} bytes in {len(parts)} parcels, one after another", highlight=False)
        for part in parts:
            console.print()
            print_parcels(part, console)
        return
    console.print(f"{said['bytes']:,} bytes, wire version {said['version']}, schema {said['schema']}", highlight=False)
    if "leaves" not in said:
        for number, length in enumerate(said["sections"]):
            what = "the notes" if number == len(said["sections"]) - 1 else f"leaf {number}"
            console.print(f"  {what}: {length:,} bytes", highlight=False)
        console.print("There is no schema next to the file, so only lengths are known.", style="dim")
        return
    seed, number, client, way = (*said["about"].split("/"), "", "", "")[:4]
    console.print(f"seed {seed}, round {number}, client {client}, {way}\n" if way else said["about"], highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    for head in ("entries", "sent", "type", "index", "scale", "values", "bytes", "bits/entry"):
        table.add_column(head, justify="right", no_wrap=True)
    for leaf in said["leaves"]:
        table.add_row(
            leaf["name"].strip(),
            f"{leaf['entries']:,}",
            f"{leaf['sent']:,}",
            leaf["dtype"] + " tight" * leaf["tight"],
            *(f"{leaf[kind]:,}" for kind in ("index", "scale", "value", "bytes")),
            f"{leaf['bits_per_entry']:.2f}",
        )
    console.print(table)
    console.print("\n" + ", ".join(f"{kind} {size:,}" for kind, size in said["totals"].items()), highlight=False)
    if said["entries"]:
        each = 8 * said["bytes"] / said["entries"]
        console.print(f"{each:.3f} bits per entry, {said['entries']:,} entries", highlight=False)
    for name, values in said["notes"].items():
        console.print(f"note {name}: {', '.join(f'{value:g}' for value in values)}", highlight=False)
