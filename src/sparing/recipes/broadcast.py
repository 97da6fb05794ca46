from collections.abc import Sequence

from sparing.core.compose import broadcast_by
from sparing.core.errors import MethodError
from sparing.core.method import Broadcast, Codec, Method, Recipe
from sparing.core.registry import find_recipe, recipe


@recipe("broadcast", paper="error feedback on the server, after Sattler et al. 2019, arXiv:1903.02891")
def broadcast(by: Sequence[Recipe] | str = "ecsq", memory: bool = True, seeded: bool = False) -> Recipe:
    """Clients download one compressed update of the server instead of the model, plus any updates they missed."""

    def apply(method: Method) -> Method:
        stages = stages_of([find_recipe(by).make()] if isinstance(by, str) else by, method)
        return broadcast_by(method, Broadcast(stages, memory, seeded))

    return apply


def stages_of(by: Sequence[Recipe], method: Method) -> tuple[Codec, ...]:
    """What these recipes do to an uplink, and nothing else."""
    plain = method._replace(up=(), memory=False)
    made = plain
    for make in by:
        made = make(made)
    for field, is_now, was in zip(Method._fields, made, plain, strict=True):
        if field not in ("up", "memory") and is_now is not was:
            raise MethodError(
                f"broadcast.by changes the {field} of the method, and may only say how an update is written; name "
                "compressors, such as ecsq, lowrank, or topk and int8"
            )
    if not made.up:
        raise MethodError("broadcast.by writes every value as it is; name a compressor, such as ecsq or lowrank")
    return made.up
