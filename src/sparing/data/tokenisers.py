"""Text as numbers: by bytes, by characters, or by a tokeniser that lies in a folder of this machine."""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparing.core.errors import DataError
from sparing.data.files.locations import find_user_folder
from sparing.data.files.offline_library import offline_transformers
from sparing.data.files.unpacking import one_line, read_json

_UNKNOWN_CHARACTER = "\N{REPLACEMENT CHARACTER}"
CHARACTERS = [_UNKNOWN_CHARACTER, "\n", *map(chr, range(32, 127))]
"""The vocabulary of characters: 0 is any that is not printable ASCII or the line break."""
_CHARACTER_NUMBERS = {ord(character): number for number, character in enumerate(CHARACTERS)}
_AT_ONCE = 1000  # texts handed to a library in one call


class Tokeniser(NamedTuple):
    encode: Callable[[Sequence[str]], list[np.ndarray]]  # texts to int64 `[n]` each
    vocabulary: int  # tokens there are: 0 to vocabulary - 1
    filler: int  # what stands in places that hold nothing
    sources: tuple[Path, ...] = ()  # files that it was made of


def open_tokeniser(name: str) -> Tokeniser:
    """`bytes`, `characters`, or the folder of one.

    >>> open_tokeniser("bytes").encode(["hé"])[0].tolist(), open_tokeniser("characters").encode(["To"])[0].tolist()
    ([104, 195, 169], [54, 81])
    """
    if name == "bytes":
        return Tokeniser(lambda texts: [_byte_numbers(text) for text in texts], 256, 0)
    if name == "characters":
        return Tokeniser(lambda texts: [character_numbers(text).astype(np.int64) for text in texts], len(CHARACTERS), 0)
    folder = find_user_folder("tokenizer", name)
    file = folder / "tokenizer.json"
    found = _fast_tokeniser(folder, file) if file.is_file() else _tokeniser_of_transformers(folder)
    return found._replace(encode=partial(_checked_tokens, found, folder))


def _checked_tokens(found: Tokeniser, folder: Path, texts: Sequence[str]) -> list[np.ndarray]:
    """What a tokeniser of other people's making gives: a token beyond the last would be found in the middle of a round,
    or on a GPU by a crash."""
    try:
        tokens = found.encode(texts)
    except Exception as error:  # whatever its vocabulary lacks
        raise DataError(
            f"the tokeniser in {folder} cannot read the texts ({one_line(error)}): mend it, or name another"
        ) from None
    odd = next((one for one in tokens if len(one) and not 0 <= one.min() <= one.max() < found.vocabulary), None)
    if odd is not None:
        raise DataError(
            f"the tokeniser in {folder} has the tokens 0 to {found.vocabulary - 1:,}, but gives {int(odd.max()):,}: "
            "mend its post-processor, or name another"
        )
    return tokens


def _byte_numbers(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64)


def character_numbers(text: str) -> np.ndarray:
    """The numbers of characters in the vocabulary: printable ASCII and the line break; 0 for any other.

    >>> character_numbers("To be\\n\\t").tolist()
    [54, 81, 2, 68, 71, 1, 0]
    """
    return np.fromiter((_CHARACTER_NUMBERS.get(code, 0) for code in map(ord, text)), np.uint8, len(text))


def _fast_tokeniser(folder: Path, file: Path) -> Tokeniser:
    """From tokenizer.json, by the library `tokenizers`."""
    try:
        library = importlib.import_module("tokenizers")
    except ImportError:
        raise DataError(f"{file} needs the library `tokenizers`: pip install 'sparing[hf]'") from None
    try:
        found = library.Tokenizer.from_file(str(file))
    except Exception as error:  # whatever a file of other people's making may cause
        raise DataError(f"{file} is no tokeniser ({one_line(error)}): save it anew with save_pretrained") from None
    found.no_truncation()
    found.no_padding()
    numbers = found.get_vocab(with_added_tokens=True)
    vocabulary = 1 + max(numbers.values(), default=0)

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        out: list[np.ndarray] = []
        for first in range(0, len(texts), _AT_ONCE):
            out += [np.asarray(one.ids, np.int64) for one in found.encode_batch(list(texts[first : first + _AT_ONCE]))]
        return out

    return Tokeniser(encode, vocabulary, numbers.get(_padding_token(folder), 0), (file,))


def _padding_token(folder: Path) -> str:
    """As the file beside it names it; empty where none does."""
    file = folder / "tokenizer_config.json"
    held: Any = read_json(file, f"{file} is no json") if file.is_file() else {}
    token = held.get("pad_token") if isinstance(held, dict) else None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


def _tokeniser_of_transformers(folder: Path) -> Tokeniser:
    """One of another form, such as a sentencepiece model."""
    with offline_transformers(f"the tokeniser in {folder}, which has no tokenizer.json,", DataError) as library:
        try:
            found = library.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the same
            raise DataError(
                f"{folder} holds no tokeniser ({one_line(error)}): name one with tokenizer.json, bytes or characters"
            ) from None
    return Tokeniser(
        lambda texts: [np.asarray(found(text)["input_ids"], np.int64) for text in texts],
        max(len(found), 1 + max(found.get_vocab().values(), default=0)),
        found.pad_token_id or 0,
        tuple(sorted(file for file in folder.iterdir() if file.is_file())),
    )
