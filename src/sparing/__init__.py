"""sparing: federated learning that sends only what matters."""

from sparing.accel.install import install as _install
from sparing.core.errors import SparingError
from sparing.runs.results import Record, Result
from sparing.runs.start import resume, run, set_seed
from sparing.tasks.task import Task

_install()

__version__ = "0.1.0"
__all__ = ["Record", "Result", "SparingError", "Task", "resume", "run", "set_seed"]
