from sparing.core.compose import narrow, with_rule
from sparing.core.errors import ConfigError, MethodError
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts import layers as parts
from sparing.parts import neighbours, similarity
from sparing.parts.adapters import gates
from sparing.recipes.fedsim import weighed


@recipe("pfedsim", paper="Tan et al. 2023, arXiv:2305.15706")
def pfedsim(
    layers: list[str] | None = None,
    shared: list[str] | None = None,
    mode: str = "seed",
    warmup: float | None = None,
    q: float = 1.0,
    on: str = "weights",
    softmax: float | None = None,
    at: str = "server",
    adapter: dict[str, float] | None = None,
) -> Recipe:
    """Keep some layers (by default the last) on the client, blend the others by similarity."""
    if mode not in ("seed", "published"):
        raise ConfigError(f"pfedsim.mode is {mode!r}; use 'seed' or 'published'")
    if mode == "seed" and warmup is not None:
        raise ConfigError(f"pfedsim.warmup is {warmup}, which belongs to mode: published; drop it or set the mode")
    if mode == "published" and (q, on, softmax, at, adapter) != (1.0, "weights", None, "server", None):
        raise ConfigError("pfedsim's q, on, softmax, at and adapter belong to mode: seed; drop them or the mode")
    if adapter is not None and adapter.keys() - {"base", "growth"}:
        raise ConfigError(f"pfedsim.adapter is {adapter}; write {{base: 4, growth: 2}}")

    def apply(method: Method) -> Method:
        layout, home = method.layout, parts.split(method.layout, layers, shared)
        if mode == "seed" or len(home) == len(layout.shapes):
            if adapter is not None and layers is None and shared is None:
                home |= parts.matching(layout, ["adapter"], "pfedsim.adapter")
            share = parts.at_home(layout, home)
            if adapter is not None:
                share = share._replace(given=gates(layout, home, adapter.get("base", 4), adapter.get("growth", 2)))
            return weighed(method._replace(share=narrow(method.share, share)), home, q, on, softmax, at)
        if not home:
            raise MethodError("pfedsim's published form compares the clients' heads, so it needs a personal layer")
        part = 0.5 if warmup is None else warmup
        step = neighbours.neighbours(layout, home, part, method.share.private, similarity.sizes(layout, home))
        steps = (*method.blend.steps, step)
        heads = neighbours.heads_up(layout, home, part)
        method = with_rule(method, neighbours.refuse_unlike(neighbours.compared(layout, home), home))
        return method._replace(share=narrow(method.share, heads), blend=method.blend._replace(steps=steps))

    return apply
