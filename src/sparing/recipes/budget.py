import re
from typing import Literal

from sparing.core.errors import ConfigError
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code.budget import byte_budget as parts

UNITS = {"": 1, "B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


@recipe("budget", paper="ours; after Shoham and Gersho 1988, doi:10.1109/29.90373")
def budget(
    bytes: int | str | None = None,
    by: Literal["best", "values", "components"] = "best",
    memory: bool = True,
) -> Recipe:
    """Send at most so many bytes, values or components of each layer as finely as these buy most."""
    most = float("inf") if bytes is None else bytes_of_text(bytes)

    def apply(method: Method) -> Method:
        codec = parts.budget_codec(method.layout, most, by, method.share.private)
        return method._replace(up=(*method.up, codec), memory=method.memory or memory)

    return apply


def bytes_of_text(text: int | str, what: str = "budget.bytes") -> float:
    """
    >>> bytes_of_text("20kB"), bytes_of_text(500)
    (20000.0, 500.0)
    """
    found = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*(B|kB|MB|GB|)\s*", str(text))
    if not found:
        raise ConfigError(f"{what} is {text!r}; write a number of bytes, such as 20000 or 20kB")
    return float(found[1]) * UNITS[found[2]]
