"""Pictures as uint8 arrays."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError

from sparing.core.errors import DataError

ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}


def read_image(path: Path, side: int | None = None, gray: bool = False) -> np.ndarray:
    """A picture `[C, H, W]`, squeezed to side x side pixels where a side is given."""
    try:
        with Image.open(path) as picture:
            return pixels(picture, side, gray)
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path} is not a picture that Pillow can read ({error})") from None


def pixels(picture: Image.Image, side: int | None = None, gray: bool = False) -> np.ndarray:
    """
    >>> pixels(Image.new("RGB", (4, 2)), side=3).shape
    (3, 3, 3)
    """
    picture = picture.convert("L" if gray else "RGB")
    if side is not None and picture.size != (side, side):
        picture = picture.resize((side, side), Image.Resampling.BILINEAR)
    x = np.array(picture)
    return x[None] if gray else np.moveaxis(x, -1, 0)


def read_mosaic(path: Path, side: int) -> np.ndarray:
    """The tiles of a picture row by row, `[n, 3, side, side]`."""
    x = read_image(path)
    if x.shape[1] % side or x.shape[2] % side:
        raise DataError(
            f"{path} is wrong-sized: {x.shape[2]}x{x.shape[1]} pixels are no whole number of {side}x{side} tiles"
        )
    tiles = x.reshape(3, x.shape[1] // side, side, x.shape[2] // side, side).transpose(1, 3, 0, 2, 4)
    return tiles.reshape(-1, 3, side, side)


def alike(x: np.ndarray, side: int, gray: bool) -> np.ndarray:
    """uint8 images `[n, C, H, W]` brought to one side and to one or three channels.

    >>> alike(np.zeros((5, 1, 16, 16), np.uint8), side=32, gray=False).shape
    (5, 3, 32, 32)
    """
    images = torch.from_numpy(np.ascontiguousarray(x))
    if gray and images.shape[1] == 3:
        red, green, blue = images.to(torch.int32).unbind(1)
        images = ((299 * red + 587 * green + 114 * blue + 500) // 1000).to(torch.uint8)[:, None]
    if images.shape[2:] != (side, side):
        chunks = images.split(4096)
        images = torch.cat([F.interpolate(chunk, (side, side), mode="bilinear", antialias=True) for chunk in chunks])
    if not gray and images.shape[1] == 1:
        images = images.repeat(1, 3, 1, 1)
    return images.numpy()
