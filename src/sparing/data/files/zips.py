"""Files inside zip archives, unpacked up to the size that the archive's own index says, and no further.

`zipfile` reads the index only: what it unpacks is bounded for one of the four ways of packing, not for the others.
"""

import bz2
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from sparing.core.errors import DataError
from sparing.data.files.unpacking import check_unpacked_size, one_line

_LOCAL_HEADER_BYTES = 30  # bytes of what stands before a file, without its name and its extra field
_LZMA_HEADER = struct.Struct("<HHBI")  # version, length of what follows, then two numbers of LZMA itself


def _unpack_deflate(data: bytes, size: int) -> bytes:
    return zlib.decompressobj(-15).decompress(data, size + 1)


def _unpack_bz2(data: bytes, size: int) -> bytes:
    return bz2.BZ2Decompressor().decompress(data, size + 1)


def _unpack_lzma(data: bytes, size: int) -> bytes:
    _, length, packed, window = _LZMA_HEADER.unpack_from(data)
    if length != 5 or packed >= 9 * 5 * 5:
        raise ValueError("it is packed in an unknown way")
    rest, lc = divmod(packed, 9)
    pb, lp = divmod(rest, 5)
    window = max(4096, min(window, size))  # a window beyond the content serves nothing but to fill the memory
    filters = [{"id": lzma.FILTER_LZMA1, "dict_size": window, "lc": lc, "lp": lp, "pb": pb}]
    return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters).decompress(data[_LZMA_HEADER.size :], size + 1)


_UNPACKERS: dict[int, Callable[[bytes, int], bytes]] = {
    zipfile.ZIP_STORED: lambda data, size: data,
    zipfile.ZIP_DEFLATED: _unpack_deflate,
    zipfile.ZIP_BZIP2: _unpack_bz2,
    zipfile.ZIP_LZMA: _unpack_lzma,
}


def read_zip_members(archive: zipfile.ZipFile, path: Path, names: Sequence[str]) -> list[bytes]:
    """The files of these names, once it is known that together they are not too large."""
    found = [archive.getinfo(name) for name in names]
    for info in found:
        if info.flag_bits & 1:
            raise DataError(f"{path}: {one_line(info.filename)} is encrypted: save it without a password")
        if info.compress_type not in _UNPACKERS:
            raise DataError(f"{path}: {one_line(info.filename)} is packed in an unknown way: save it uncompressed")
    check_unpacked_size(str(path), sum(info.file_size for info in found), path.stat().st_size)
    return [_read_zip_member(path, info) for info in found]


def _read_zip_member(path: Path, info: zipfile.ZipInfo) -> bytes:
    with path.open("rb") as file:
        if info.header_offset + info.compress_size > path.stat().st_size:
            raise zipfile.BadZipFile(f"{info.filename} is larger than the archive")
        file.seek(info.header_offset)
        head = file.read(_LOCAL_HEADER_BYTES)
        if len(head) < _LOCAL_HEADER_BYTES or head[:4] != b"PK\3\4":
            raise zipfile.BadZipFile(f"{info.filename} is not where the index says")
        file.seek(int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little"), 1)
        packed = file.read(info.compress_size)
    data = _UNPACKERS[info.compress_type](packed, info.file_size)
    if len(data) != info.file_size or zlib.crc32(data) != info.CRC:
        raise zipfile.BadZipFile(f"{info.filename} is damaged")
    return data
