"""Parcels as bytes and back: the frame, its sections, and the codes they are written in. `docs/wire.md` is the format.

frame          magic, version, schema hash, sections, checksum          to_bytes, from_bytes
section        one leaf: masks, scales, values
count          how many bytes that takes, without writing it where a closed form exists
bound          how many bytes it takes at most, by the schema alone
index          which positions are kept, in closed-form codes; bit layouts; the reader of untrusted bytes
tight_index    the same in the fewest bytes we know, for tight leaves
tight_values   int8 codes of tight leaves
levels         levels of rows and columns, by which both tell likely places from unlikely ones
frequencies    how likely each symbol is
rans           the entropy coder
"""

from sparing.wire.frame import (
    Later,
    dense_bytes,
    fingerprint,
    from_bytes,
    hash_in,
    is_plain,
    nbytes,
    parcel_sizes,
    plain_sizes,
    schema_of,
    sizes_later,
    split_parcels,
    to_bytes,
    version_of,
    written_parcel,
)

__all__ = [
    "Later",
    "dense_bytes",
    "fingerprint",
    "from_bytes",
    "hash_in",
    "is_plain",
    "nbytes",
    "parcel_sizes",
    "plain_sizes",
    "schema_of",
    "sizes_later",
    "split_parcels",
    "to_bytes",
    "version_of",
    "written_parcel",
]
