"""Feature shift: every client sees the same kind of images in a style of its own.

Applied once, when a client's samples are laid out. A pure function of (images, style, sample numbers).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparing.core.errors import ConfigError, DataError, nearest_name
from sparing.core.keys import GOLDEN, hashes, mix, signed
from sparing.data.inputs import SomeSamples

_STYLES = ("rotation", "stroke", "inversion", "noise")
_STROKES = (0, 1, -1)  # as it is, thick, thin
_LOUDEST_NOISE = 0.3
_IMAGES_AT_ONCE = 1024  # images at a time


class Style(NamedTuple):
    """One client's style. Its parts are applied in this order."""

    stroke: int = 0  # times thickened; negative: thinned
    rotation: float = 0.0  # degrees, counter-clockwise
    inverted: bool = False
    noise: float = 0.0  # standard deviation, where 1 is white
    key: int = 0  # of the noise

    def __str__(self) -> str:
        """In words.

        >>> print(Style(stroke=-1, rotation=90.0, noise=0.1))
        thin, 90°, noise 0.10
        """
        words = [
            {-1: "thin", 0: "", 1: "thick"}.get(self.stroke, f"stroke {self.stroke:+d}"),
            f"{self.rotation:.4g}°" if self.rotation else "",
            "inverted" if self.inverted else "",
            f"noise {self.noise:.2f}" if self.noise else "",
        ]
        return ", ".join(filter(None, words)) or "plain"


def client_styles(clients: int, seed: int, kinds: Sequence[str] = _STYLES) -> list[Style]:
    """K styles, no two the same, the first one plain.

    Client k = 0 .. K-1 is turned by 360 k/K degrees and has noise of 0.3 k/K; strokes go plain, thick, thin in turn,
    and every other round of these is inverted.

    >>> [str(style) for style in client_styles(4, seed=0, kinds=["rotation", "inversion"])]
    ['plain', '90°, inverted', '180°', '270°, inverted']
    """
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    for kind in kinds:
        if kind not in _STYLES:
            raise ConfigError(f"no style is called {kind!r}: {nearest_name(str(kind), _STYLES)}")
    strokes = _STROKES if "stroke" in kinds else (0,)
    inverted = (False, True) if "inversion" in kinds else (False,)
    different = len(strokes) * len(inverted)
    if not {"rotation", "noise"} & set(kinds) and clients > different:
        raise ConfigError(
            f"styles {', '.join(kinds) or '(none)'} tell {different} clients apart, seen {clients}: "
            "add rotation or noise"
        )
    return [
        Style(
            stroke=strokes[k % len(strokes)],
            rotation=360 * k / clients if "rotation" in kinds else 0.0,
            inverted=inverted[k // len(strokes) % len(inverted)],
            noise=_LOUDEST_NOISE * k / clients if "noise" in kinds else 0.0,
            key=seed,
        )
        for k in range(clients)
    ]


def samples_in_style(x: SomeSamples, parts: Sequence[np.ndarray], shifts: Sequence[Style] | None = None) -> SomeSamples:
    """The clients' samples end to end, each client's in its own style.

    >>> samples_in_style(torch.eye(2).reshape(1, 1, 2, 2), [np.array([0])], [Style(inverted=True)]).flatten().tolist()
    [0.0, 1.0, 1.0, 0.0]
    """
    order = torch.from_numpy(np.concatenate(parts))
    out = x[order]
    if shifts is not None and isinstance(out, Tensor):  # several inputs were refused before
        edges = np.cumsum([0, *map(len, parts)]).tolist()
        for first, last, shift in zip(edges, edges[1:], shifts, strict=False):
            out[first:last] = _apply_style(out[first:last], shift, order[first:last])
    return out


def _apply_style(x: Tensor, shift: Style, samples: Tensor) -> Tensor:
    """Images `[n, C, H, W]`, uint8 or float in [0, 1], in this style; noise goes by sample number, not by place."""
    if x.ndim != 4:
        raise DataError(f"styles need images [n, channels, height, width], seen samples of shape {tuple(x.shape[1:])}")
    if x.is_floating_point() and len(x) and not (x.min() >= 0 and x.max() <= 1):
        raise DataError(f"styles need images in [0, 1], seen values from {x.min():g} to {x.max():g}")
    if shift._replace(key=0) == Style() or not len(x):
        return x.clone()
    blocks = zip(x.split(_IMAGES_AT_ONCE), samples.split(_IMAGES_AT_ONCE), strict=True)
    return torch.cat([_to_type_of(x, _draw_in_style(_to_unit_range(block), shift, which)) for block, which in blocks])


def _draw_in_style(x: Tensor, shift: Style, samples: Tensor) -> Tensor:
    for _ in range(abs(shift.stroke)):
        x = _thicken(x) if shift.stroke > 0 else _thin_out(x)
    if shift.rotation:
        x = _rotate(x, shift.rotation)
    if shift.inverted:
        x = 1 - x
    if shift.noise:
        x = (x + shift.noise * _keyed_noise(samples, x.shape[1:].numel(), shift.key).view(x.shape)).clamp(0, 1)
    return x


def _thicken(x: Tensor) -> Tensor:
    """The brightest of the 3x3 around."""
    return F.max_pool2d(x, 3, stride=1, padding=1)


def _thin_out(x: Tensor) -> Tensor:
    """The darkest of 2x2: that of 3x3 would wipe out many a written digit."""
    return -F.max_pool2d(F.pad(-x, (0, 1, 0, 1)), 2, stride=1)


def _rotate(x: Tensor, degrees: float) -> Tensor:
    """Counter-clockwise about the middle: quarter turns exactly, others with bilinear interpolation over black."""
    quarters = degrees / 90
    if quarters == int(quarters) and (x.shape[2] == x.shape[3] or int(quarters) % 2 == 0):
        return torch.rot90(x, int(quarters), (2, 3))
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    high, wide = x.shape[2:]
    matrix = torch.tensor([[c, -s * high / wide, 0], [s * wide / high, c, 0]], dtype=x.dtype, device=x.device)
    grid = F.affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False).clamp(0, 1)


def _keyed_noise(samples: Tensor, n: int, key: int) -> Tensor:
    """`[samples, n]`, nearly normal with mean 0 and deviation 1: the four 16-bit quarters of a hash, added up.

    Whole numbers until the last step, so every machine draws the same.
    """
    words = hashes(mix(samples.to(torch.int64) * signed(GOLDEN) + signed(key + 1)), n)
    total = sum((words >> (16 * i)) & 0xFFFF for i in range(4))
    assert isinstance(total, Tensor)
    return (total.to(torch.float32) - 2 * 0xFFFF) / math.sqrt((2**32 - 1) / 3)


def _to_unit_range(x: Tensor) -> Tensor:
    return x.to(torch.float32) / 255 if x.dtype == torch.uint8 else x


def _to_type_of(x: Tensor, y: Tensor) -> Tensor:
    return (y * 255).round().to(torch.uint8) if x.dtype == torch.uint8 else y.to(x.dtype)
