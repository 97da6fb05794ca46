"""sparing: federated learning that sends only what matters."""

import importlib
from typing import TYPE_CHECKING

from sparing.core.lazy import lazy_names
from sparing.core.operation import before_first_operation

if TYPE_CHECKING:
    from sparing.core.errors import SparingError
    from sparing.reports.from_python import ComparedRuns, compare, report
    from sparing.runs.cost import StudyCost, check
    from sparing.runs.explanation import Explanation, explain
    from sparing.runs.export import export
    from sparing.runs.results import Record, Result
    from sparing.runs.start import resume, run, set_seed
    from sparing.sweeps.from_python import SweepResult, sweep
    from sparing.tasks.task import Task

__version__ = "0.1.0"
__all__ = [
    "ComparedRuns",
    "Explanation",
    "Record",
    "Result",
    "SparingError",
    "StudyCost",
    "SweepResult",
    "Task",
    "check",
    "compare",
    "explain",
    "export",
    "report",
    "resume",
    "run",
    "set_seed",
    "sweep",
]

__getattr__ = lazy_names(
    __name__,
    {
        "ComparedRuns": "sparing.reports.from_python",
        "Explanation": "sparing.runs.explanation",
        "Record": "sparing.runs.results",
        "Result": "sparing.runs.results",
        "SparingError": "sparing.core.errors",
        "StudyCost": "sparing.runs.cost",
        "SweepResult": "sparing.sweeps.from_python",
        "Task": "sparing.tasks.task",
        "check": "sparing.runs.cost",
        "compare": "sparing.reports.from_python",
        "explain": "sparing.runs.explanation",
        "export": "sparing.runs.export",
        "report": "sparing.reports.from_python",
        "resume": "sparing.runs.start",
        "run": "sparing.runs.start",
        "set_seed": "sparing.runs.start",
        "sweep": "sparing.sweeps.from_python",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


before_first_operation(lambda: importlib.import_module("sparing.accel.install"))
