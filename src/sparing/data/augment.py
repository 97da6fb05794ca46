"""Training images varied at random.

An augmentation is a pure function (images `[B, C, H, W]`, keys `[B]`) -> images of the same shape. A key belongs to
(seed, round, client, phase, step, place in the batch), so a client sees the same variants whoever else is trained with
it, one by one or stacked. Evaluation never augments.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor

from sparing.core.errors import ConfigError, nearest_name
from sparing.core.keys import hashes
from sparing.data.options import name_and_options, validate_options

Augment = Callable[[Tensor, Tensor], Tensor]
_CROP_PADDING = 4


def _random_crop(x: Tensor, keys: Tensor, padding: PositiveInt = _CROP_PADDING) -> Tensor:
    """The image framed by `padding` zeros, and a window of the old size anywhere in it.

    >>> _random_crop(torch.ones(1, 1, 2, 2), torch.tensor([5]), padding=1)
    tensor([[[[0., 1.],
              [0., 0.]]]])
    """
    height, width = x.shape[-2:]
    corner = hashes(keys, 2).remainder(2 * padding + 1)
    rows = corner[:, :1] + torch.arange(height, device=x.device)
    columns = corner[:, 1:] + torch.arange(width, device=x.device)
    framed = F.pad(x, [padding] * 4)
    framed = framed.gather(2, rows[:, None, :, None].expand(-1, x.shape[1], -1, framed.shape[3]))
    return framed.gather(3, columns[:, None, None, :].expand(-1, x.shape[1], height, -1))


def _random_flip(x: Tensor, keys: Tensor) -> Tensor:
    """Left and right exchanged in every other image.

    >>> _random_flip(torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([0])).flatten().tolist()
    [2.0, 1.0]
    """
    return torch.where(hashes(keys, 1)[:, :, None, None] < 0, x.flip(-1), x)


_AUGMENTATIONS: dict[str, Callable[..., Tensor]] = {"crop": _random_crop, "flip": _random_flip}


def read_augmentations(
    entries: str | Mapping[str, Any] | Sequence[Any] | None, shape: tuple[int, ...]
) -> tuple[Augment, ...]:
    """What a study asks for, such as `[crop, flip]`, `[{crop: {padding: 2}}]` or none, for samples of this shape.

    >>> read_augmentations(["flip", {"crop": {"padding": 2}}], (3, 32, 32))[1].keywords
    {'padding': 2}
    """
    if entries is None or entries == "none":
        return ()
    chosen: list[Augment] = []
    for entry in [entries] if isinstance(entries, str | Mapping) else entries:
        name, options = name_and_options("augment", entry)
        if name not in _AUGMENTATIONS:
            raise ConfigError(f"no augmentation is called {name!r}: {nearest_name(name, _AUGMENTATIONS)}")
        options = validate_options("augment", name, _AUGMENTATIONS[name], options, given=2)
        check_image_shape(f"augment: {name}", shape)
        if name == "crop" and (padding := options.get("padding", _CROP_PADDING)) >= min(shape[1:]):
            raise ConfigError(f"crop.padding is {padding}: it must be below the side of the images, {min(shape[1:])}")
        chosen.append(partial(_AUGMENTATIONS[name], **options))
    return tuple(chosen)


def check_image_shape(what: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 3:
        raise ConfigError(
            f"{what} is for images (channels, height, width), seen samples of shape {shape}: leave it out"
        )


def augment_batch(x: Tensor, keys: Tensor, chosen: Sequence[Augment]) -> Tensor:
    """One batch of each client, `[K, B, C, H, W]`, with one key per client and step `[K]`.

    >>> augment_batch(torch.ones(2, 3, 1, 8, 8), torch.tensor([4, 7]), [_random_flip, _random_crop]).shape
    torch.Size([2, 3, 1, 8, 8])
    """
    if not chosen:
        return x
    places = hashes(keys, x.shape[1]).flatten()
    images = x.flatten(0, 1)
    for i, augment in enumerate(chosen):
        images = augment(images, hashes(places, 1, start=i)[:, 0])
    return images.unflatten(0, x.shape[:2])
