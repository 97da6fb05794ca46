"""Models known as a start and what was added to it; a sum is formed when somebody asks for it."""

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from sparing.accel.lazy_product import add_formed
from sparing.core import ops
from sparing.core.tree import Tree


class Grown(Mapping[str, Tensor]):
    """
    >>> import torch
    >>> tree = Grown({"w": torch.ones(1, 2)}, {"w": torch.tensor([[0.5, 0.0], [1.0, 2.0]])})
    >>> tree["w"]
    tensor([[1.5000, 1.0000],
            [2.0000, 3.0000]])
    """

    def __init__(self, start: Tree, added: Tree):
        self.start, self.added, self.formed = start, added, dict[str, Tensor]()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.formed:
            self.formed[name] = add_formed(self.start[name], self.added[name])
        return self.formed[name]

    def __contains__(self, name: object) -> bool:
        return name in self.added

    def __iter__(self) -> Iterator[str]:
        return iter(self.added)

    def __len__(self) -> int:
        return len(self.added)


def fast_restrict(tree: Mapping[str, Tensor], names: Iterable[str]) -> Mapping[str, Tensor]:
    """`ops.restrict` that forms nothing."""
    if isinstance(tree, Grown):
        return Grown(tree.start, {name: tree.added[name] for name in names})
    return ops.restrict.plain(tree, names)


def since(tree: Mapping[str, Tensor], name: str, base: Tensor | None) -> Tensor:
    """`tree[name] - base`, or what was added, where it was added to just that; without a base the tensor itself."""
    if base is None:
        return tree[name]
    return tree.added[name] if isinstance(tree, Grown) and tree.start[name] is base else tree[name] - base
