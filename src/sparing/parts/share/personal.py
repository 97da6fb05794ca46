"""Personal layers: some modules never leave the client, the rest is shared."""

import warnings

from sparing.core.errors import MethodError, nearest_name
from sparing.core.method import Share
from sparing.core.parcel import Cut, Cuts
from sparing.core.tree import Layout


def personal_share(layout: Layout, layers: list[str] | None = None, shared: list[str] | None = None) -> Share:
    """Tensors of `layers` are the client's own and private; by default those of the last layer."""
    if layers == []:
        raise MethodError("personal.layers is empty; name at least one layer, or leave it out for the last one")
    return stay_home_share(layout, personal_tensors(layout, layers, shared))


def stay_home_share(layout: Layout, home: frozenset[str]) -> Share:
    """The tensors `home` never cross the wire, all others do."""
    cuts: Cuts = {name: Cut() for name in layout.shapes if name not in home}
    down, up = (lambda state, model, ctx: cuts), (lambda got, ctx: cuts)
    return Share(down, up, own=home, private=home)


def personal_tensors(
    layout: Layout, layers: list[str] | None = None, shared: list[str] | None = None
) -> frozenset[str]:
    """The personal tensors. With one list the rest is the other set; with none, the last layer is personal.

    >>> layout = Layout({"conv.weight": (3,), "head.weight": (3,)}, {})
    >>> personal_tensors(layout), personal_tensors(layout, shared=["head"])
    (frozenset({'head.weight'}), frozenset({'conv.weight'}))
    """
    if layers is None and shared is None:
        return head_tensors(layout)
    home = None if layers is None else matching_tensors(layout, layers, "personal layers")
    away = None if shared is None else matching_tensors(layout, shared, "shared layers")
    if home is None or away is None:
        return home if home is not None else frozenset(layout.shapes) - (away or frozenset())
    for name in layout.shapes:
        if (name in home) == (name in away):
            found = "both" if name in home else "neither"
            raise MethodError(
                f"{name!r} is in {found} of the shared and the personal layers; each belongs to one: drop one of the "
                "lists, and the rest is the other"
            )
    return home


def head_tensors(layout: Layout) -> frozenset[str]:
    """The last module that has parameters."""
    module = layout.params[-1].rpartition(".")[0]
    return frozenset(name for name in layout.shapes if name.rpartition(".")[0] == module)


def matching_tensors(layout: Layout, patterns: list[str], where: str) -> frozenset[str]:
    """Tensors whose path holds one of the patterns as whole components ("bn1" is not "bn10"), buffers of a layer too.

    >>> import torch
    >>> layout = Layout({"bn1.weight": (3,), "bn10.weight": (3,)}, {})
    >>> matching_tensors(layout, ["bn1"], "personal layers")
    frozenset({'bn1.weight'})
    """
    found: set[str] = set()
    missed = []
    for pattern in patterns:
        hits = {name for name in layout.shapes if f".{pattern}." in f".{name}."}
        found |= hits
        if not hits:
            missed.append(pattern)
    if missed:
        modules = {name.rpartition(".")[0] for name in layout.shapes}
        text = f"{where}: {missed[0]!r} matches no layer; {nearest_name(missed[0], modules)}"
        if not found:
            raise MethodError(text)
        warnings.warn(text, stacklevel=2)
    touched = {name.rpartition(".")[0] for name in found - layout.buffers}
    return frozenset(found | {name for name in layout.buffers if name.rpartition(".")[0] in touched})
