from typing import Literal

from sparing.core.compose import with_rule
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.blend.unbiased import refuse_weighting, unbiased_step
from sparing.parts.code import fedscr as structured
from sparing.parts.code import fedscr_thresholds


@recipe("fedscr", paper="Wu, Yao and Wang 2021, doi:10.1109/TPDS.2020.3046250")
def fedscr(
    threshold: float = 0.3,
    threshold_mode: Literal["absolute", "relative", "budget"] = "absolute",
    adaptive: bool = False,
    aggregation: Literal["normalised", "unbiased"] = "normalised",
    dense: bool = False,
) -> Recipe:
    """Send only filters and channels whose update exceeds a threshold, with error feedback for the rest."""

    def apply(method: Method) -> Method:
        layout = method.layout
        codec = structured.structured_codec(layout, threshold, threshold_mode, dense, adaptive)
        steps, meters = method.blend.steps, (*method.blend.meters, structured.pruned_share(layout, dense))
        if adaptive:
            steps = (*steps, fedscr_thresholds.adaptive_threshold_step(threshold))
        if aggregation == "unbiased":
            steps = (*steps, unbiased_step(layout))
            method = with_rule(method, refuse_weighting)
        blend = method.blend._replace(steps=steps, meters=meters)
        return method._replace(up=(*method.up, codec), memory=True, blend=blend)

    return apply
