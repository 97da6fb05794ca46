"""Who owns which sample: partitions as pure functions of (labels or natural ids, seed), the same on any machine.

`partition_dataset` reads a split as a study writes it and shares a dataset out; `split_report` says what came
of it. The laws are
functions too: labels.py, classes.py and sizes.py look at labels alone and give every sample to exactly one client;
natural_ids.py goes by ids, index_lists.py by what a file says. No client is ever empty.
"""

from sparing.split.classes import pathological_split
from sparing.split.dealing import ClientParts
from sparing.split.labels import dirichlet_split, iid_split
from sparing.split.partition import DatasetPartition, partition_dataset
from sparing.split.sizes import label_quantity_split, quantity_split
from sparing.split.summary import SplitReport, split_report, split_report_lines
from sparing.split.train_test import split_train_test

__all__ = [
    "ClientParts",
    "DatasetPartition",
    "SplitReport",
    "dirichlet_split",
    "iid_split",
    "label_quantity_split",
    "partition_dataset",
    "pathological_split",
    "quantity_split",
    "split_report",
    "split_report_lines",
    "split_train_test",
]
