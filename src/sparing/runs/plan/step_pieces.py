"""What a training step keeps for its gradient is held to `plan.memory`: by logits that are formed a few at a time, then
by micro-batches, then by blocks that are computed again. Where a whole step fits, nothing changes.
"""

from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparing.core.errors import ConfigError
from sparing.engines.engine import Job
from sparing.parts.size.mixture import Mix
from sparing.runs.study import PlanSection
from sparing.train.activations import SampleActivations, sample_activations
from sparing.train.pieces import LOGITS_AT_ONCE, StepPieces

PIECE_KEYS = ("microbatch", "recompute", "logits")
_WHOLE = {"microbatch": "whole", "recompute": False, "logits": "whole"}
_LOGIT_COPIES = 4  # of the logits in a part: in float32, their exponentials, gradients


class StepMemory(NamedTuple):
    """What one client's step holds, and how it is taken."""

    plan: PlanSection  # without an "auto" among its pieces
    bytes: int  # of activations
    whole_bytes: int  # were the step taken at once


def asks_for_pieces(plan: PlanSection) -> bool:
    """Whether a study wants a step taken in pieces."""
    return any(getattr(plan, key) not in ("auto", whole) for key, whole in _WHOLE.items())


def pieces_as_given(plan: PlanSection) -> dict[str, Any]:
    """For clients elsewhere, of whose memory nothing is known: what a study does not ask for is not done."""
    return {key: whole if getattr(plan, key) == "auto" else getattr(plan, key) for key, whole in _WHOLE.items()}


def settle_pieces(plan: PlanSection, job: Job, room: int) -> StepMemory:
    """How a step is taken within so many bytes."""
    batch = _largest_batch(job)
    if _looks_around(job.model):
        _refuse_pieces(plan, "the model looks at whole batches (BatchNorm)")
        return StepMemory(_with_pieces(plan, "whole", False, "whole"), 0, 0)
    found = _activations(job)
    if job.precision == "bf16":  # of what autocast makes of the head
        found = found._replace(head_path="")
    if isinstance(job.model, Mix):
        _refuse_pieces(plan, "the model is split into bases")
    if plan.recompute is True and not found.blocks:
        raise ConfigError("plan.recompute is true, but the model has no repeated blocks to compute again; drop it")
    if plan.logits == "chunked" and not found.head_path:
        raise ConfigError(
            "plan.logits is chunked, which is for language models whose last layer, a dense one, gives the logits, "
            "under the usual loss and plan.precision; drop it"
        )
    part = min(_LOGIT_COPIES * LOGITS_AT_ONCE, batch * found.head)
    pays = batch * found.whole > room and batch * found.head > part
    chunks = plan.logits == "chunked" or (plan.logits == "auto" and pays)
    each, beside = found.held(plan.recompute is True, chunks), part if chunks else 0
    again = plan.recompute is True or (plan.recompute == "auto" and bool(found.blocks) and each + beside > room)
    each = found.held(again, chunks)
    size = min(batch, max(1, (room - beside) // max(1, each))) if plan.microbatch == "auto" else plan.microbatch
    micro = batch if size == "whole" else min(size, batch)
    held = micro * each + beside
    if plan.memory != "auto" and plan.microbatch == "auto" and held > room:
        raise ConfigError(
            f"plan.memory is {plan.memory}, but beside a client's model one sample alone takes {held:,} bytes of "
            "activations and logits; allow more"
        )
    settled = _with_pieces(plan, "whole" if micro >= batch else micro, again, "chunked" if chunks else "whole")
    return StepMemory(settled, held, batch * found.whole)


def step_pieces(plan: PlanSection, job: Job) -> StepPieces:
    """As training takes them; the layer that gives logits is found in the model."""
    head = _activations(job).head_path if plan.logits == "chunked" else ""
    return StepPieces(plan.microbatch if isinstance(plan.microbatch, int) else None, plan.recompute is True, head)


def without_pieces(plan: PlanSection) -> PlanSection:
    """On a path that takes whole steps."""
    _refuse_pieces(plan, f"path {plan.path} takes whole steps, unlike loop and loop-fast")
    return _with_pieces(plan, "whole", False, "whole")


def _with_pieces(plan: PlanSection, microbatch: int | str, recompute: bool, logits: str) -> PlanSection:
    return plan.model_copy(update={"microbatch": microbatch, "recompute": recompute, "logits": logits})


def _refuse_pieces(plan: PlanSection, why: str) -> None:
    for key, whole in _WHOLE.items():
        value = getattr(plan, key)
        if value not in ("auto", whole):
            raise ConfigError(f"plan.{key} is {str(value).lower()}, but {why}; drop it")


def _looks_around(model: nn.Module) -> bool:
    return any(isinstance(layer, _BatchNorm) for layer in model.modules())


def _largest_batch(job: Job) -> int:
    local, most = job.method.local, int(job.task.train.count.max())
    return max(min(phase.batch, most) for phase in (*local.phases, *local.wrapped_phases))


def _activations(job: Job) -> SampleActivations:
    """Of the largest model that clients train."""
    if isinstance(job.model, Mix):
        return SampleActivations(0)
    train, device = job.task.train, next(iter(job.initial.values())).device
    return sample_activations(job.model, job.task.loss, train.x, train.y, device)
