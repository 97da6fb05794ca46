"""Layers with an adapter, beside bases of other widths and in copies of other ranks."""

import torch
from torch import nn

from sparing.parts.size.lora.adapted import Adapted, AdapterSettings, model_of_rank


def test_beside_a_base_of_half_width_adapters_train_in_float32():
    layer = Adapted(nn.Linear(6, 5).bfloat16(), AdapterSettings(2, 1.0), "q")
    nn.init.normal_(layer.lora_b.weight)
    x = torch.randn(3, 6).bfloat16()
    out = layer(x)
    assert out.dtype == torch.bfloat16
    assert layer.lora_a.weight.dtype == layer.lora_b.weight.dtype == torch.float32
    out.float().square().sum().backward()
    assert layer.base.weight.grad is None
    assert layer.lora_a.weight.grad.abs().max() > 0


def test_copies_of_other_ranks_share_what_is_frozen():
    net = nn.Sequential(Adapted(nn.Conv2d(3, 5, 3), AdapterSettings(4, 1.0), "0"))
    nn.init.normal_(net[0].lora_b.weight)
    small = model_of_rank(net, 2, 3.0)
    assert small[0].base.weight is net[0].base.weight
    assert torch.equal(small[0].lora_a.weight, net[0].lora_a.weight[:2])
    assert torch.equal(small[0].lora_b.weight, net[0].lora_b.weight[:, :2])
    assert small[0].scale == 3.0
    assert small[0].lora_a.weight.data_ptr() != net[0].lora_a.weight.data_ptr()
    small[0].lora_b.weight.data.zero_()
    assert net[0].lora_b.weight.abs().max() > 0


def test_at_rank_zero_a_layer_is_its_base_and_has_gradients():
    for trains_a in (True, False):
        net = nn.Sequential(Adapted(nn.Linear(6, 5), AdapterSettings(4, 1.0, trains_a), "0"))
        none, x = model_of_rank(net, 0, 0.0), torch.randn(2, 6)
        assert torch.equal(none(x), net[0].base(x))
        none(x).sum().backward()
        assert none[0].lora_b.weight.grad.shape == (5, 0)
