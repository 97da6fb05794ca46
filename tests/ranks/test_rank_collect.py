"""Blends of everyone over ranks: what the first rank asks for."""

import pytest
import torch

from sparing.ranks.rank_collect import AskedTensors


def test_a_tensor_is_asked_for_when_it_is_looked_at_and_only_the_last_is_held():
    asked: list[str] = []

    def ask(name: str) -> torch.Tensor:
        asked.append(name)
        return torch.zeros(3, 2)

    values = AskedTensors({"a": (2,), "b": (2,)}, ask)
    assert list(values) == ["a", "b"]
    assert asked == []
    _ = values["a"], values["a"]
    assert asked == ["a"]
    _ = values["b"], values["a"]
    assert asked == ["a", "b", "a"]
    with pytest.raises(KeyError):
        values["c"]
