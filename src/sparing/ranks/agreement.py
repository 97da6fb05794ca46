"""What all ranks of a run must have in common, and what they decide together."""

import hashlib
import platform
import secrets
from pathlib import Path
from typing import Any

import torch

from sparing.core.errors import RankError
from sparing.core.tree import Tree, tree_sha256
from sparing.ranks.group import Ranks

_TOKEN = ".ranks"
_LONGEST_SHOWN = 32
"""Characters of a fact that a sentence quotes; digests are longer."""


def refuse_disagreement(ranks: Ranks, facts: dict[str, Any]) -> None:
    """Facts by their names in a sentence; all ranks must have the same."""
    for rank, theirs in enumerate(found := ranks.gather_json(facts)):
        for what, value in found[0].items():
            if theirs.get(what) != value:
                seen = f" ({theirs.get(what)}, not {value})" if len(str(value)) <= _LONGEST_SHOWN else ""
                raise RankError(f"rank {rank} has another {what} than rank 0{seen}; give all ranks the same")


def code_facts() -> dict[str, str]:
    """The code that this process runs."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return {
        "version of Python": platform.python_version(),
        "version of torch": str(torch.__version__),
        "version of sparing's code": digest.hexdigest()[:16],
    }


def refuse_unshared_folder(ranks: Ranks, folder: Path) -> None:
    """All ranks must see the files that the first one writes."""
    token = ranks.agreed(secrets.token_hex(8))
    path = folder / f"{_TOKEN}-{token}"
    if ranks.is_first:
        path.touch()
    ranks.wait_for_all()
    missing = [rank for rank, there in enumerate(ranks.gather_json(path.exists())) if not there]
    if ranks.is_first:
        path.unlink()
    if missing:
        raise RankError(
            f"rank {missing[0]} does not see {folder}, where rank 0 writes; use a folder that all machines share"
        )


def refuse_other_models(ranks: Ranks, model: Tree, t: int) -> None:
    """Every rank settles rounds by itself, which gives the same bits on machines of one kind."""
    found = ranks.gather_json(tree_sha256(model))
    other = next((rank for rank, digest in enumerate(found) if digest != found[0]), None)
    if other is not None:
        raise RankError(
            f"after round {t} rank {other} has another model than rank 0; use machines of one kind, with one torch"
        )
