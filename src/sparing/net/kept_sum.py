"""A masked sum on the server's disk, from before its first request to unmask leaves until a later round begins."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from sparing.core.errors import CheckpointError, SecureError
from sparing.net.sum_bill import SumBill
from sparing.runs.files.checkpoint import load_checkpoint, save_checkpoint
from sparing.secure.mask_graph import neighbours_of_all
from sparing.secure.masks import Words, word_type
from sparing.secure.sum_messages import Prepared, read_prepare, write_prepare
from sparing.secure.sum_terms import SumTerms, read_sum_terms, write_sum_terms
from sparing.storage.atomic import os_errors_as_checkpoint_error

_NAME, _ENDING = "secure-sum-", ".safetensors"


class KeptSum(NamedTuple):
    terms: SumTerms
    prepared: Mapping[int, Prepared]
    masked: Words
    arrived: set[int]
    lost: set[int]  # clients that had lost their state
    bill: SumBill  # so far


def kept_sum_path(folder: Path, t: int) -> Path:
    """Of the sum of round t, in the folder of a run."""
    return folder / f"{_NAME}{t}{_ENDING}"


def delete_earlier_sums(folder: Path, t: int) -> None:
    """Of rounds before t, which no checkpoint needs any more."""
    for path in folder.glob(f"{_NAME}*{_ENDING}"):
        told = path.name.removeprefix(_NAME).removesuffix(_ENDING)
        if told.isdecimal() and int(told) < t:
            with os_errors_as_checkpoint_error(path):
                path.unlink()


def write_kept_sum(path: Path, kept: KeptSum) -> None:
    messages = {f"prepared/{who}": write_prepare(kept.terms, who, one) for who, one in kept.prepared.items()}
    data = messages | {"terms": write_sum_terms(kept.terms), "masked": kept.masked.tobytes()}
    tensors = {name: torch.frombuffer(bytearray(one), dtype=torch.uint8) for name, one in data.items()}
    known = {"arrived": sorted(kept.arrived), "lost": sorted(kept.lost), "bill": kept.bill.to_json()}
    save_checkpoint(path, tensors, known)


def read_kept_sum(path: Path, run: bytes, t: int) -> KeptSum | None:
    """Of round t of this run; None: no sum was being unmasked."""
    if not path.exists():
        return None
    tensors, meta = load_checkpoint(path)
    try:
        data = {name: x.numpy().tobytes() for name, x in tensors.items()}
        terms = read_sum_terms(data["terms"])
        near = neighbours_of_all(terms)
        messages = {int(name.partition("/")[2]): one for name, one in data.items() if name.startswith("prepared/")}
        prepared = {who: read_prepare(one, terms, who, near[who]) for who, one in messages.items()}
        masked = np.frombuffer(data["masked"], word_type(terms.bits))
        arrived = set(meta["arrived"])
        if (terms.run, terms.round) != (run, t):
            raise ValueError
        if len(masked) != terms.size or not terms.least <= len(arrived) or not arrived <= prepared.keys():
            raise ValueError
        return KeptSum(terms, prepared, masked, arrived, set(meta["lost"]), SumBill.from_json(meta["bill"]))
    except (AttributeError, KeyError, TypeError, ValueError, SecureError):
        raise CheckpointError(
            f"{path} was altered, and nodes unmask no other sum of its round; restore it, or delete it, and the round "
            "may count for nobody"
        ) from None
