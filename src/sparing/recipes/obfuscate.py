from typing import Literal

from sparing.core.errors import ConfigError, check_range
from sparing.core.gaussian import keyed_words
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code import obfuscate as parts


@recipe("obfuscate", paper="obfuscated updates; no guarantee, see docs/privacy.md")
def obfuscate(
    noise: float = 0.0, rotate: bool = False, source: Literal["secret", "system", "seed"] = "secret"
) -> Recipe:
    """Obfuscate updates by noise scaled to each layer, or by a secret change of basis; no privacy guarantee."""
    check_range("obfuscate.noise", noise, 0, 1e6)
    if not noise and not rotate:
        raise ConfigError("obfuscate does nothing: set noise, such as {obfuscate: {noise: 0.1}}, or rotate: true")

    def apply(method: Method) -> Method:
        secret = source != "seed"
        words = method.words if secret else keyed_words
        stages = [parts.noise_codec(method.layout, noise, words)] if noise else []
        stages += [parts.basis_change_codec(method.layout, words)] if rotate else []
        return method._replace(up=(*method.up, *stages), secret=method.secret or secret)

    return apply
