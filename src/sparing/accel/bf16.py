"""Where local training in bfloat16 is refused."""

from sparing.core.errors import ConfigError
from sparing.train.call import PathCall


def refuse_half_on_cuda(lesson: PathCall) -> None:
    """There it is for recorded steps alone."""
    if lesson.precision == "bf16" and lesson.device.type == "cuda":
        raise ConfigError(
            "plan.precision is bf16, which on CUDA is for training that can be recorded: path stacked, SGD without "
            "prox, correction or kept velocities, and no BatchNorm where clients take unequal numbers of steps; use "
            "tf32 or float32"
        )
