"""Who holds what: the numbers that tell one split from another."""

from math import exp, floor, lgamma, log
from typing import NamedTuple

import numpy as np

from sparing.data.dataset import Dataset
from sparing.split.partition import DatasetPartition, dataset_labels


class SplitReport(NamedTuple):
    """A split in numbers. A client's samples are its train, validation and test samples together."""

    data: str
    law: str
    counts: np.ndarray  # [labels, clients] samples
    train: np.ndarray  # [clients] samples
    validation: np.ndarray
    test: np.ndarray
    held_out: np.ndarray  # client ids
    left_out: int  # samples of nobody
    probe: int  # samples kept by the server
    global_test: int  # samples kept for the global model only
    names: list[str] | None  # of clients
    labels: list[str]
    skew: float  # mean total variation distance between a client's labels and everybody's: 0 alike, near 1 apart
    chance: float  # the skew that clients of these sizes would show by chance alone
    gini: float  # of the sizes: 0 all alike, near 1 one has it all

    @property
    def clients(self) -> int:
        return len(self.train)

    @property
    def sizes(self) -> np.ndarray:
        """Samples per client."""
        return self.train + self.validation + self.test

    @property
    def samples(self) -> int:
        return int(self.sizes.sum())

    @property
    def classes(self) -> np.ndarray:
        """Classes per client."""
        return (self.counts > 0).sum(0)


def split_report(partition: DatasetPartition, dataset: Dataset) -> SplitReport:
    """Count who holds what.

    >>> import torch
    >>> from sparing.split.partition import partition_dataset
    >>> pool = Dataset("toy", torch.zeros(40, 1), torch.arange(40) % 4, classes=4)
    >>> told = split_report(partition_dataset(pool, {"pathological": 2}, clients=4, seed=0), pool)
    >>> told.clients, told.sizes.tolist(), told.classes.tolist(), told.skew, told.gini
    (4, [10, 10, 10, 10], [2, 2, 2, 2], 0.5, 0.0)
    """
    whole = [np.concatenate(three) for three in zip(partition.train, partition.validation, partition.test, strict=True)]
    counts = _count_labels(dataset_labels(dataset), whole, dataset.classes)
    return SplitReport(
        data=dataset.name,
        law=partition.law,
        counts=counts,
        train=_part_lengths(partition.train),
        validation=_part_lengths(partition.validation),
        test=_part_lengths(partition.test),
        held_out=partition.held_out,
        left_out=len(partition.left_out),
        probe=len(partition.probe),
        global_test=0 if partition.global_test is None else len(partition.global_test),
        names=partition.names,
        labels=dataset.names.get("class") or [str(k) for k in range(dataset.classes)],
        skew=_label_skew(counts),
        chance=_skew_by_chance(counts),
        gini=_gini(_part_lengths(whole)),
    )


def _part_lengths(parts: list[np.ndarray]) -> np.ndarray:
    return np.array([len(part) for part in parts], np.int64)


def _count_labels(labels: np.ndarray, parts: list[np.ndarray], classes: int) -> np.ndarray:
    """`[labels, clients]` samples."""
    client = np.repeat(np.arange(len(parts)), _part_lengths(parts))
    place = labels[np.concatenate(parts)].astype(np.int64) * len(parts) + client
    return np.bincount(place, minlength=classes * len(parts)).reshape(classes, len(parts))


def _label_skew(counts: np.ndarray) -> float:
    """Mean over clients of the total variation distance to the pooled label distribution.

    >>> _label_skew(np.array([[5, 5], [5, 5]])), _label_skew(np.array([[9, 0], [0, 9]]))
    (0.0, 0.5)
    """
    mine, everybody = counts / counts.sum(0), counts.sum(1, keepdims=True) / counts.sum()
    return float(np.abs(mine - everybody).sum(0).mean() / 2)


def _skew_by_chance(counts: np.ndarray) -> float:
    """The skew expected where everybody draws at random from the pooled labels: small clients look skewed anyway.

    >>> round(_skew_by_chance(np.array([[1], [1]])), 3), round(_skew_by_chance(np.array([[500, 500], [500, 500]])), 3)
    (0.25, 0.013)
    """
    share = counts.sum(1) / counts.sum()
    if share.max() == 1:
        return 0.0
    sizes, how_often = np.unique(counts.sum(0), return_counts=True)
    expected = [sum(_binomial_deviation(n, p) for p in share[share > 0].tolist()) / 2 for n in sizes.tolist()]
    return float(np.average(expected, weights=how_often))


def _binomial_deviation(n: int, p: float) -> float:
    """Mean distance to p of the share of successes in n trials (De Moivre's closed form), 0 < p < 1."""
    m = floor(n * p) + 1
    ways = lgamma(n + 1) - lgamma(m + 1) - lgamma(n - m + 1)
    return 2 * m / n * exp(ways + m * log(p) + (n - m + 1) * log(1 - p))


def _gini(sizes: np.ndarray) -> float:
    """How unequal the sizes are.

    >>> _gini(np.array([7, 7, 7])), round(_gini(np.array([1, 0, 0, 0])), 2)
    (0.0, 0.75)
    """
    ranked, n = np.sort(sizes), len(sizes)
    return float((2 * np.arange(1, n + 1) - n - 1) @ ranked / (n * ranked.sum()))


def split_report_lines(told: SplitReport) -> list[str]:
    """The report for a terminal."""
    aside = f", {told.validation.sum():,} validation" if told.validation.sum() else ""
    out = [
        f"{told.data}, split by {told.law}",
        f"{told.clients:,} clients, {told.samples:,} samples: {told.train.sum():,} training{aside}, "
        f"{told.test.sum():,} test",
        f"samples per client: {_range_and_median(told.sizes)}; Gini {told.gini:.2f} (0: all equal)",
        f"classes per client: {_range_and_median(told.classes)}, of {len(told.counts)}",
        f"label skew: {told.skew:.2f}, {told.chance:.2f} expected by chance (0: none, near 1: disjoint)",
    ]
    if len(told.held_out):
        ids = ", ".join(map(str, told.held_out[:8])) + (", ..." if len(told.held_out) > 8 else "")
        out.append(f"held out: {len(told.held_out)} clients that never train ({ids})")
    if (told.test == 0).any():
        out.append(f"without a test sample: {(told.test == 0).sum():,} clients")
    if told.global_test:
        out.append(f"global test: {told.global_test:,} official test samples that belong to no client")
    if told.probe:
        out.append(f"probe: {told.probe:,} samples that the server keeps")
    if told.left_out:
        out.append(f"left out: {told.left_out:,} samples that belong to no client")
    return out


def _range_and_median(values: np.ndarray) -> str:
    """Smallest, median and largest, or the one value there is.

    >>> _range_and_median(np.array([3, 9, 4])), _range_and_median(np.array([2, 2]))
    ('3 to 9, median 4', '2')
    """
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}, median {np.median(values):,.4g}"
