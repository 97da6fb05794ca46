"""Differential privacy of whole clients: no update is longer than C, and normal noise covers what one can change.

    u_k <- u_k min(1, C / |u_k|)                        on the client, and once more on the server
    central:  mean <- (sum u_k + N(0, (z C)^2)) / m     the server adds noise to the sum of the m updates that arrived
    local:    u_k <- u_k + N(0, (z C)^2)                every client adds noise to its own update before it is sent

|u_k| is taken over everything that leaves the client. Adaptive clipping: each client says whether |u_k| <= C, b_k in
{0, 1}, and the server moves C towards the `quantile` of the lengths:

    b = (sum b_k + N(0, s^2)) / m,    C <- C exp(-rate (b - quantile))

Replacing a client changes sum b_k by 1 at most and sum u_k by 2 C, so together the two cost what noise z alone would,
if the updates get z_u C with z_u = (z^-2 - (2 s)^-2)^(-1/2).
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.context import Ctx, context
from sparing.core.errors import MethodError, WireError, check_range
from sparing.core.gaussian import Words, keyed_words
from sparing.core.gaussian import gaussian_noise as drawn_noise
from sparing.core.method import (
    Arrival,
    Blended,
    Codec,
    Effect,
    Form,
    Method,
    Report,
    Rows,
    Serving,
    Step,
    Trait,
    View,
    Weigh,
    by_samples,
)
from sparing.core.parcel import Parcel, Schema
from sparing.core.reduce import total
from sparing.core.tree import Tree, cleared, column

STAGE = "dp"
"""The name of the uplink's stage and of the server's step that keep the promise."""
CLIP, WITHIN = "clip", "within"
SUMMED = 1e-12
"""More than the rounding of a float64 sum, of however many terms, as a share of it."""


class Adapt(NamedTuple):
    """How the bound follows the lengths of the updates."""

    quantile: float = 0.5
    rate: float = 0.2
    noise: float | None = None  # s, on the count of those within the bound; None: see `_noise_on_count`


def clip_updates(update: Tree, bound_K: Tensor) -> tuple[Tree, Tensor]:
    """No longer than the bound, each client's update over all its tensors, and how long it was, `[K]`.

    What is scaled is made a little shorter than the bound, so that rounding cannot carry it beyond; entries that would
    be rounded more coarsely, because they are hardly numbers any more, become zero. Clipping twice is clipping once.
    """
    square_K = torch.zeros_like(bound_K)
    for name in sorted(update):
        square_K = square_K + total(update[name].double().square())
    length_K = square_K.sqrt()
    short = 2 * max((torch.finfo(x.dtype).eps for x in update.values()), default=0.0)
    factor_K = torch.where(length_K > bound_K * (1 - SUMMED), bound_K * (1 - max(short, 2 * SUMMED)) / length_K, 1.0)
    return {name: _scaled_down(x, column(factor_K, x)) for name, x in update.items()}, length_K


def _scaled_down(x: Tensor, factor_K: Tensor) -> Tensor:
    y = x.double() * factor_K
    return torch.where((factor_K < 1) & (y.abs() < torch.finfo(x.dtype).tiny), 0.0, y).to(x.dtype)


def clip_codec(bound: float, adapt: bool = False) -> Codec:
    """The client's part of central noise: clip, and with `adapt` say whether there was nothing to clip."""

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        bound_K = view.notes[CLIP].double() if adapt else _same_for_everyone(bound, view.ctx)
        values, length_K = clip_updates({name: leaf.value for name, leaf in parcel.leaves.items()}, bound_K)
        leaves = {name: leaf._replace(value=values[name]) for name, leaf in parcel.leaves.items()}
        said = {WITHIN: (length_K <= bound_K).float()} if adapt else {}
        return Parcel(leaves, parcel.notes | said), state

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        return expected._replace(notes=expected.notes | ({WITHIN: 1} if adapt else {}))

    return Codec(encode, schema=schema, name=STAGE)


def local_noise_codec(bound: float, noise: float, words: Words = keyed_words) -> Codec:
    """Clip and add noise before anything is sent. Samples are reported as one and the loss as zero: they would tell."""
    return _noise_codec(bound, lambda ctx: noise * bound, {"n": 1, "loss": 0}, words)


def noise_share_codec(bound: float, noise: float, honest: Callable[[int], int], words: Words = keyed_words) -> Codec:
    """Clip, and add one client's part of central noise: the parts of as many as `honest` of a cohort make all of it.

    The loss is reported as zero: a sum of losses has no noise.
    """
    return _noise_codec(bound, lambda ctx: noise_share(bound, noise, honest, ctx), {"loss": 0}, words)


def _noise_codec(bound: float, deviation: Callable[[Ctx], float], reported: Mapping[str, float], words: Words) -> Codec:
    """Clip and add noise of this standard deviation; notes are reported as these numbers, whatever they were."""

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        ctx = view.ctx
        values, _ = clip_updates({name: x.value for name, x in parcel.leaves.items()}, _same_for_everyone(bound, ctx))
        leaves, deviation_K = dict(parcel.leaves), _same_for_everyone(deviation(ctx), ctx)
        for name, x in values.items():
            value = (x.double() + drawn_noise(words, ctx, f"dp/{name}", x, deviation_K)).to(x.dtype)
            leaves[name] = leaves[name]._replace(value=cleared(value, leaves[name].scope))
        notes = {name: torch.full_like(parcel.notes[name], x) for name, x in reported.items()}
        return Parcel(leaves, parcel.notes | notes), state

    return Codec(encode, name=STAGE, effect=Effect(traits=Trait.NOISY | Trait.SUMMABLE))


def noise_share(bound: float, noise: float, honest: Callable[[int], int], ctx: Ctx) -> float:
    """The standard deviation of one client's part."""
    return noise * bound / math.sqrt(honest(ctx.cohort))


def summed_noise_step(bound: float, noise: float, honest: Callable[[int], int]) -> Step:
    """The server's part: it reports how much noise the mean has; the more clients arrive, the less."""

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        m = len(blended.ids)
        deviation = noise_share(bound, noise, honest, ctx) * math.sqrt(m) / m
        return blended.update, state, {"dp_clip": bound, "dp_noise": deviation}

    return Step(apply, name=STAGE, needs_mean=True)


def central_noise_step(bound: float, noise: float, adapt: Adapt | None = None, words: Words = keyed_words) -> Step:
    """The server's part: clip what arrived, whatever its stages made of it, and add noise to the sum."""
    if adapt is not None and adapt.noise is not None:
        check_range("dp.count_noise", adapt.noise, noise / 2, 1e6, open_low=True)

    def init(model: Tree, clients: int) -> Tree:
        device = next(iter(model.values())).device
        return {CLIP: torch.full((1,), bound, dtype=torch.float32, device=device)}

    def serve(state: Tree, model: Tree, ctx: Ctx, rows: Rows | None) -> tuple[Tree, dict[str, Tensor]]:
        return model, {CLIP: state[CLIP].expand(len(ctx.ids))}

    def receive(state: Tree, arrival: Arrival) -> Arrival:
        return arrival._replace(
            update=clip_updates(arrival.update, _same_for_everyone(float(state[CLIP]), arrival.ctx))[0]
        )

    def watch(state: Tree, arrival: Arrival) -> dict[str, Tensor]:
        if adapt is None:
            return {}
        within_K = arrival.notes[WITHIN]
        fine = (within_K == 0) | (within_K == 1)

        def odd() -> WireError:
            k = int((~fine).nonzero()[0])
            who, value = int(arrival.ctx.ids[k]), float(within_K[k])
            return WireError(f"round {arrival.ctx.round}: client {who} reported {value:g} as `within`; it is 0 or 1")

        arrival.ctx.require(fine, odd)
        return {WITHIN: within_K}

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        if blended.apart:
            raise MethodError(
                f"dp in central mode needs clients that share the same coordinates, but those of "
                f"{min(blended.apart)!r} differ; use one mask for all, or mode: local"
            )
        m, length = len(blended.ids), float(state[CLIP])
        deviation, common = noise_on_updates(noise, adapt, ctx) * length / m, ctx.common
        update = {}
        for name, x in blended.update.items():
            added = drawn_noise(words, common, f"dp/{name}", x, _same_for_everyone(deviation, common))
            update[name] = cleared(x + added, blended.covered[name])
        report = {"dp_clip": length, "dp_noise": deviation}
        if adapt is None:
            return update, state, report
        count = blended.seen[WITHIN].double().sum().reshape(1, 1)
        count = count + drawn_noise(
            words, common, "dp within", count, _same_for_everyone(_noise_on_count(noise, adapt, ctx), common)
        )
        share = float(count) / m
        after = length * math.exp(-adapt.rate * (share - adapt.quantile))
        return update, {CLIP: torch.full_like(state[CLIP], after)}, report

    serving = None if adapt is None else Serving(serve, notes={CLIP: 1})
    return Step(apply, init, watch, STAGE, needs_mean=True, receive=receive, serving=serving)


def _noise_on_count(noise: float, adapt: Adapt, ctx: Ctx) -> float:
    """s: a twentieth of the cohort, but in a small cohort as much as z, so that enough is left for the updates."""
    return max(ctx.cohort / 20, noise) if adapt.noise is None else adapt.noise


def noise_on_updates(noise: float, adapt: Adapt | None, ctx: Ctx) -> float:
    """z_u: what is left of the noise for the updates, once the count of those within the bound has its part."""
    if adapt is None or noise == 0:
        return noise
    return (noise**-2 - (2 * _noise_on_count(noise, adapt, ctx)) ** -2) ** -0.5


def _same_for_everyone(value: float, ctx: Ctx) -> Tensor:
    return torch.full((len(ctx.ids),), value, dtype=torch.float64, device=ctx.device)


as_if_one = Weigh(
    of=lambda state, arrival: (torch.ones(len(arrival.ctx.ids), dtype=torch.float64), {}),
    most=by_samples.most,
    name=by_samples.name,
    looks=False,
)
"""Weights by samples, of which every client reports one."""


def refuse_leaks(method: Method) -> None:
    """Refuse everything that would let out more than the accountant counts."""
    if method.privacy is None:
        return
    _refuse_buffers(method)
    _refuse_values(method)
    _refuse_stages(method.up, method.privacy.mode)
    if method.privacy.mode != "local":
        _refuse_server(method)


def _refuse_buffers(method: Method) -> None:
    """Noise on a running variance can turn it negative, and counts of batches tell how much data there is."""
    layout = method.layout
    for name in sorted(layout.buffers - layout.extra - method.share.private):
        raise MethodError(f"dp does not share buffers such as {name!r}; set local.buffers to static or own")


def _refuse_values(method: Method) -> None:
    for name in sorted(method.share.values):
        raise MethodError(f"{name!r} goes up as it is, past clipping and noise; drop what compares it on the server")


def _refuse_stages(stages: tuple[Codec, ...], mode: str) -> None:
    """Clipping needs values, local noise must be drawn before the data chooses positions, and notes are not noised."""
    before, passed = Form.VALUES, False
    late = Form.CODES | Form.BASIS | (Form.SPARSE if mode == "local" else Form.VALUES)
    for codec in stages:
        if codec.name == STAGE:
            passed = True
            if before & late:
                raise MethodError("dp must come before sparsifiers and quantisers; move it to the front of the list")
        elif notes_of(codec):
            raise MethodError(
                f"{codec.name!r} sends {notes_of(codec)[0]!r} as it is, computed from a client's data, which dp cannot "
                "cover; drop one"
            )
        before |= codec.effect.gives
    if not passed:
        raise MethodError("dp is promised, but no stage of the uplink clips; put dp into the list of recipes")


def notes_of(codec: Codec) -> list[str]:
    """The notes that this stage adds to a parcel."""
    return list(codec.schema(Schema({}, {}), context(0, 1, 1, [0], [1], 1, 1)).notes)


def _refuse_server(method: Method) -> None:
    """The noise covers a mean with equal weights, and whatever is computed from it afterwards."""
    blend = method.blend
    if method.fit is not None:
        raise MethodError("dp in central mode needs clients of one size; drop what resizes models, or use mode: local")
    if blend.collect is not None or blend.lenient:
        raise MethodError("dp in central mode needs a plain mean; drop the robust blend, or use mode: local")
    if blend.weigh.name != "uniform":
        raise MethodError(
            f"dp in central mode counts every client alike, but {blend.weigh.name!r} weighs them; drop it, or use "
            "mode: local"
        )
    for step in blend.steps:
        if step.name != STAGE and step.looks:
            raise MethodError(
                f"{step.name!r} looks at single updates before dp's noise is added; drop it, or use mode: local"
            )
    if blend.steps[0].name != STAGE:
        raise MethodError(f"the server's first step must be dp's noise, but it is {blend.steps[0].name!r}; put dp last")
