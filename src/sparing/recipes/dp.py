from typing import Literal

from sparing.core.compose import with_rule
from sparing.core.errors import ConfigError, MethodError, check_range
from sparing.core.gaussian import Words, keyed_words
from sparing.core.method import Method, Privacy, Recipe, by_samples, evenly
from sparing.core.registry import recipe
from sparing.parts.code import privacy

SMALLEST = 1e-20


@recipe("dp", paper="McMahan et al. 2018, arXiv:1710.06963; adaptive clipping, Andrew et al. 2021, arXiv:1905.03871")
def dp(
    noise: float = 1.0,
    clip: float = 1.0,
    mode: Literal["central", "local"] = "central",
    epsilon: float | None = None,
    delta: float | None = None,
    adaptive: bool = False,
    quantile: float = 0.5,
    rate: float = 0.2,
    count_noise: float | None = None,
    source: Literal["secret", "system", "seed"] = "secret",
) -> Recipe:
    """Client-level differential privacy: clip each update, add Gaussian noise, account for epsilon."""
    check_range("dp.noise", noise, 0, 1e6)
    check_range("dp.clip", clip, SMALLEST, 1e6)
    if epsilon is not None:
        check_range("dp.epsilon", epsilon, 0, float("inf"), open_low=True)
    if delta is not None and not 0 < delta < 1:
        raise ConfigError(f"dp.delta is {delta}; it must be above 0 and below 1")
    check_range("dp.quantile", quantile, 0, 1)
    check_range("dp.rate", rate, 0, 10, open_low=True)
    if adaptive and mode == "local":
        raise ConfigError("dp.adaptive needs the server's noise on the count of clients; use mode: central")

    def apply(method: Method) -> Method:
        if method.privacy is not None:
            raise MethodError("dp stands twice in the list; keep one")
        secret = source != "seed"
        words = method.words if secret else keyed_words
        method = method._replace(privacy=Privacy(noise, mode, epsilon, delta, secret), secret=method.secret or secret)
        method = with_rule(method, privacy.refuse_leaks)
        if mode == "local":
            blend = method.blend
            weigh = privacy.as_if_one if blend.weigh is by_samples else blend.weigh
            method = method._replace(blend=blend._replace(weigh=weigh))
            return method._replace(up=(*method.up, privacy.local_noise_codec(clip, noise, words)))
        if method.summed is not None:
            return _noise_by_clients(method, clip, noise, adaptive, words)
        adapt = privacy.Adapt(quantile, rate, count_noise) if adaptive else None
        blend = method.blend
        weigh = evenly if blend.weigh.name == "samples" else blend.weigh  # another one is refused later
        blend = blend._replace(weigh=weigh, steps=(privacy.central_noise_step(clip, noise, adapt, words), *blend.steps))
        return method._replace(up=(*method.up, privacy.clip_codec(clip, adaptive)), blend=blend)

    return apply


def _noise_by_clients(method: Method, clip: float, noise: float, adaptive: bool, words: Words) -> Method:
    """Central noise where the server sees sums only: every client adds a part of it."""
    assert method.summed is not None
    assert method.privacy is not None
    if adaptive:
        raise MethodError(
            "dp.adaptive counts who stays within the bound, and a secure sum has no noise for that count; set "
            "adaptive: false and choose dp.clip"
        )
    blend = method.blend
    weigh = evenly if blend.weigh.name == by_samples.name else blend.weigh  # another one is refused later
    step = privacy.summed_noise_step(clip, noise, method.summed.honest)
    codec = privacy.noise_share_codec(clip, noise, method.summed.honest, words)
    blend = blend._replace(weigh=weigh, steps=(step, *blend.steps))
    return method._replace(up=(*method.up, codec), blend=blend, privacy=method.privacy._replace(mode="summed"))
