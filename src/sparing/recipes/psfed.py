from sparing.core.compose import narrow_share
from sparing.core.errors import MethodError
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.share import schedule as masks
from sparing.parts.share import selectors


@recipe("psfed", paper="partial sharing, as in Gogineni et al. 2021, arXiv:2110.06556")
def psfed(
    fraction: float = 0.5,
    selector: str | dict[str, list[str]] = "random",
    per_client: bool = False,
    explore: float = 0.1,
    source: str = "updates",
    sync: int | None = None,
    start: float | None = None,
    warmup: int = 0,
    schedule: str = "linear",
    first: str | None = None,
    reset_momentum: bool = False,
) -> Recipe:
    """Share part of the parameters each round (by default a new random subset); the rest stays local."""

    def apply(method: Method) -> Method:
        home = method.share.private  # a part of what the recipes before let through
        layout = method.layout._replace(shapes={n: s for n, s in method.layout.shapes.items() if n not in home})
        count = masks.shared_counts(layout.size, fraction, start, warmup, schedule)
        select = selectors.selector_of(selector, layout, count, per_client, explore, source)
        share = masks.partial_share(
            layout, selectors.selected_share(layout, select, count, per_client, first), count, sync
        )
        if reset_momentum and not method.local.init(method.layout):
            raise MethodError(
                "psfed.reset_momentum: clients keep no momentum from round to round, so there is none to reset; "
                "set local.velocity: kept and local.momentum, or drop it"
            )
        local = method.local._replace(reset=method.local.reset or reset_momentum)
        probe = method.probe or source == "probe"
        return method._replace(share=narrow_share(method.share, share), local=local, probe=probe)

    return apply
