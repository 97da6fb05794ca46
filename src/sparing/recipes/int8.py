from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code import common_steps, quantisers


@recipe("int8", paper="linear 8-bit quantisation")
def int8(stochastic: bool = False, common: bool = False) -> Recipe:
    """Quantise each value to 8 bits, with one scale per layer; `common`: the same for all clients, sent down."""

    def apply(method: Method) -> Method:
        if not common:
            return method._replace(up=(*method.up, quantisers.uniform_codec(method.layout, 8, stochastic)))
        codec = common_steps.common_steps_codec(method.layout, stochastic)
        step = common_steps.common_steps_step(method.layout)
        blend = method.blend._replace(steps=(step, *method.blend.steps))
        return method._replace(up=(*method.up, codec), blend=blend)

    return apply
