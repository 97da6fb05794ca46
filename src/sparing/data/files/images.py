"""Pictures as uint8 arrays."""

import io
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from sparing.core.errors import DataError
from sparing.data.files.unpacking import damage_as_data_error, one_line

IMAGE_ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
_PILLOW_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
"""What Pillow may take a file for, whatever its ending: of the others, some start another program."""
_MOST_PIXELS = 50_000_000
"""Pixels of a picture: they take 600 MB while they are decoded."""


def read_image(path: Path, side: int | None = None, gray: bool = False) -> np.ndarray:
    """A picture `[C, H, W]`, squeezed to side x side pixels where a side is given."""
    with damage_as_data_error(f"{path} is not a picture that Pillow can read"):
        data = path.read_bytes()
        _check_pixel_count(str(path), *_webp_size(data))
        with _open_image(data, path) as picture:
            _check_pixel_count(str(path), *picture.size)
            return image_to_array(picture, side, gray)


def _open_image(data: bytes, path: Path) -> Image.Image:
    """The picture before any pixel is decoded; of its size we judge ourselves, and more strictly than Pillow.

    Pillow gets bytes and no file, since it reads as much as a picture asks for, and a file makes room for that first.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(io.BytesIO(data), formats=_PILLOW_FORMATS)
    except Image.DecompressionBombError as error:
        raise DataError(f"{path} is too large: {one_line(error)}") from None


def _check_pixel_count(where: str, width: int, height: int) -> None:
    if width * height > _MOST_PIXELS:
        raise DataError(
            f"{where} has {width:,} x {height:,} pixels; a picture may have {_MOST_PIXELS:,}: make it smaller first"
        )


def _webp_size(head: bytes) -> tuple[int, int]:
    """Width and height of a WebP picture, for which Pillow makes room as soon as it opens it; 0 and 0 for any other.

    >>> _webp_size(b"RIFF....WEBPVP8X" + bytes(14))
    (1, 1)
    """
    if head[:4] != b"RIFF" or head[8:12] != b"WEBP":
        return 0, 0
    if head[12:16] == b"VP8X":
        return int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
    if head[12:16] == b"VP8L":
        both = int.from_bytes(head[21:25], "little")
        return (both & 0x3FFF) + 1, (both >> 14 & 0x3FFF) + 1
    return int.from_bytes(head[26:28], "little") & 0x3FFF, int.from_bytes(head[28:30], "little") & 0x3FFF


def image_to_array(picture: Image.Image, side: int | None = None, gray: bool = False) -> np.ndarray:
    """
    >>> image_to_array(Image.new("RGB", (4, 2)), side=3).shape
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


_MOST_IMAGES = 100_000
"""Images of one source that are brought to another size: MNIST has 60,000."""


def check_image_batch(x: torch.Tensor, where: str) -> torch.Tensor:
    """The images themselves, if `resize_images` can work on them."""
    if x.dtype != torch.uint8 or x.ndim != 4 or x.shape[1] not in (1, 3):
        raise DataError(
            f"{where} has images of type {x.dtype} and shape {tuple(x.shape)}: give uint8 [n, 1 or 3, H, W]"
        )
    if len(x) > _MOST_IMAGES:
        raise DataError(f"{where} has {len(x):,} images; there may be {_MOST_IMAGES:,}")
    return x


def resize_images(x: np.ndarray, side: int, gray: bool) -> np.ndarray:
    """uint8 images `[n, C, H, W]` brought to one side and to one or three channels.

    >>> resize_images(np.zeros((5, 1, 16, 16), np.uint8), side=32, gray=False).shape
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
