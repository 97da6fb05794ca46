"""A masked sum on the server's disk, from before its first request to unmask leaves until a later sum replaces it."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from sparing.core.errors import CheckpointError, SecureError
from sparing.runs.files.checkpoint import load_checkpoint, save_checkpoint
from sparing.secure.mask_graph import neighbours_of_all
from sparing.secure.masks import Words, word_type
from sparing.secure.sum_messages import Prepared, read_prepare, write_prepare
from sparing.secure.sum_terms import SumTerms, read_sum_terms, write_sum_terms

KEPT_SUM_FILE = "secure-sum.safetensors"


class KeptSum(NamedTuple):
    round: int
    terms: SumTerms
    prepared: Mapping[int, Prepared]
    masked: Words
    arrived: set[int]
    lost: set[int]  # clients that had lost their state


def write_kept_sum(path: Path, kept: KeptSum) -> None:
    messages = {f"prepared/{who}": write_prepare(kept.terms, who, one) for who, one in kept.prepared.items()}
    data = messages | {"terms": write_sum_terms(kept.terms), "masked": kept.masked.tobytes()}
    tensors = {name: torch.frombuffer(bytearray(one), dtype=torch.uint8) for name, one in data.items()}
    save_checkpoint(path, tensors, {"round": kept.round, "arrived": sorted(kept.arrived), "lost": sorted(kept.lost)})


def read_kept_sum(path: Path) -> KeptSum | None:
    """None: no sum was being unmasked."""
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
        if len(masked) != terms.size or not terms.least <= len(arrived) or not arrived <= prepared.keys():
            raise ValueError
        return KeptSum(int(meta["round"]), terms, prepared, masked, arrived, set(meta["lost"]))
    except (KeyError, TypeError, ValueError, SecureError):
        raise CheckpointError(
            f"{path} was altered, and nodes unmask no other sum of its round; restore it, or start a new run"
        ) from None
