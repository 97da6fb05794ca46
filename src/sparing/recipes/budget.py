from typing import Literal

from sparing.core.byte_sizes import bytes_of_text
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code.budget import byte_budget as parts


@recipe("budget", paper="ours; after Shoham and Gersho 1988, doi:10.1109/29.90373")
def budget(
    bytes: int | str | None = None,
    by: Literal["best", "values", "components"] = "best",
    memory: bool = True,
) -> Recipe:
    """Spend a fixed byte budget per upload where it reduces error most."""
    most = float("inf") if bytes is None else bytes_of_text(bytes)

    def apply(method: Method) -> Method:
        codec = parts.budget_codec(method.layout, most, by, method.share.private)
        return method._replace(up=(*method.up, codec), memory=method.memory or memory)

    return apply
