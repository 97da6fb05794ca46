"""A second model on every client (Ditto), NAME.second: its own, never sent, at first the initial model."""

from sparing.core.protocols import Share
from sparing.core.tree import Tree

SUFFIX = "second"


def alone(names: list[str]) -> Share:
    """The second model of these tensors stays at home."""
    mine = frozenset(f"{name}.{SUFFIX}" for name in names)
    return Share(down=lambda state, model, ctx: {}, up=lambda got, ctx: {}, own=mine, private=mine)


def copied(model: Tree, names: list[str]) -> Tree:
    return {f"{name}.{SUFFIX}": model[name] for name in names}
