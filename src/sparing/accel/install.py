"""Accelerators are registered here, all of them or none: SPARING_PLAIN=1 in the environment leaves the plain paths."""

import os

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
from sparing.core.operation import register
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
    _install_bodies()


def _install_paths() -> None:
    one_by_one = Runner(frozen_fast_copy, lend_frozen)
    at_once = Runner(frozen_fast_copy, lend_frozen, stacked_scores)
    PATHS["loop-fast"] = TrainPath(train_loop_fast, one_by_one, in_turn=True)
    PATHS["stacked"] = TrainPath(train_recorded_or_stacked, at_once, in_turn=False)
    PATHS["implicit"] = TrainPath(train_implicit, at_once, in_turn=False)


def _install_bodies() -> None:
    for name in ("clear", "overlay", "increments", "against", "add_each", "move", "bounds", "is_formed"):
        register(getattr(ops, name), getattr(tree_bodies, name))
    for name in ("place", "constants", "to_host"):
        register(getattr(ops, name), getattr(transfer, name))
    register(tree.cleared, transfer.cleared)
    register(ops.restrict, grown.restrict)
    register(fold.add_to_sums, fold_bodies.add_to_sums)
    register(votes.add_votes, fold_bodies.add_votes)
    register(votes.divide_by_votes, fold_bodies.divide_by_votes)
    for name in ("total", "dots", "largest", "keep_largest"):
        register(getattr(reduce, name), getattr(reduce_bodies, name))
    register(keys.choose, reduce_bodies.choose)
    register(gaussian.root, reduce_bodies.root)
    register(selectors.least_of, reduce_bodies.least_of)
    register(quant.codes_of_leaf, quantise_bodies.codes_of_leaf)
    register(quant.values_of_leaf, quantise_bodies.values_of_leaf)
    register(stein.targets, stein_bodies.targets)
    register(stein.coefficients, stein_bodies.coefficients)
    register(stein.shrink_and_follow, stein_bodies.shrink_and_follow)
    for name in ("product", "squared"):
        register(getattr(factors, name), getattr(fedhm_bodies, name))
    for name in ("begins_anew", "strongest"):
        register(getattr(svd, name), getattr(fedhm_bodies, name))
    register(lowrank.decompose, fedhm_bodies.decompose)
    register(count.index_sizes, wire_bodies.index_sizes)
    for name in ("join_sizes", "upload_sizes", "download_sizes"):
        register(getattr(sizes, name), getattr(joined_sizes, name))
    register(stale.spreads, engine_bodies.spreads)
    register(bank.mix_rows, engine_bodies.mix_rows)
    register(optim.add_product, engine_bodies.add_product)
    register(lesson.seems_finite, engine_bodies.seems_finite)
