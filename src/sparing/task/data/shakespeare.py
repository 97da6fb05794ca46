"""Shakespeare by speaking role: text as character numbers, to guess each next character."""

from pathlib import Path

import numpy as np
import torch

from sparing.core.errors import DataError
from sparing.task.data.cache import stored
from sparing.task.data.checks import numbered
from sparing.task.data.leaf import FETCH, leaf_forms, users
from sparing.task.data.places import Form
from sparing.task.data.registry import dataset
from sparing.task.data.unpacking import read_json, reading
from sparing.task.dataset import Dataset

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
VOCABULARY = [UNKNOWN, "\n", *map(chr, range(32, 127))]
NUMBERS = {ord(character): number for number, character in enumerate(VOCABULARY)}


@dataset("shakespeare")
def shakespeare(length: int = 80) -> Dataset:
    """Shakespeare's plays by speaking role: x is 80 characters, y the next one at every place

    A role's speeches are put end to end and cut into pieces that do not overlap; what is left at the end of a role is
    dropped. LEAF's files are taken as they are cut, one piece per character of text.
    """
    if length < 1:
        raise DataError(f"shakespeare: length is {length}; it must be at least 1")
    speeches = Form(("shakespeare_roles.json.xz",), ("", "shakespeare"), read_speeches)
    forms = [speeches, *leaf_forms("shakespeare", read_pieces)]
    return stored("shakespeare", forms, FETCH.format(name="shakespeare"), length=length)


def tokens(text: str) -> np.ndarray:
    """The numbers of characters in the vocabulary: printable ASCII and the line break; 0 for any other.

    >>> tokens("To be\\n\\t").tolist()
    [54, 81, 2, 68, 71, 1, 0]
    """
    return np.fromiter((NUMBERS.get(code, 0) for code in map(ord, text)), np.uint8, len(text))


def read_speeches(paths: list[Path], length: int) -> Dataset:
    """A json object from role to its speeches, packed with xz."""
    problem = f"{paths[0]} is cut short or no json of speeches by role"
    roles = read_json(paths[0], problem)
    with reading(problem):
        texts = {role: tokens("\n".join(speeches)) for role, speeches in roles.items()}
    pieces = {role: cut(text, length) for role, text in texts.items() if len(text) > length}
    if not pieces:
        raise DataError(f"{paths[0]} has no role with more than {length} characters")
    roles = [role for role, piece in pieces.items() for _ in piece]
    return by_role(np.concatenate(list(pieces.values())), roles)


def cut(text: np.ndarray, length: int) -> np.ndarray:
    """Pieces `[n, length + 1]`; each starts with the last character of the one before."""
    n = (len(text) - 1) // length
    return np.lib.stride_tricks.sliding_window_view(text, length + 1)[::length][:n]


def read_pieces(paths: list[Path], length: int) -> Dataset:
    pieces, roles, official = [], [], []
    for user in users(paths):
        if not all(isinstance(text, str) for text in (*user.x, *user.y)):
            raise DataError(f"{user.where} has samples that are no text")
        texts = [x + y for x, y in zip(user.x, user.y, strict=True)]
        if any(len(text) != length + 1 for text in texts):
            odd = next(text for text in texts if len(text) != length + 1)
            raise DataError(f"{user.where} has a piece of {len(odd) - 1} characters among those of {length}")
        pieces.append(tokens("".join(texts)).reshape(-1, length + 1))
        roles += [user.name] * len(texts)
        official += [user.test] * len(texts)
    if not pieces:
        raise DataError(f"{paths[0]} holds no samples")
    return by_role(np.concatenate(pieces), roles, torch.tensor(official))


def by_role(pieces: np.ndarray, roles: list[str], official: torch.Tensor | None = None) -> Dataset:
    text = torch.from_numpy(pieces.astype(np.int64))
    ids, names = numbered(roles)
    meaning = {"class": VOCABULARY, "role": names}
    return Dataset("shakespeare", text[:, :-1], text[:, 1:], len(VOCABULARY), official, {"role": ids}, meaning)
