"""What the shell offers after a tab. `sparing --install-completion` sets it up."""

import glob
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparing.runs.study import StudySection


def complete_datasets(incomplete: str) -> list[str]:
    from sparing.runs.known_names import known_names

    return _names_starting_with(incomplete, known_names().datasets)


def complete_methods(incomplete: str) -> list[str]:
    """Names, and names after a plus.

    >>> complete_methods("psfed+int")
    ['psfed+int4', 'psfed+int8']
    """
    from sparing.runs.known_names import known_names

    before, plus, last = incomplete.rpartition("+")
    return [f"{before}{plus}{name}" for name in _names_starting_with(last, known_names().methods)]


def complete_study_items(incomplete: str) -> list[str]:
    """Study files, keys of a study, and the values of two of them.

    >>> complete_study_items("task.da"), complete_study_items("task.data=digits")
    (['task.data='], ['task.data=digits'])
    """
    key, equals, value = incomplete.partition("=")
    if equals:
        offers = {"method": complete_methods, "task.data": complete_datasets}.get(key)
        return [f"{key}={one}" for one in offers(value)] if offers else []
    from sparing.runs.study import Study

    files = glob.glob(f"{glob.escape(incomplete)}*.yaml")
    return sorted(files) + _names_starting_with(incomplete, (f"{name}=" for name in _study_keys(Study)))


def _study_keys(section: "type[StudySection]", above: str = "") -> Iterable[str]:
    from sparing.runs.study import StudySection

    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, StudySection):
            yield from _study_keys(inner, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def _names_starting_with(with_: str, names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(with_))
