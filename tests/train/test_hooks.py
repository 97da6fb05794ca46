"""Dropout and BatchNorm by hooks give the bits that layers of our own classes give, and leave the model's own alone."""

import copy

import pytest
import torch
from torch import nn

from sparing.accel.keyed_classes import recast_keyed_layers
from sparing.train.evaluate import frozen_copy
from sparing.train.keyed_layers import hook_keyed_layers
from sparing.train.working_copy import working_copy

CPU = torch.device("cpu")
SHARED = nn.Dropout(0.3)
LAYERS = {
    "dropout": (lambda: nn.Dropout(0.4), (5, 6)),
    "in place": (lambda: nn.Dropout(0.4, inplace=True), (5, 6)),
    "nothing dropped": (lambda: nn.Dropout(0.0), (5, 6)),
    "all dropped": (lambda: nn.Dropout(1.0), (5, 6)),
    "the same layer twice": (lambda: nn.Sequential(SHARED, nn.Tanh(), SHARED), (5, 6)),
    "channels": (lambda: nn.Dropout2d(0.5), (5, 6, 2, 3)),
    "channels of rows": (lambda: nn.Dropout1d(0.5), (5, 6, 7)),
    "BatchNorm": (lambda: nn.BatchNorm1d(6), (5, 6)),
    "images": (lambda: nn.BatchNorm2d(6), (5, 6, 2, 3)),
    "volumes": (lambda: nn.BatchNorm3d(6), (2, 6, 2, 3, 2)),
    "cumulative, not affine": (lambda: nn.BatchNorm1d(6, momentum=None, affine=False), (5, 6)),
    "no running statistics": (lambda: nn.BatchNorm1d(6, track_running_stats=False), (5, 6)),
    "one value": (lambda: nn.BatchNorm1d(6), (1, 6)),
    "one image of one place": (lambda: nn.BatchNorm2d(6), (1, 6, 1, 1)),
    "one image": (lambda: nn.BatchNorm2d(6), (1, 6, 2, 3)),
    "one value, no running statistics": (lambda: nn.BatchNorm1d(6, track_running_stats=False), (1, 6)),
    "both": (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(6)), (4, 6)),
}


def passed(model: nn.Module, step, shape: tuple[int, ...], key) -> list[torch.Tensor]:
    """Outputs and gradients of a few calls, and the state they leave behind."""
    g, out = torch.Generator().manual_seed(0), []
    for turn in range(3):
        x = torch.randn(*shape, generator=g).requires_grad_()
        step.begin(key(turn))
        y = model(x * 1)
        wanted = [x, *model.parameters()]
        out += [y.detach(), *torch.autograd.grad((y * torch.arange(y.numel()).view_as(y)).sum(), wanted)]
    return [*out, *model.state_dict().values()]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("key", [int, torch.tensor])
def test_hooks_have_the_bits_of_classes(name, static, key):
    make, shape = LAYERS[name]
    model = make().train()
    for i, x in enumerate(model.state_dict().values()):
        if x.is_floating_point():
            x.add_(torch.arange(x.numel()) * 0.1 + i)
    hooked, recast = copy.deepcopy(model), copy.deepcopy(model)
    seen = passed(hooked, hook_keyed_layers(hooked, static), shape, key)
    wanted = passed(recast, recast_keyed_layers(recast, stacked=False, static=static), shape, key)
    assert len(seen) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=True))
    assert [type(layer) for layer in hooked.modules()] == [type(layer) for layer in model.modules()]
    assert all(layer.training for layer in hooked.modules()), "modes are as they were"
    norms = [layer for layer in hooked.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    assert all(layer.track_running_stats == (layer.running_mean is not None) for layer in norms)


class Own(nn.Dropout):
    pass


class OwnNorm(nn.BatchNorm1d):
    pass


def test_subclasses_and_layers_in_evaluation_mode_are_left_alone():
    assert not any(layer._forward_hooks for layer in working_copy(nn.Sequential(Own(), OwnNorm(6)), CPU, True).module)
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(6))
    work = working_copy(model, CPU, static=False)
    work.module.eval()
    x = torch.ones(4, 6)
    assert torch.equal(work.module(x), model.eval()(x))
    assert torch.equal(frozen_copy(model, CPU, static=False).module(x), model(x))


def test_hooks_of_the_model_s_own_see_what_comes_out():
    seen = []
    model = nn.Sequential(nn.Dropout(0.5))
    model[0].register_forward_hook(lambda layer, args, out: seen.append(out))
    work = working_copy(model, CPU, static=False)
    work.step.begin(3)
    out = work.module(torch.ones(4, 6))
    assert seen[0] is out
    assert 0 < int((out == 0).sum()) < 24


def test_samples_of_the_wrong_shape_are_refused_by_torch():
    work = working_copy(nn.BatchNorm1d(6), CPU, static=False)
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        work.module(torch.ones(6))
