"""The exception tree: every error the library raises on purpose.

SparingError              one sentence: what, where, the value seen, the fix
  ConfigError             a study, key, name or number that cannot be meant
  DataError               samples that cannot be trained on
  MethodError             parts that do not make sense together
  TrainingError           numbers that left the finite world while running
    UploadError           in what one client sent
  WireError               bytes that are not a parcel
  CheckpointError         a saved run that cannot be continued
  FederationError         a federation that cannot go on as it is
  SecureError             a step of a secure sum that is refused, or a sum that cannot be unmasked
  RankError               a run of several processes that has lost one of them, or whose processes disagree
"""

import difflib
import math
from collections.abc import Iterable


class SparingError(Exception):
    """Base of all: catch this one to catch everything the library says."""


class ConfigError(SparingError):
    pass


class DataError(SparingError):
    pass


class MethodError(SparingError):
    pass


class TrainingError(SparingError):
    pass


class UploadError(TrainingError):
    """`client`: who sent it."""

    client: int = -1

    @classmethod
    def of(cls, client: int, words: str) -> "UploadError":
        error = cls(words)
        error.client = client
        return error


class WireError(SparingError):
    pass


class CheckpointError(SparingError):
    pass


class FederationError(SparingError):
    pass


class SecureError(SparingError):
    pass


class RankError(SparingError):
    pass


def unsummable(why: str) -> MethodError:
    """A method that secure aggregation cannot sum; `why` ends with what to use in its place."""
    return MethodError(f"secure: the server sees sums only, but {why}")


def nearest_name(name: str, known: Iterable[str]) -> str:
    """The closest known name as a hint, or what there is to choose from.

    >>> nearest_name("topkk", ["topk", "int8"])
    "did you mean 'topk'?"
    """
    known = sorted(known)
    lower = {word.lower(): word for word in known}
    close = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    return f"did you mean {lower[close[0]]!r}?" if close else "known: " + ", ".join(known)


def check_range(what: str, value: float, low: float, high: float, open_low: bool = False) -> None:
    """Refuse a number outside [low, high], or (low, high] where the lower end is open.

    >>> check_range("topk.ratio", 1.5, 0, 1)
    Traceback (most recent call last):
    sparing.core.errors.ConfigError: topk.ratio is 1.5; it must lie between 0 and 1
    >>> check_range("lora.alpha", 0, 0, math.inf, open_low=True)
    Traceback (most recent call last):
    sparing.core.errors.ConfigError: lora.alpha is 0; it must be above 0
    """
    inside = (low < value if open_low else low <= value) and value <= high
    if not inside:
        between = f"be above {low:g} and at most {high:g}" if open_low else f"lie between {low:g} and {high:g}"
        if high == math.inf:
            between = f"be above {low:g}" if open_low else f"be at least {low:g}"
        raise ConfigError(f"{what} is {value}; it must {between}")
