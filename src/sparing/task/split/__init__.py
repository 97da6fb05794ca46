"""Who owns which sample: partitions as pure functions of (labels or natural ids, seed), the same on any machine.

`partition` reads a split as a study writes it and shares a dataset out; `report` says what came of it. The laws are
functions too: labels.py, classes.py and sizes.py look at labels alone and give every sample to exactly one client;
natural.py goes by ids, lists.py by what a file says. No client is ever empty.
"""

from sparing.task.split.classes import pathological
from sparing.task.split.cut import train_test
from sparing.task.split.deal import Parts
from sparing.task.split.labels import dirichlet, iid
from sparing.task.split.partition import Partition, partition
from sparing.task.split.report import Report, lines, report
from sparing.task.split.sizes import label_quantity, quantity

__all__ = [
    "Partition",
    "Parts",
    "Report",
    "dirichlet",
    "iid",
    "label_quantity",
    "lines",
    "partition",
    "pathological",
    "quantity",
    "report",
    "train_test",
]
