"""Sizes in bytes as people write them: 20000, "20kB", "500MB"."""

import re

from sparing.core.errors import ConfigError

_BYTE_UNITS = {"": 1, "B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def bytes_of_text(text: int | str, what: str = "budget.bytes") -> float:
    """
    >>> bytes_of_text("20kB"), bytes_of_text(500)
    (20000.0, 500.0)
    """
    found = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*(B|kB|MB|GB|)\s*", str(text))
    if not found:
        raise ConfigError(f"{what} is {text!r}; write a number of bytes, such as 20000 or 20kB")
    return float(found[1]) * _BYTE_UNITS[found[2]]
