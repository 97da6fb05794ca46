from typing import Literal

from sparing.core.errors import MethodError
from sparing.core.protocols import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts import structured, thresholds
from sparing.parts.unbiased import unbiased


@recipe("fedscr", paper="Wu, Yao and Wang 2021, doi:10.1109/TPDS.2020.3046250")
def fedscr(
    threshold: float = 0.3,
    threshold_mode: Literal["absolute", "relative", "budget"] = "absolute",
    adaptive: bool = False,
    aggregation: Literal["normalised", "unbiased"] = "normalised",
    dense: bool = False,
) -> Recipe:
    """Send only filters and channels that changed enough; the rest is remembered and added to the next update."""

    def apply(method: Method) -> Method:
        layout = method.layout
        codec = structured.structured(layout, threshold, threshold_mode, dense, adaptive)
        if any("codes" in stage.traits for stage in method.up):
            raise MethodError("fedscr cannot follow a quantiser: its threshold is compared with values; put it before")
        steps = [structured.watched(layout, dense)]
        steps += [thresholds.adaptive(threshold)] if adaptive else []
        steps += [unbiased(layout)] if aggregation == "unbiased" else []
        blend = method.blend._replace(steps=(*method.blend.steps, *steps))
        return method._replace(up=(*method.up, codec), memory=True, blend=blend)

    return apply
