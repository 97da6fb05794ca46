"""Shakespeare by speaking role: text as character numbers, to guess each next character."""

from pathlib import Path

import numpy as np
import torch

from sparing.core.errors import DataError
from sparing.data.cache import load_stored
from sparing.data.dataset import Dataset
from sparing.data.files.locations import FileForm
from sparing.data.files.unpacking import damage_as_data_error, read_json
from sparing.data.pooling import number_keys
from sparing.data.registry import register_dataset
from sparing.data.sets.leaf import LEAF_FETCH, leaf_forms, read_leaf_users
from sparing.data.tokenisers import CHARACTERS, character_numbers


@register_dataset("shakespeare")
def _load_shakespeare(length: int = 80) -> Dataset:
    """Shakespeare's plays by speaking role: x is 80 characters, y the next one at every place

    A role's speeches are put end to end and cut into pieces that do not overlap; what is left at the end of a role is
    dropped. LEAF's files are taken as they are cut, one piece per character of text.
    """
    if length < 1:
        raise DataError(f"shakespeare: length is {length}; it must be at least 1")
    speeches = FileForm(("shakespeare_roles.json.xz",), ("", "shakespeare"), _read_speeches)
    forms = [speeches, *leaf_forms("shakespeare", _read_leaf_pieces)]
    return load_stored("shakespeare", forms, LEAF_FETCH.format(name="shakespeare"), length=length)


def _read_speeches(paths: list[Path], length: int) -> Dataset:
    """A json object from role to its speeches, packed with xz."""
    problem = f"{paths[0]} is cut short or no json of speeches by role"
    roles = read_json(paths[0], problem)
    with damage_as_data_error(problem):
        texts = {role: character_numbers("\n".join(speeches)) for role, speeches in roles.items()}
    pieces = {role: _cut_into_pieces(text, length) for role, text in texts.items() if len(text) > length}
    if not pieces:
        raise DataError(f"{paths[0]} has no role with more than {length} characters")
    roles = [role for role, piece in pieces.items() for _ in piece]
    return _dataset_by_role(np.concatenate(list(pieces.values())), roles)


def _cut_into_pieces(text: np.ndarray, length: int) -> np.ndarray:
    """Pieces `[n, length + 1]`; each starts with the last character of the one before."""
    n = (len(text) - 1) // length
    return np.lib.stride_tricks.sliding_window_view(text, length + 1)[::length][:n]


def _read_leaf_pieces(paths: list[Path], length: int) -> Dataset:
    pieces, roles, official = [], [], []
    for user in read_leaf_users(paths):
        if not all(isinstance(text, str) for text in (*user.x, *user.y)):
            raise DataError(f"{user.where} has samples that are no text")
        texts = [x + y for x, y in zip(user.x, user.y, strict=True)]
        if any(len(text) != length + 1 for text in texts):
            odd = next(text for text in texts if len(text) != length + 1)
            raise DataError(f"{user.where} has a piece of {len(odd) - 1} characters among those of {length}")
        pieces.append(character_numbers("".join(texts)).reshape(-1, length + 1))
        roles += [user.name] * len(texts)
        official += [user.test] * len(texts)
    if not pieces:
        raise DataError(f"{paths[0]} holds no samples")
    return _dataset_by_role(np.concatenate(pieces), roles, torch.tensor(official))


def _dataset_by_role(pieces: np.ndarray, roles: list[str], official: torch.Tensor | None = None) -> Dataset:
    text = torch.from_numpy(pieces.astype(np.int64))
    ids, names = number_keys(roles)
    meaning = {"class": CHARACTERS, "role": names}
    return Dataset("shakespeare", text[:, :-1], text[:, 1:], len(CHARACTERS), official, {"role": ids}, meaning)
