"""What the shell offers after a tab. `sparing --install-completion` sets it up."""

import glob
from collections.abc import Iterable

from sparing.core.registry import known as known_methods
from sparing.run.config import Section, Study
from sparing.task.data import known as known_data


def datasets(incomplete: str) -> list[str]:
    return starting(incomplete, known_data())


def methods(incomplete: str) -> list[str]:
    """Names, and names after a plus.

    >>> methods("psfed+int")
    ['psfed+int4', 'psfed+int8']
    """
    before, plus, last = incomplete.rpartition("+")
    return [f"{before}{plus}{name}" for name in starting(last, known_methods())]


def study_items(incomplete: str) -> list[str]:
    """Study files, keys of a study, and the values of two of them.

    >>> study_items("task.da"), study_items("task.data=digits")
    (['task.data='], ['task.data=digits'])
    """
    key, equals, value = incomplete.partition("=")
    if equals:
        offers = {"method": methods, "task.data": datasets}.get(key)
        return [f"{key}={one}" for one in offers(value)] if offers else []
    files = glob.glob(f"{glob.escape(incomplete)}*.yaml")
    return sorted(files) + starting(incomplete, (f"{name}=" for name in keys(Study)))


def keys(section: type[Section], above: str = "") -> Iterable[str]:
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from keys(inner, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def starting(with_: str, names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(with_))
