from sparing.core.compose import narrow_share, with_rule
from sparing.core.errors import ConfigError, MethodError
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.blend import fedsim, neighbours
from sparing.parts.share import personal as parts
from sparing.parts.share.adapter_gates import adapter_gates
from sparing.recipes.fedsim import weigh_by_similarity


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
    """Keep some layers (by default the last) on the client; average the others by client similarity."""
    if mode not in ("seed", "published"):
        raise ConfigError(f"pfedsim.mode is {mode!r}; use 'seed' or 'published'")
    if mode == "seed" and warmup is not None:
        raise ConfigError(f"pfedsim.warmup is {warmup}, which belongs to mode: published; drop it or set the mode")
    if mode == "published" and (q, on, softmax, at, adapter) != (1.0, "weights", None, "server", None):
        raise ConfigError("pfedsim's q, on, softmax, at and adapter belong to mode: seed; drop them or the mode")
    if adapter is not None and adapter.keys() - {"base", "growth"}:
        raise ConfigError(f"pfedsim.adapter is {adapter}; write {{base: 4, growth: 2}}")

    def apply(method: Method) -> Method:
        layout, home = method.layout, parts.personal_tensors(method.layout, layers, shared)
        if mode == "seed" or len(home) == len(layout.shapes):
            if adapter is not None and layers is None and shared is None:
                home |= parts.matching_tensors(layout, ["adapter"], "pfedsim.adapter")
            share = parts.stay_home_share(layout, home)
            if adapter is not None:
                share = share._replace(
                    given=adapter_gates(layout, home, adapter.get("base", 4), adapter.get("growth", 2))
                )
            return weigh_by_similarity(
                method._replace(share=narrow_share(method.share, share)), home, q, on, softmax, at
            )
        if not home:
            raise MethodError("pfedsim's published form compares the clients' heads, so it needs a personal layer")
        part = 0.5 if warmup is None else warmup
        step = neighbours.neighbours_step(
            layout, home, part, method.share.private, fedsim.parameter_counts(layout, home)
        )
        steps = (*method.blend.steps, step)
        heads = neighbours.heads_up_share(layout, home, part)
        method = with_rule(method, neighbours.refuse_unpublished(neighbours.compared_head(layout, home), home))
        return method._replace(share=narrow_share(method.share, heads), blend=method.blend._replace(steps=steps))

    return apply
