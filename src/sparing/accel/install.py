"""Accelerators are registered here, all of them or none: SPARING_PLAIN=1 in the environment leaves the plain paths."""

import os
from collections.abc import Callable
from typing import Any

from sparing.accel import (
    engine_bodies,
    fedhm_bodies,
    fold_bodies,
    grown,
    joined_sizes,
    quantise_bodies,
    reduce_bodies,
    stein_bodies,
    transfer,
    tree_bodies,
    wire_bodies,
)
from sparing.accel.train_cpu.fast_copy import frozen_fast_copy, lend_frozen
from sparing.accel.train_cpu.implicit import train_implicit
from sparing.accel.train_cpu.loop_fast import train_loop_fast
from sparing.accel.train_cuda.captured import train_recorded_or_stacked
from sparing.accel.train_stacked.scores import stacked_scores
from sparing.core import factors, fold, gaussian, keys, ops, reduce, svd, tree, votes
from sparing.core.operation import Operation, register
from sparing.core.wire import count
from sparing.engines import sizes, stale
from sparing.parts import lowrank, quant, selectors, stein
from sparing.run import bank
from sparing.train import lesson, optim
from sparing.train.evaluate import Runner
from sparing.train.paths import PATHS, TrainPath

SWITCH = "SPARING_PLAIN"


def install() -> None:
    """Register every accelerator, unless the environment asks for none."""
    if os.environ.get(SWITCH, "0") not in ("", "0"):
        return
    _install_paths()
    for made, body in BODIES:
        register(made, body)


def _install_paths() -> None:
    one_by_one = Runner(frozen_fast_copy, lend_frozen)
    at_once = Runner(frozen_fast_copy, lend_frozen, stacked_scores)
    PATHS["loop-fast"] = TrainPath(train_loop_fast, one_by_one, in_turn=True)
    PATHS["stacked"] = TrainPath(train_recorded_or_stacked, at_once, in_turn=False)
    PATHS["implicit"] = TrainPath(train_implicit, at_once, in_turn=False)


BODIES: tuple[tuple[Operation, Callable[..., Any]], ...] = (
    (ops.clear, tree_bodies.clear),
    (ops.overlay, tree_bodies.overlay),
    (ops.increments, tree_bodies.increments),
    (ops.against, tree_bodies.against),
    (ops.add_each, tree_bodies.add_each),
    (ops.move, tree_bodies.move),
    (ops.bounds, tree_bodies.bounds),
    (ops.is_formed, tree_bodies.is_formed),
    (ops.place, transfer.place),
    (ops.constants, transfer.constants),
    (ops.to_host, transfer.to_host),
    (tree.cleared, transfer.cleared),
    (ops.restrict, grown.restrict),
    (fold.add_to_sums, fold_bodies.add_to_sums),
    (votes.add_votes, fold_bodies.add_votes),
    (votes.divide_by_votes, fold_bodies.divide_by_votes),
    (reduce.total, reduce_bodies.total),
    (reduce.dots, reduce_bodies.dots),
    (reduce.largest, reduce_bodies.largest),
    (reduce.keep_largest, reduce_bodies.keep_largest),
    (keys.choose, reduce_bodies.choose),
    (gaussian.root, reduce_bodies.root),
    (selectors.least_of, reduce_bodies.least_of),
    (quant.codes_of_leaf, quantise_bodies.codes_of_leaf),
    (quant.values_of_leaf, quantise_bodies.values_of_leaf),
    (stein.targets, stein_bodies.targets),
    (stein.coefficients, stein_bodies.coefficients),
    (stein.shrink_and_follow, stein_bodies.shrink_and_follow),
    (factors.product, fedhm_bodies.product),
    (factors.squared, fedhm_bodies.squared),
    (svd.begins_anew, fedhm_bodies.begins_anew),
    (svd.strongest, fedhm_bodies.strongest),
    (lowrank.decompose, fedhm_bodies.decompose),
    (count.index_sizes, wire_bodies.index_sizes),
    (sizes.join_sizes, joined_sizes.join_sizes),
    (sizes.upload_sizes, joined_sizes.upload_sizes),
    (sizes.download_sizes, joined_sizes.download_sizes),
    (stale.spreads, engine_bodies.spreads),
    (bank.mix_rows, engine_bodies.mix_rows),
    (optim.add_product, engine_bodies.add_product),
    (lesson.seems_finite, engine_bodies.seems_finite),
)
"""Every operation that has a faster body, and that."""
