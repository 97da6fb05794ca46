"""Rows of parquet and arrow files, and of saved datasets of Hugging Face: one at a time, as they lie there."""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparing.core.errors import DataError
from sparing.data.files.unpacking import check_unpacked_size, one_line

_ROWS_AT_ONCE = 1000

Rows = Iterator[tuple[Mapping[str, Any], str]]
"""What a row holds, and where it stands."""


def table_rows(file: Path) -> Rows:
    """A parquet or arrow file, by the library that `datasets` itself reads them with."""
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(f"{file} needs the library `pyarrow`: pip install 'sparing[hf]'") from None
    try:
        batches = _arrow_batches(pyarrow, file) if file.suffix == ".arrow" else _parquet_batches(pyarrow, parquet, file)
        yield from _rows_of_batches(batches, str(file), file.stat().st_size)
    except DataError:
        raise
    except Exception as error:  # whatever a file of other people's making may cause
        raise DataError(f"{file} is cut short or no {file.suffix[1:]} file ({one_line(error)})") from None


def _parquet_batches(pyarrow: Any, parquet: Any, file: Path) -> Iterator[Any]:
    """A text that stands there once stays so, however many rows have it."""
    strings = (pyarrow.string(), pyarrow.large_string())
    schema = parquet.read_schema(file)
    with parquet.ParquetFile(file, read_dictionary=[one.name for one in schema if one.type in strings]) as found:
        groups = (found.metadata.row_group(i).total_byte_size for i in range(found.metadata.num_row_groups))
        check_unpacked_size(str(file), max(groups, default=0), file.stat().st_size)
        yield from found.iter_batches(_ROWS_AT_ONCE)


def _arrow_batches(pyarrow: Any, file: Path) -> Iterator[Any]:
    """A stream, as `datasets` writes it, or a file."""
    with pyarrow.memory_map(str(file)) as source:
        try:
            stream = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            found = pyarrow.ipc.open_file(source)
            stream = map(found.get_batch, range(found.num_record_batches))
        yield from stream


def _rows_of_batches(batches: Iterator[Any], where: str, packed: int) -> Rows:
    """One row at a time: of few bytes there may be many rows of the same long text."""
    number = held = 0
    for batch in batches:
        batch.validate(full=True)
        for i in range(batch.num_rows):
            row = {name: column[i].as_py() for name, column in zip(batch.schema.names, batch.columns, strict=True)}
            number, held = number + 1, held + sum(len(one) for one in row.values() if isinstance(one, str))
            check_unpacked_size(where, held, packed)
            yield row, f"{where}, row {number}"


def saved_splits(place: Path) -> Iterator[tuple[Rows, bool]]:
    """What save_to_disk of `datasets` wrote, each split with whether it is to test on. Pictures and the like in it are
    not looked up, wherever it says that they are."""
    try:
        library = importlib.import_module("datasets")
    except ImportError:
        raise DataError(f"{place} needs the library `datasets`: pip install 'sparing[hf]'") from None
    packed = sum(file.stat().st_size for file in place.rglob("*.arrow"))
    try:
        found = library.load_from_disk(str(place))
    except Exception as error:  # the same
        raise _no_saved_dataset(place, error) from None
    splits = dict(found) if hasattr(found, "keys") else {"train": found}
    for name, rows in splits.items():
        yield _split_rows(place, name, rows, packed), name == "test" and len(splits) > 1


def _split_rows(place: Path, name: str, rows: Any, packed: int) -> Rows:
    try:
        tables = rows.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE)
        batches = (batch for table in tables for batch in table.to_batches())
        yield from _rows_of_batches(batches, f"{place}, {name}", packed)
    except DataError:
        raise
    except Exception as error:  # the same
        raise _no_saved_dataset(place, error) from None


def _no_saved_dataset(place: Path, error: Exception) -> DataError:
    return DataError(f"{place} is no dataset that save_to_disk wrote ({one_line(error)})")
