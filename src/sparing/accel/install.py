"""Accelerators are registered when this module is imported, all of them or none.

SPARING_PLAIN=1 in the environment leaves the plain paths.
"""

import os
from collections.abc import Callable
from typing import Any

from sparing.accel import (
    budget_bodies,
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
from sparing.accel.compiled import code_bodies, index_bodies, judge_bodies, rans_bodies, tight_bodies
from sparing.accel.train_cpu.fast_copy import frozen_fast_copy, lend_frozen
from sparing.accel.train_cpu.implicit import train_implicit
from sparing.accel.train_cpu.loop_fast import train_loop_fast
from sparing.accel.train_cuda.captured import train_recorded_or_stacked
from sparing.accel.train_cuda.compiled_path import train_compiled
from sparing.accel.train_stacked.scores import stacked_scores
from sparing.core import fold, gaussian, keys, ops, reduce, tree, versions, votes
from sparing.core.operation import Operation, register
from sparing.engines import divergence, parcel_sizes
from sparing.parts import factors
from sparing.parts.blend import stein
from sparing.parts.code import dead_zone, fedscr, quantisers
from sparing.parts.code.budget import byte_budget, matrices, rate_distortion, subspace
from sparing.parts.share import selectors
from sparing.parts.size.fedhm import low_rank, svd
from sparing.storage import bank
from sparing.train import call, optim
from sparing.train.evaluate import Runner
from sparing.train.paths import PATHS, TrainPath
from sparing.wire import count, index, levels, rans, tight_index, tight_values

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
    PATHS["compiled"] = TrainPath(train_compiled, at_once, in_turn=False)
    PATHS["implicit"] = TrainPath(train_implicit, at_once, in_turn=False)


BODIES: tuple[tuple[Operation, Callable[..., Any]], ...] = (
    (ops.clear, tree_bodies.fast_clear),
    (ops.overlay, tree_bodies.fast_overlay),
    (ops.increments, tree_bodies.fast_increments),
    (ops.against_model, tree_bodies.fast_against_model),
    (ops.add_each, tree_bodies.fast_add_each),
    (ops.move_model, tree_bodies.fast_move_model),
    (ops.bounds, tree_bodies.fast_bounds),
    (ops.is_formed, tree_bodies.fast_is_formed),
    (ops.place, transfer.fast_place),
    (ops.constants, transfer.fast_constants),
    (ops.to_host, transfer.fast_to_host),
    (tree.cleared, transfer.fast_cleared),
    (ops.restrict, grown.fast_restrict),
    (fold.add_to_sums, fold_bodies.fast_add_to_sums),
    (votes.add_votes, fold_bodies.fast_add_votes),
    (votes.divide_by_votes, fold_bodies.fast_divide_by_votes),
    (reduce.total, reduce_bodies.fast_total),
    (reduce.peaks, reduce_bodies.fast_peaks),
    (reduce.count_true, reduce_bodies.fast_count_true),
    (reduce.dots, reduce_bodies.fast_dots),
    (reduce.largest_in_rows, reduce_bodies.fast_largest_in_rows),
    (reduce.keep_largest, reduce_bodies.fast_keep_largest),
    (keys.choose, reduce_bodies.fast_choose),
    (gaussian.exact_root, reduce_bodies.fast_exact_root),
    (selectors.kth_largest, reduce_bodies.fast_kth_largest),
    (quantisers.codes_of_leaf, quantise_bodies.fast_codes_of_leaf),
    (quantisers.values_of_leaf, quantise_bodies.fast_values_of_leaf),
    (fedscr.keep_structures, reduce_bodies.fast_keep_structures),
    (fedscr.structure_strengths, reduce_bodies.fast_structure_strengths),
    (dead_zone.codes_of, code_bodies.compiled_codes_of),
    (dead_zone.rounded, code_bodies.compiled_rounded),
    (rate_distortion.judged, judge_bodies.compiled_judged),
    (dead_zone.values_of_codes, code_bodies.compiled_values_of_codes),
    (matrices.add_components, budget_bodies.fast_add_components),
    (byte_budget.sent_by_each, budget_bodies.fast_sent_by_each),
    (subspace.in_two_planes, code_bodies.compiled_in_two_planes),
    (subspace.whole_numbers, code_bodies.compiled_whole_numbers),
    (subspace.whole_product, budget_bodies.fast_whole_product),
    (subspace.eigen_pairs, budget_bodies.fast_eigen_pairs),
    (stein.stein_targets, stein_bodies.fast_stein_targets),
    (stein.stein_coefficients, stein_bodies.fast_stein_coefficients),
    (stein.shrink_and_follow, stein_bodies.fast_shrink_and_follow),
    (factors.factor_product, fedhm_bodies.fast_factor_product),
    (factors.gram_of_rows, fedhm_bodies.fast_gram_of_rows),
    (svd.begins_anew, fedhm_bodies.fast_begins_anew),
    (svd.strongest_eigenvectors, fedhm_bodies.fast_strongest_eigenvectors),
    (low_rank.decompose_weights, fedhm_bodies.fast_decompose_weights),
    (count.index_sizes, wire_bodies.fast_index_sizes),
    (count.written_sizes, wire_bodies.fast_written_sizes),
    (versions.read_back, wire_bodies.fast_read_back),
    (index.places_of, wire_bodies.fast_places_of),
    (index.quotient_sum, index_bodies.compiled_quotient_sum),
    (levels.class_of_kept, index_bodies.compiled_class_of_kept),
    (tight_values.sums_of, index_bodies.compiled_sums_of),
    (tight_index.encode_tight_index, tight_bodies.compiled_tight_index),
    (tight_values.encode_tight_values, tight_bodies.compiled_tight_values),
    (rans.plan_rans, rans_bodies.compiled_plan_rans),
    (rans.in_one_state, rans_bodies.compiled_in_one_state),
    (rans.read_one_state, rans_bodies.compiled_read_one_state),
    (rans.in_lanes, rans_bodies.compiled_in_lanes),
    (rans.read_lanes, rans_bodies.compiled_read_lanes),
    (parcel_sizes.join_sizes, joined_sizes.fast_join_sizes),
    (parcel_sizes.upload_sizes, joined_sizes.fast_upload_sizes),
    (parcel_sizes.download_sizes, joined_sizes.fast_download_sizes),
    (divergence.difference_sums, engine_bodies.fast_difference_sums),
    (bank.put_rows, engine_bodies.fast_put_rows),
    (bank.mix_rows, engine_bodies.fast_mix_rows),
    (optim.add_product, engine_bodies.fast_add_product),
    (call.seems_finite, engine_bodies.fast_seems_finite),
)
"""Every operation that has a faster body, and that."""

install()
