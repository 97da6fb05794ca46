"""Your own texts by client: for a language model, or with labels for a classifier."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparing.core.errors import DataError
from sparing.data.cache import cached_dataset
from sparing.data.dataset import IGNORED, Dataset
from sparing.data.files.locations import find_user_folder
from sparing.data.files.texts import TextColumns, TextRow, read_texts, whole_text
from sparing.data.inputs import Inputs
from sparing.data.pooling import number_keys
from sparing.data.registry import register_dataset
from sparing.data.sets.leaf import read_leaf_users
from sparing.data.tokenisers import Tokeniser, open_tokeniser

_MOST_LENGTH = 1 << 20
_MOST_PLACES = 1 << 31
_LEAF_MARKS = frozenset(("<PAD>", "<BOS>", "<EOS>"))
_TWEET_FIELDS, _TWEET_TEXT = 6, 4  # sent140: id, date, query, user, text, ...


@register_dataset("text:PATH")
def _load_texts(
    path: str,
    length: int = 128,
    tokenizer: str = "bytes",
    client: str | None = None,
    text: str = "text",
    label: str | None = None,
) -> Dataset:
    """Your own texts by client: files, folders, rows, LEAF's users, or a dataset that Hugging Face's library saved

    Sequences have `length` tokens; `tokenizer` is bytes, characters or a folder. `client`, `text` and `label` are
    columns of rows. With labels it is for classifiers, else for language models.
    """
    if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= _MOST_LENGTH:
        raise DataError(f"text: length is {length!r}; give a whole number of tokens, 1 to {_MOST_LENGTH:,}")
    for name, value in (("tokenizer", tokenizer), ("client", client), ("text", text), ("label", label)):
        if not isinstance(value, str) and not (value is None and name in ("client", "label")):
            raise DataError(f"text: {name} is {value!r}; give a word")
    place, tokeniser, columns = _find_place(path), open_tokeniser(tokenizer), TextColumns(text, label, client)
    options = {"length": length, "tokenizer": tokenizer, **columns._asdict()}
    sources = [place, *tokeniser.sources]
    return cached_dataset(
        f"text-{place.name}", sources, options, lambda: _read_dataset(place, columns, tokeniser, length)
    )


def _find_place(path: str) -> Path:
    """A file as given, or a folder as given or below `SPARING_DATA`."""
    place = Path(path).expanduser()
    return place.resolve() if place.is_file() else find_user_folder("text", path)


def _read_dataset(place: Path, columns: TextColumns, tokeniser: Tokeniser, length: int) -> Dataset:
    rows = list(_leaf_texts(place) if _is_leaf(place) else read_texts(place, columns))
    if not rows:
        raise DataError(f"{place} holds no texts: give it some")
    labelled = _refuse_half_labelled(rows)
    tokens = tokeniser.encode([row.text for row in rows])
    cut = _padded(rows, tokens, tokeniser, length) if labelled else _pieces(place, tokens, tokeniser, length)
    owners = [rows[i] for i in cut.rows]
    ids, names = number_keys([row.client for row in owners])
    tested = torch.tensor([row.test for row in owners])
    official = tested if bool(tested.any()) else None
    if official is not None and bool(tested.all()):
        raise DataError(f"{place} holds texts to test on, but none to train on: put some into train")
    meaning = {"client": names}
    if labelled:
        y, classes = _numbered_labels(owners)
        meaning["class"] = classes
    else:
        y, classes = cut.y, range(tokeniser.vocabulary)
    x = Inputs((cut.x, cut.mask), ("input_ids", "attention_mask")) if labelled else cut.x
    return Dataset(place.name, x, y, len(classes), official, {"client": ids}, meaning, tokeniser.vocabulary)


def _refuse_half_labelled(rows: Sequence[TextRow]) -> bool:
    """Whether all rows have labels."""
    first = rows[0]
    odd = next((row for row in rows if type(row.label) is not type(first.label)), None)
    if odd is not None:
        seen = {type(None): "no label", int: "a number as its label", str: "a word as its label"}
        raise DataError(
            f"{odd.where} has {seen[type(odd.label)]}, but {first.where} has {seen[type(first.label)]}: give all texts "
            "labels of one kind, or none"
        )
    return first.label is not None


class _Cut(NamedTuple):
    """Sequences, and of which text each is."""

    x: Tensor  # int64 [n, T]
    y: Tensor  # the same: what comes next
    mask: Tensor  # the same: 1 where there is a token
    rows: list[int]


def _room(n: int, length: int) -> None:
    if n * length > _MOST_PLACES:
        raise DataError(
            f"text: {n:,} sequences of {length:,} tokens are more than {_MOST_PLACES:,}: lower length"
            " or give fewer texts"
        )


def _pieces(place: Path, tokens: Sequence[np.ndarray], tokeniser: Tokeniser, length: int) -> _Cut:
    """Each text in pieces that begin with the last token of the one before; of one token there is none."""
    count = [max(0, -(-(len(one) - 1) // length)) for one in tokens]
    n = sum(count)
    if not n:
        raise DataError(
            f"{place} holds no text of two tokens or more, so there is nothing to guess: give it longer ones"
        )
    _room(n, length)
    x, y = np.full((n, length), tokeniser.filler, np.int64), np.full((n, length), IGNORED, np.int64)
    flat_x, flat_y, at = x.reshape(-1), y.reshape(-1), 0
    for one, pieces in zip(tokens, count, strict=True):
        if pieces:
            flat_x[at : at + len(one) - 1], flat_y[at : at + len(one) - 1] = one[:-1], one[1:]
        at += pieces * length
    rows = np.repeat(np.arange(len(tokens)), count).tolist()
    return _Cut(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy((y != IGNORED).astype(np.int64)), rows)


def _padded(rows: Sequence[TextRow], tokens: Sequence[np.ndarray], tokeniser: Tokeniser, length: int) -> _Cut:
    """The first tokens of each text."""
    _room(len(rows), length)
    x = np.full((len(rows), length), tokeniser.filler, np.int64)
    mask = np.zeros((len(rows), length), np.int64)
    for i, (row, one) in enumerate(zip(rows, tokens, strict=True)):
        if not len(one):
            raise DataError(f"{row.where}: the text is empty, so there is nothing to tell its label by: remove it")
        x[i, : len(one)], mask[i, : len(one)] = one[:length], 1
    both = torch.from_numpy(x)
    return _Cut(both, both, torch.from_numpy(mask), list(range(len(rows))))


def _numbered_labels(rows: Sequence[TextRow]) -> tuple[Tensor, list[str]]:
    """Numbers as they are, words in natural order."""
    if isinstance(rows[0].label, str):
        return number_keys([row.label for row in rows])
    bad = next((row for row in rows if not 0 <= int(row.label or 0) < 1_000_000), None)
    if bad is not None:
        raise DataError(f"{bad.where}: the label is {bad.label}, out of range: number the classes 0, 1, 2, ...")
    y = torch.tensor([int(row.label or 0) for row in rows])
    return y, [str(i) for i in range(int(y.max()) + 1)]


def _is_leaf(place: Path) -> bool:
    """Not where the same folders are the splits of a saved dataset."""
    halves = [place / half for half in ("train", "test")] if place.is_dir() else []
    return any(any(half.glob("*.json")) and not (half / "state.json").is_file() for half in halves if half.is_dir())


def _leaf_texts(place: Path) -> Iterator[TextRow]:
    """Pieces of plays with their next character, tweets with their mood, or comments as lists of words."""
    for user in read_leaf_users([place / half for half in ("train", "test") if (place / half).is_dir()]):
        for i, (x, y) in enumerate(zip(user.x, user.y, strict=True)):
            where = f"{user.where} sample {i + 1}"
            text, label = _leaf_sample(x, y, where)
            yield TextRow(user.name, whole_text(text, where), label, where, user.test)


def _leaf_sample(x: Any, y: Any, where: str) -> tuple[str, int | None]:
    if isinstance(x, str) and isinstance(y, str):
        return x + y, None
    if isinstance(y, int) and isinstance(x, list) and len(x) == _TWEET_FIELDS and isinstance(x[_TWEET_TEXT], str):
        return x[_TWEET_TEXT], int(y)
    words = _leaf_words(x)
    if words is not None and isinstance(y, dict | list):
        last = _leaf_words(y.get("target_tokens") if isinstance(y, dict) else y) or []
        return " ".join([*words, *last[-1:]]), None
    raise DataError(f"{where} is none of LEAF's texts (shakespeare, sent140, reddit): write one jsonl file per user")


def _leaf_words(value: Any) -> list[str] | None:
    """Words in a list, or in a list of lists of equal length; None: no words."""
    flat = value if isinstance(value, list) else None
    if flat is not None and all(isinstance(one, list) for one in flat):
        flat = [word for one in flat for word in one]
    if flat is None or not all(isinstance(word, str) for word in flat):
        return None
    return [word for word in flat if word not in _LEAF_MARKS]
