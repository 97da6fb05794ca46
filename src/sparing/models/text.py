"""Networks for tokens `[B, T]` that guess the next one: at every place, or (`last`) after the last place only.

Under a mask, where a classifier's sequences are padded behind, the last place is the last one that holds a token. They
take their samples under the names that models of Hugging Face use.
"""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from sparing.core.errors import ConfigError
from sparing.models.registry import register_model


class LSTM(nn.Module):
    """Embedding, LSTM layers, head. Clients train one after the other unless told otherwise: torch stacks LSTMs slowly.

    >>> LSTM(vocabulary=90, embedding=8, hidden=16, layers=1, last=False)(torch.zeros(2, 5, dtype=torch.int64)).shape
    torch.Size([2, 5, 90])
    """

    def __init__(
        self, vocabulary: int, embedding: int, hidden: int, layers: int, last: bool, classes: int | None = None
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes or vocabulary)
        self.last = last

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x, _ = self.lstm(self.embedding(input_ids))
        return self.head(_last_place(x, attention_mask) if self.last else x)


def _last_place(x: Tensor, mask: Tensor | None) -> Tensor:
    """Of `x [B, T, width]`, the last place, or the last one that the mask `[B, T]` leaves."""
    if mask is None:
        return x[..., -1, :]
    at = (mask.sum(-1) - 1).clamp(min=0)
    return x.gather(-2, at[..., None, None].expand(*at.shape, 1, x.shape[-1])).squeeze(-2)


class CausalAttention(nn.Module):
    """Every place looks at itself and those before it. Written out, so that clients can be stacked."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        score = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(later, -torch.inf)
        return self.out((score.softmax(-1) @ v).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention and two dense layers, each normalised before and added to what came in."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), CausalAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.dense1, self.dense2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.dense2(F.gelu(self.dense1(self.norm2(x))))


class Transformer(nn.Module):
    """Embedding with learned positions, blocks, norm, head.

    >>> net = Transformer(vocabulary=90, length=5, width=16, layers=1, heads=2, last=True)
    >>> net(torch.zeros(2, 5, dtype=torch.int64)).shape
    torch.Size([2, 90])
    """

    def __init__(
        self, vocabulary: int, length: int, width: int, layers: int, heads: int, last: bool, classes: int | None = None
    ):
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(
            OrderedDict((f"block{i + 1}", TransformerBlock(width, heads)) for i in range(layers))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes or vocabulary)
        self.last = last

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids) + self.position.weight[: input_ids.shape[-1]]
        x = self.norm(self.blocks(x))
        return self.head(_last_place(x, attention_mask) if self.last else x)


@register_model("lstm")
def _lstm_for_shape(
    shape: tuple[int, ...],
    classes: int,
    embedding: PositiveInt = 8,
    hidden: PositiveInt = 256,
    layers: PositiveInt = 2,
    last: bool | None = None,
    vocabulary: PositiveInt | None = None,
    per_token: bool | None = None,
) -> nn.Module:
    _sequence_length("lstm", shape)
    tokens, outputs, last = _text_head(classes, vocabulary, per_token, last)
    return LSTM(tokens, embedding, hidden, layers, last, outputs)


@register_model("transformer")
def _transformer_for_shape(
    shape: tuple[int, ...],
    classes: int,
    width: PositiveInt = 128,
    layers: PositiveInt = 2,
    heads: PositiveInt = 4,
    last: bool | None = None,
    vocabulary: PositiveInt | None = None,
    per_token: bool | None = None,
) -> nn.Module:
    if width % heads:
        raise ConfigError(f"transformer.width is {width}, which {heads} heads cannot share: make it a multiple")
    tokens, outputs, last = _text_head(classes, vocabulary, per_token, last)
    return Transformer(tokens, _sequence_length("transformer", shape), width, layers, heads, last, outputs)


def _text_head(
    classes: int, vocabulary: int | None, per_token: bool | None, last: bool | None
) -> tuple[int, int, bool]:
    """How many tokens there are, what is chosen between, and whether that is asked after the last place only: where a
    classifier's vocabulary is known, so is that it has one target."""
    classifies = vocabulary is not None and per_token is False
    return vocabulary or classes, classes, classifies if last is None else last


def _sequence_length(name: str, shape: tuple[int, ...]) -> int:
    if len(shape) != 1:
        raise ConfigError(f"{name} takes tokens (length,), seen samples of shape {shape}: use a network for images")
    return shape[0]
