import re

from sparing.core.errors import ConfigError
from sparing.core.protocols import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts import components
from sparing.parts.components import Wanted

UNITS = {"": 1, "B": 1, "kB": 1e3, "MB": 1e6}


@recipe("lowrank", paper="ours; after Vogels et al. 2019, arXiv:1905.13727")
def lowrank(
    energy: float | None = None, rank: int = 32, budget: int | str | None = None, memory: bool = True
) -> Recipe:
    """Send the strongest components of each matrix, in codes as fine as they deserve, and vectors in few bits."""
    if budget is None:
        wanted = Wanted(0.9 if energy is None else energy)
    else:
        wanted = Wanted(1.0 if energy is None else energy, bytes_in(budget))

    def apply(method: Method) -> Method:
        codec = components.components(method.layout, wanted, rank, method.share.private)
        return method._replace(up=(*method.up, codec), memory=method.memory or memory)

    return apply


def bytes_in(budget: int | str) -> float:
    """
    >>> bytes_in("20kB"), bytes_in(500)
    (20000.0, 500.0)
    """
    found = re.fullmatch(r"\s*([0-9.]+)\s*(B|kB|MB|)\s*", str(budget))
    if not found or found[1].count(".") > 1 or found[1] == ".":
        raise ConfigError(f"lowrank.budget is {budget!r}; write a number of bytes, such as 20000 or '20kB'")
    return float(found[1]) * UNITS[found[2]]
