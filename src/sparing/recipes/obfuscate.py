from sparing.core.errors import ConfigError, check_range
from sparing.core.protocols import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts import obfuscate as parts


@recipe("obfuscate", paper="obfuscated updates; no guarantee, see docs/privacy.md")
def obfuscate(noise: float = 0.0, rotate: bool = False) -> Recipe:
    """Make updates hard to read before they leave: noise by the size of each layer, or a secret change of basis."""
    check_range("obfuscate.noise", noise, 0, 1e6)
    if not noise and not rotate:
        raise ConfigError("obfuscate does nothing: set noise, such as {obfuscate: {noise: 0.1}}, or rotate: true")

    def apply(method: Method) -> Method:
        stages = [parts.noised(method.layout, noise)] if noise else []
        stages += [parts.rotated(method.layout)] if rotate else []
        return method._replace(up=(*method.up, *stages))

    return apply
