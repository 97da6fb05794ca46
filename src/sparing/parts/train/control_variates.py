"""Control variates (SCAFFOLD), both ends: what keeps clients from drifting apart while they train.

Every step of client k is corrected by c - c_k. After T steps from x to y, c_k becomes c_k - c + (x - y) / (T lr): the
mean gradient it has just seen. The change travels to the server, whose c moves by (1 / N) sum over those here of the
change of c_k, so that it stays the mean of c_k over all N clients. What is blended is a mean over those here, so it is
scaled by their part in all: |S| / N, or with weights by samples the part of all samples that they hold.
"""

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import MethodError
from sparing.core.method import (
    Arrival,
    Blended,
    Lesson,
    Method,
    Phase,
    Report,
    Share,
    Step,
    Train,
    Trained,
    Wrap,
    by_samples,
    evenly,
    nothing,
)
from sparing.core.parcel import Cut, Cuts, Parcel
from sparing.core.reduce import total
from sparing.core.tree import Layout, Tree, column, under

SUFFIX = "control"


def control_variates_share(names: list[str]) -> Share:
    """The control variates of these tensors, both ways."""
    cuts: Cuts = {f"{name}.{SUFFIX}": Cut() for name in names}
    return Share(down=lambda state, model, ctx: cuts, up=lambda got, ctx: cuts)


def server_control_variates(model: Tree, names: list[str]) -> Tree:
    """The server's control variates before the first round."""
    return {f"{name}.{SUFFIX}": torch.zeros_like(model[name]) for name in names}


def client_control_variates(layout: Layout, names: list[str]) -> Tree:
    """A client's own control variates before its first round, leaves `[1, ...]`."""
    return {f"{SUFFIX}/{name}": torch.zeros(1, *layout.shapes[name], dtype=layout.dtypes[name]) for name in names}


def correct_by_control_variates() -> Wrap:
    """Around local training: every gradient is corrected, then the client's control variates are renewed."""

    def around(train: Train, phases: tuple[Phase, ...]) -> Train:
        def correct(lesson: Lesson, ctx: Ctx) -> Trained:
            if not any(phase.correct for phase in lesson.phases):
                return train(lesson, ctx)
            mine = under(SUFFIX, lesson.memory)
            pull = {name: lesson.start[f"{name}.{SUFFIX}"] - c for name, c in mine.items()}
            return renewed_variates(lesson, train(lesson._replace(pull=pull), ctx), ctx)

        return correct

    return Wrap(around)


def renewed_variates(lesson: Lesson, done: Trained, ctx: Ctx) -> Trained:
    """The client's control variates after training; what goes up is the server's plus the change."""
    out, memory, start, counts = {}, dict(done.memory), lesson.start, ctx.n.tolist()
    reach = [(phase, [phase.at(ctx).optimiser.lr * phase.steps_with(n) for n in counts]) for phase in lesson.phases]
    for name, mine in under(SUFFIX, lesson.memory).items():
        moved = [lengths for phase, lengths in reach if phase.trains is None or name in phase.trains]
        server, new = start[f"{name}.{SUFFIX}"], mine
        if moved:
            length_K = torch.tensor([sum(parts) for parts in zip(*moved, strict=True)], dtype=mine.dtype)
            gradient = (start[name] - done.after[name]) / column(length_K.to(mine.device), mine)
            new = memory[f"{SUFFIX}/{name}"] = (mine - server + gradient).to(mine.dtype)
        out[f"{name}.{SUFFIX}"] = server + (new - mine)
    return Trained({**done.after, **out}, memory, done.notes)


def take_back_unsent(decoded: Parcel, memory: Tree) -> Tree:
    """Whose upload was lost has not taken part: the change is taken back, to rounding."""
    leaves, out = decoded.leaves, dict(memory)
    for key in memory:
        name = f"{key.removeprefix(SUFFIX + '/')}.{SUFFIX}"
        if key.startswith(f"{SUFFIX}/") and name in leaves:
            out[key] = memory[key] - leaves[name].value
    return out


def scale_control_variates_step(names: list[str], weights: str) -> Step:
    """Scales the mean change of the control variates by the part of all clients, or samples, that is here."""

    def watch(state: Tree, arrival: Arrival) -> dict[str, Tensor]:
        return {"n": arrival.notes["n"]}

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        share = len(blended.ids) / (ctx.clients - ctx.held)
        if weights == "samples":
            share = float(total(blended.seen["n"][None])) / ctx.samples
        ours = {f"{name}.{SUFFIX}" for name in names}
        return {name: x * share if name in ours else x for name, x in blended.update.items()}, state, {}

    return Step(apply, watch=watch if weights == "samples" else nothing, name="scaffold", needs_mean=True)


def refuse_unlike_means(method: Method) -> None:
    """The server's c is a mean over all clients, of what is shared, only if every change of a c_k counts as it is."""
    home, blend = method.share.private, method.blend
    for name in method.layout.params:
        if f"{name}.{SUFFIX}" in method.layout.extra and (name in home) != (f"{name}.{SUFFIX}" in home):
            raise MethodError(
                "a recipe after scaffold keeps layers at home, where nothing is to be corrected; put scaffold after it"
            )
    odd = [s.name for s in blend.steps if s.receive is not None or (s.serving and not s.serving.notes)]
    if blend.weigh.name not in (by_samples.name, evenly.name):
        odd.append(blend.weigh.name)
    if method.privacy is not None:
        odd.append("dp")
    if odd:
        raise MethodError(
            "scaffold's control variates are means over all clients, which needs one model for all, updates as "
            f"they are, and weights that stay the same; drop {odd[0]!r}"
        )


def refuse_other_optimisers(phases: tuple[Phase, ...]) -> None:
    """(x - y) / (T lr) is a mean gradient only where every step is lr times a gradient."""
    for phase in phases:
        how = phase.optimiser
        if how.name != "sgd" or how.momentum or how.options:
            seen = f"momentum {how.momentum:g}" if how.name == "sgd" and how.momentum else how.name
            raise MethodError(
                f"scaffold needs plain SGD in local training, seen {seen}; set local.optimiser to sgd "
                "and local.momentum to 0"
            )
