"""Texts by client, from where people keep them: a file or a folder for each client, rows with a column that names the
client, LEAF's users, a saved dataset of Hugging Face. Each text comes with the place that an error message names.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sparing.core.errors import DataError, nearest_name
from sparing.data.files.table_rows import Rows, saved_splits, table_rows
from sparing.data.files.unpacking import damage_as_data_error, one_line

_MOST_FILE_BYTES = 2 << 30
_USUAL_LABEL = "label"
_TABLES = (".parquet", ".arrow")
_SUFFIXES = (".txt", ".jsonl", *_TABLES)
_MOST_NAMED = 20  # of the columns that there are


class TextRow(NamedTuple):
    """One text of one client."""

    client: str
    text: str
    label: int | str | None
    where: str
    test: bool = False


class TextColumns(NamedTuple):
    """Which columns of a row are what. Without `client`, a file or a folder is a client; without `label`, one called
    label is it, where there is one."""

    text: str = "text"
    label: str | None = None
    client: str | None = None


def read_texts(place: Path, columns: TextColumns) -> Iterator[TextRow]:
    """Every text there is, in the order of names and lines."""
    if place.is_dir() and ((place / "dataset_dict.json").is_file() or (place / "state.json").is_file()):
        yield from _saved_dataset(place, columns)
        return
    halves = [place / half for half in ("train", "test")] if place.is_dir() else []
    if halves and halves[0].is_dir() and (halves[1].is_dir() or columns.client is not None):
        for half in halves:
            if half.is_dir():
                yield from _texts_below(half, columns, test=half.name == "test")
        return
    yield from _texts_below(place, columns, test=False)


def _texts_below(place: Path, columns: TextColumns, test: bool) -> Iterator[TextRow]:
    for file, client in _files_of_clients(place):
        if client is None and columns.client is None:
            raise DataError(
                f"{file} is one file and does not say whose a row is: name a column, such as client: author"
            )
        size = file.stat().st_size
        if size > _MOST_FILE_BYTES:
            raise DataError(
                f"{file} is {size:,} bytes, and of one file {_MOST_FILE_BYTES:,} are read: cut it into several"
            )
        if file.suffix == ".txt":
            text = _decoded(file.read_bytes(), str(file))
            yield TextRow(client or file.stem, text, None, str(file), test)
        elif file.suffix == ".jsonl":
            yield from _rows_as_texts(_json_rows(file), columns, client, test)
        else:
            yield from _rows_as_texts(table_rows(file), columns, client, test)


def _files_of_clients(place: Path) -> list[tuple[Path, str | None]]:
    """Files that hold texts, each with its client: the folder it lies in, or its own name."""
    if place.is_file():
        if place.suffix not in _SUFFIXES:
            raise DataError(f"{place} holds no texts: give {', '.join(_SUFFIXES)}, or a folder of these")
        return [(place, None)]
    found: list[tuple[Path, str | None]] = []
    for entry in sorted(place.iterdir()):
        if entry.is_file() and entry.suffix in _SUFFIXES:
            found.append((entry, entry.stem))
        elif entry.is_dir():
            inner = sorted(file for file in entry.iterdir() if file.is_file() and file.suffix in _SUFFIXES)
            found += [(file, entry.name) for file in inner]
    if not found:
        raise DataError(
            f"{place} holds no texts: put one file ({', '.join(_SUFFIXES)}) for each client there, or one folder"
        )
    return found


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is no UTF-8 at byte {error.start} (0x{data[error.start]:02x}): save it as UTF-8"
        ) from None


def _json_rows(file: Path) -> Rows:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}, line {number}"
            text = _decoded(line, where).strip()
            if not text:
                continue
            with damage_as_data_error(f"{where} is no json"):
                row = json.loads(text)
            if not isinstance(row, dict):
                raise DataError(f'{where} holds a {type(row).__name__}: write an object, such as {{"text": "..."}}')
            yield row, where


def _saved_dataset(place: Path, columns: TextColumns) -> Iterator[TextRow]:
    """What save_to_disk of `datasets` wrote."""
    if columns.client is None:
        raise DataError(f"{place} is a saved dataset: name the column that says whose a row is, such as client: author")
    for rows, test in saved_splits(place):
        yield from _rows_as_texts(rows, columns, None, test)


def _rows_as_texts(rows: Rows, columns: TextColumns, client: str | None, test: bool) -> Iterator[TextRow]:
    """The columns that count; whether rows have labels, the first one says."""
    label = columns.label
    for number, (row, where) in enumerate(rows):
        if number == 0 and label is None and _USUAL_LABEL in row:
            label = _USUAL_LABEL
        text = _column(row, columns.text, where, "text")
        if not isinstance(text, str):
            raise DataError(f"{where}: {columns.text} is {one_line(repr(text), most=40)}, which is no text: quote it")
        owner = client if columns.client is None else _client_name(_column(row, columns.client, where, "client"), where)
        assert owner is not None
        yield TextRow(owner, whole_text(text, where), _label_of(row, label, where), where, test)


def _column(row: Mapping[str, Any], name: str, where: str, what: str) -> Any:
    if name not in row:
        known = [one_line(key, most=40) for key in list(row)[:_MOST_NAMED]]
        raise DataError(f"{where} has no {name!r}: name the column as {what}=; {nearest_name(name, known)}")
    return row[name]


def _client_name(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise DataError(f"{where}: the client is {one_line(repr(value), most=40)}: give a word or a whole number")
    return str(value)


def _label_of(row: Mapping[str, Any], name: str | None, where: str) -> int | str | None:
    value = None if name is None else _column(row, name, where, "label")
    if name is not None and (isinstance(value, bool) or not isinstance(value, int | str)):
        raise DataError(
            f"{where}: the label is {one_line(repr(value), most=40)}: give a word, or a whole number from 0"
        )
    return value


def whole_text(text: str, where: str) -> str:
    """Text that can be written as bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where} holds half a character at place {error.start}, a lone surrogate: repair it") from None
    return text
