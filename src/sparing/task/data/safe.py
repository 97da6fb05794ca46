"""npz files and pickles of plain arrays, read without running anything that a file asks for."""

import io
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from sparing.core.errors import DataError

BROKEN = (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error)
REBUILD: Any = np.empty(0).__reduce__()[0]
SCALAR: Any = np.int64(0).__reduce__()[0]
FROM_BUFFER: Any = np.empty(1).__reduce_ex__(5)[0]
PLAIN = {
    "ndarray": np.ndarray,
    "dtype": np.dtype,
    "_reconstruct": REBUILD,
    "scalar": SCALAR,
    "_frombuffer": FROM_BUFFER,
}


class Unpickler(pickle.Unpickler):
    """Knows numbers, text, lists, dicts and numpy arrays, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in PLAIN:
            return PLAIN[name]
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes in old pickles
            return latin1
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no plain data")


def latin1(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


def unpickle(file: IO[bytes], where: str) -> Any:
    """What a pickle of plain data holds.

    >>> unpickle(io.BytesIO(pickle.dumps({"x": np.arange(2)})), "here")
    {'x': array([0, 1])}
    """
    try:
        return Unpickler(file, encoding="latin1").load()
    except (pickle.UnpicklingError, TypeError, AttributeError, IndexError, ImportError, MemoryError, *BROKEN) as error:
        raise DataError(f"{where} is not a pickle of plain arrays: {error}") from None


def read_npz(path: Path, *wanted: str) -> list[np.ndarray]:
    """These arrays of an npz file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            lacking = [name for name in wanted if name not in file.files]
            if not lacking:
                return [file[name] for name in wanted]
            has = ", ".join(file.files)
    except BROKEN as error:
        raise DataError(f"{path} is cut short, damaged or no npz file of plain arrays ({error})") from None
    raise DataError(f"{path} has no array {lacking[0]!r} (it has {has})")


def read_npz_object(path: Path, name: str) -> Any:
    """The one Python object that numpy pickled into an npz file under this name."""
    try:
        with zipfile.ZipFile(path) as archive:
            file = io.BytesIO(archive.read(f"{name}.npy"))
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        header(file)
    except BROKEN as error:
        raise DataError(f"{path} is cut short, damaged or has no {name!r} ({error})") from None
    held = unpickle(file, str(path))
    return held.item() if isinstance(held, np.ndarray) and held.ndim == 0 else held
