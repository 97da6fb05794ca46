"""sparing: federated learning that sends only what matters."""

import importlib
from typing import TYPE_CHECKING

from sparing.core.lazy import lazy_names
from sparing.core.operation import before_first_operation

if TYPE_CHECKING:
    from sparing.core.errors import SparingError
    from sparing.runs.results import Record, Result
    from sparing.runs.start import resume, run, set_seed
    from sparing.tasks.task import Task

__version__ = "0.1.0"
__all__ = ["Record", "Result", "SparingError", "Task", "resume", "run", "set_seed"]

__getattr__ = lazy_names(
    __name__,
    {
        "Record": "sparing.runs.results",
        "Result": "sparing.runs.results",
        "SparingError": "sparing.core.errors",
        "Task": "sparing.tasks.task",
        "resume": "sparing.runs.start",
        "run": "sparing.runs.start",
        "set_seed": "sparing.runs.start",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


before_first_operation(lambda: importlib.import_module("sparing.accel.install"))
