"""Ways to damage a file that keep the format's own checks right, so that the damage reaches the readers."""

import gzip
import io
import json
import pickletools
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

Damage = Callable[[random.Random, bytes], bytes]

# Damage to any bytes.

NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, *((1 << n) - k for n in (31, 32, 40, 62, 64) for k in (0, 1)))


def flip(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def overwrite(rng: random.Random, data: bytearray) -> None:
    data[rng.randrange(len(data))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))


def number(rng: random.Random, data: bytearray) -> None:
    """A number that may be a length, in either byte order."""
    size, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
    at = rng.randrange(len(data))
    data[at : at + size] = (rng.choice(NUMBERS) & (1 << 8 * size) - 1).to_bytes(size, order)


def cut(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice((1, 1, 2, 8, len(data)))]


def insert(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.choice((1, 1, 2, 9, 64)))


def repeat(rng: random.Random, data: bytearray) -> None:
    start, n = rng.randrange(len(data)), rng.choice((1, 4, 32, 200))
    data[start:start] = data[start : start + n] * rng.choice((1, 2, 50))


def any_bytes(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if out:
            rng.choice((flip, flip, overwrite, number, number, cut, insert, repeat))(rng, out)
    return bytes(out)


# Damage to words and numbers in text.

WORDS = (
    "-1 0 1.5 1e400 -1e308 nan inf 1_0 ٣ é \ufeff \0 \" ' true null ~ [] {} [[[[ *a &a !!binary <<: 2001-99-99 "
    "0b 0x 1:99 | > ? client,client \n \r \t ; 400000000 9007199254740993 18446744073709551616 1e18"
)
LONG = (
    "&a [*a]",
    "!!python/object:os.system x",
    "<<: *a",
    "9" * 30,
    "9" * 5000,
    "a" * 200_000,
    "[" * 3000,
    "{a: " * 300,
)
ODD = ("", *WORDS.split(" "), *LONG)
TOKEN = re.compile(rb"[A-Za-z_]+|-?[\d.]+|[^\sA-Za-z_\d]")


def text(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.3:
        return any_bytes(rng, data)
    out = data
    for _ in range(rng.choice((1, 1, 2, 3))):
        spans = [match.span() for match in TOKEN.finditer(out)] or [(0, 0)]
        start, end = rng.choice(spans)
        new = rng.choice(ODD).encode() if rng.random() < 0.7 else out[slice(*rng.choice(spans))]
        out = out[:start] + new + out[end:]
    return out[:500_000]


VALUES = (None, True, -1, 0, 1.5, 1e300, 10**30, "", "a" * 100_000, "\ud800", [], {}, [[]], [["a"]], [1] * 9, {"a": 1})


def json_value(rng: random.Random, data: bytes) -> bytes:
    """Another value in one place of a json file."""
    if rng.random() < 0.4:
        return text(rng, data)
    held = json.loads(data)
    places = [(None, None)]
    stack = [held]
    while stack:
        one = stack.pop()
        inner = one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ()
        few = list(inner)[:20]
        places += [(one, key) for key, _ in few]
        stack += [value for _, value in few if isinstance(value, dict | list)]
    new = rng.choice(VALUES)
    holder, key = rng.choice(places)
    if holder is None:
        held = new
    elif rng.random() < 0.3:
        del holder[key]
    else:
        holder[key] = new if rng.random() < 0.7 else rng.choice([value for _, value in pairs(holder)])
    return json.dumps(held).encode()


def pairs(holder: Any) -> list[tuple[Any, Any]]:
    return list(holder.items()) if isinstance(holder, dict) else list(enumerate(holder))


# Damage to pickles, instruction by instruction.

ONE_BYTE = b"N02()]}aesutldRboQ.\x81\x85\x86\x87\x88\x8f\x91\x92\x93\x94\x97\x98"
NAMES = ("numpy\nndarray", "numpy\ndtype", "_codecs\nencode", "os\nsystem", "builtins\neval", "__builtin__\nbytes")
CORE = ("multiarray\n_reconstruct", "multiarray\nscalar", "numeric\n_frombuffer")
SNIPPETS = (
    *(bytes([code]) for code in ONE_BYTE),
    *(f"c{name}\n".encode() for name in NAMES),
    *(f"cnumpy.core.{name}\n".encode() for name in CORE),
    *(b"\x82\1", b"\x84\1\0\0\0", b"Pid\n", b"ios\nsystem\n", b"U\2O8", b"U\2u1", b"U\3f16", b"U\1b", b"X\2\0\0\0i8"),
    *(
        b"C\2ab",
        b"K\0",
        b"M\xff\xff",
        b"J\xff\xff\xff\xff",
        b"q\0",
        b"q\5",
        b"h\0",
        b"h\1",
        b"h\5",
        b"g1\n",
        b"p99999999\n",
    ),
    *(code + b"\xff\xff\xff" + last for code in (b"r", b"j", b"T", b"B", b"X", b"\x8b") for last in (b"\x0f", b"\xff")),
    *(b"\x8a\xff" + bytes(255), b"I" + b"9" * 5000 + b"\n", b"F1e999\n", b"\x8e" + b"\xff" * 8),
    *(b"]" * 3000, b"(" * 3000, b"\x85" * 3000, b"]" * 3000 + b"a" * 2999),
    b"K\2\x85cnumpy\ndtype\nU\2O8K\0K\1\x87RC\x10" + bytes(range(16)) + b"\x87R",
)


def instructions(rng: random.Random, data: bytes) -> bytes:
    starts = [at for _, _, at in pickletools.genops(data) if at is not None]
    out = data
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.choice(starts)
        end = next((start for start in starts if start > at), len(data))
        new = rng.choice(SNIPPETS) if rng.random() < 0.7 else data[slice(*sorted(rng.sample(starts, 2)))][:400]
        out = out[:at] + new + out[at if rng.random() < 0.5 else end :]
    return out


def a_pickle(rng: random.Random, data: bytes) -> bytes:
    return instructions(rng, data) if rng.random() < 0.7 else any_bytes(rng, data)


# Damage inside a wrapping, which is then made right again.


def inside(pack: Callable[[bytes], bytes], unpack: Callable[[bytes], bytes], damage: Damage) -> Damage:
    def act(rng: random.Random, data: bytes) -> bytes:
        return any_bytes(rng, data) if rng.random() < 0.3 else pack(damage(rng, unpack(data)))

    return act


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, 1, mtime=0)


SHAPES = (
    *("(0,)", "()", "(1,)", "(2, 3)", "(0, 999999999999)", "(999999999999, 0)", "(4294967296, 4294967296)", "(-1, 3)"),
    *("(" + "1, " * 70 + ")", "(1.5,)", "(" * 200, "(" + "9" * 5000 + ",)", "(10000000000,)"),
)
TYPES = ("|O", "<f8", "|u1", ">i8", "<U9", "<U100000", "|V8", "<M8", "<f16", "<c16", "|b1", "S4", "é", "<f8', '<f8")


def npy_header(rng: random.Random, data: bytes) -> bytes:
    """Another type, shape or order in the header of an npy file, whose length is then right again."""
    if data[:6] != b"\x93NUMPY" or rng.random() < 0.3:
        return any_bytes(rng, data)
    length = int.from_bytes(data[8:10], "little")
    head, body = data[10 : 10 + length], data[10 + length :]
    shape, descr = rng.choice(SHAPES), rng.choice(TYPES)
    change = rng.randrange(3)
    if change == 0:
        head = re.sub(rb"\([\d, ]*\)", shape.encode(), head, count=1)
    elif change == 1:
        head = re.sub(rb"'descr': '[^']*'", f"'descr': '{descr}'".encode(), head)
    else:
        head = text(rng, head)[:60_000]
    return data[:6] + bytes([rng.choice((1, 1, 1, 2, 3, 0)), 0]) + len(head).to_bytes(2, "little") + head + body


METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2)


def zipped(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return out.getvalue()


def a_zip(damage: Damage) -> Damage:
    """Damage to one file in a zip archive, or to the archive's own figures."""

    def act(rng: random.Random, data: bytes) -> bytes:
        chance = rng.random()
        if chance < 0.2:
            return any_bytes(rng, data)
        if chance < 0.4:
            out = bytearray(data)
            heads = [match.start() for match in re.finditer(rb"PK(?:\x01\x02|\x03\x04|\x05\x06)", data)]
            at = rng.choice(heads) + rng.randrange(4, 46)
            out[at : at + 4] = rng.choice((bytes(4), b"\1\0", b"\x0e\0", b"\x0c\0", b"\xff" * 4, b"\0\0\0@"))
            return bytes(out)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        name = rng.choice(list(files))
        files[name] = damage(rng, files[name])
        if rng.random() < 0.1:
            files[rng.choice(ODD)[:50] or "x"] = files.pop(name)
        return zipped(files, rng.choice(METHODS))

    return act


def pickled_npy(rng: random.Random, data: bytes) -> bytes:
    """Damage to the pickle behind the header of an npy file."""
    start = 10 + int.from_bytes(data[8:10], "little")
    return data[:start] + a_pickle(rng, data[start:]) if rng.random() < 0.8 else npy_header(rng, data)


def idx_header(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    at = rng.choice((2, 3, *range(4, 4 + 4 * data[3])))
    if at < 4:
        out[at] = rng.choice((0, 1, 2, 3, 8, 9, 11, 12, 13, 14, 32, 64, 255))
    else:
        at -= at % 4
        out[at : at + 4] = (rng.choice(NUMBERS) & 0xFFFFFFFF).to_bytes(4, "big")
    return bytes(out) if rng.random() < 0.7 else any_bytes(rng, bytes(out))


KINDS = tuple(bytes([code]) for code in b"SxgLK15")  # of files in a tar archive


def tar_member(rng: random.Random, data: bytes) -> bytes:
    """Another field in the head of one file of a tar archive, with the head's checksum made right again."""
    out = bytearray(data)
    heads = [at for at in range(0, len(data) - 511, 512) if data[at + 257 : at + 262] == b"ustar"]
    at = rng.choice(heads)
    start, size = rng.choice(((0, 100), (100, 8), (124, 12), (124, 12), (156, 1), (156, 1), (257, 8), (345, 155)))
    new = rng.choice((b"77777777777", b"\x80" + b"\xff" * 10, b"-1", rng.randbytes(size), *KINDS))
    out[at + start : at + start + len(new[:size])] = new[:size]
    out[at + 148 : at + 156] = b" " * 8
    out[at + 148 : at + 156] = f"{sum(out[at : at + 512]):06o}\0 ".encode()
    return bytes(out)


SIDES = (0, 1, 2, 8, 100, 4000, 13_000, 1 << 20, 1 << 31)
CHUNKS = (b"tEXt", b"zTXt", b"iTXt", b"iCCP", b"PLTE", b"tRNS", b"gAMA", b"acTL", b"fcTL", b"fdAT", b"eXIf")


def png_chunks(rng: random.Random, data: bytes) -> bytes:
    """Chunks changed, doubled, dropped or added, each with a right CRC."""
    chunks, at = [], 8
    while at < len(data):
        n = int.from_bytes(data[at : at + 4], "big")
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + n]))
        at += 12 + n
    for _ in range(rng.choice((1, 1, 2))):
        i = rng.randrange(len(chunks))
        kind, body = chunks[i]
        act = rng.randrange(5)
        if act == 0:
            chunks[i] = (kind, any_bytes(rng, body) if body else rng.randbytes(9))
        elif act == 1:
            size = struct.pack(">II", rng.choice(SIDES), rng.choice(SIDES))
            form = bytes(rng.choice((0, 1, 2, 3, 4, 6, 8, 16)) for _ in range(2)) + bytes(3)
            chunks[0] = (b"IHDR", size + form)
        elif act == 2:
            chunks.insert(i, chunks[rng.randrange(len(chunks))])
        elif act == 3:
            del chunks[i]
        else:
            packed = b"a\0\0" + zlib.compress(bytes(rng.choice((9, 1 << 20))))
            chunks.insert(i, (rng.choice(CHUNKS), rng.choice((packed, rng.randbytes(26)))))
        chunks = chunks or [(b"IHDR", bytes(13))]
    return png(*chunks)


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    out = b"\x89PNG\r\n\x1a\n"
    for kind, body in chunks:
        out += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return out


def either(*damages: Damage) -> Damage:
    return lambda rng, data: rng.choice(damages)(rng, data)


def in_torch(rng: random.Random, data: bytes) -> bytes:
    """Instructions put into the middle of a pickle, wherever it stands."""
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(SNIPPETS) + data[at + rng.choice((0, 0, 1, 5)) :]
