"""The gradient on a probe set: right, and without a trace."""

import numpy as np
import pytest
import torch
from torch import nn

from sparing.core.errors import TrainingError
from sparing.core.tree import tree_of
from sparing.train.gradient import gradient_at
from sparing.train.losses import cross_entropy


def by_hand(weight, bias, x, y):
    """Of the mean cross entropy of a linear classifier, in NumPy."""
    logits = x @ weight.T + bias
    p = np.exp(logits - logits.max(1, keepdims=True))
    p = p / p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return p.T @ x / len(y), p.mean(0)


@pytest.mark.parametrize("n", [1, 40, 512, 1300])
def test_a_linear_classifier_against_numpy(n):
    rng = np.random.default_rng(n)
    x, y, net = rng.normal(size=(n, 5)), rng.integers(3, size=n), nn.Linear(5, 3).double()
    found = gradient_at(net, cross_entropy, tree_of(net), torch.from_numpy(x), torch.from_numpy(y))
    weight, bias = by_hand(net.weight.detach().numpy(), net.bias.detach().numpy(), x, y)
    assert np.allclose(found["weight"][0], weight, rtol=0, atol=1e-14)
    assert np.allclose(found["bias"][0], bias, rtol=0, atol=1e-14)


def images(n):
    g = torch.Generator().manual_seed(0)
    return torch.randint(256, (n, 1, 8, 8), generator=g).to(torch.uint8), torch.randint(4, (n,), generator=g)


def test_it_is_taken_in_evaluation_and_leaves_no_trace():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 4))
    net[4].bias.requires_grad_(False)
    tree, (x, y) = tree_of(net), images(40)
    before, rng = tree_of(net), torch.get_rng_state()
    found = gradient_at(net, cross_entropy, tree, x, y)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(net.state_dict()[name], value[0]) for name, value in before.items())
    assert net.training
    assert all(p.grad is None for p in net.parameters())
    assert found.keys() == {"0.weight", "0.bias", "1.weight", "1.bias", "4.weight"}, "what trains, and no buffer"
    net.eval()
    cross_entropy(net(x.float() / 255), y).mean().backward()
    for name, p in net.named_parameters():
        if p.grad is not None:
            assert torch.allclose(found[name][0], p.grad, rtol=1e-4, atol=1e-6), name


def test_the_bits_do_not_depend_on_the_number_of_threads_or_the_call():
    net, (x, y) = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 4)), images(700)
    tree, found, threads = tree_of(net), [], torch.get_num_threads()
    for count in (1, 2, 1):
        torch.set_num_threads(count)
        with torch.no_grad():
            found.append(gradient_at(net, cross_entropy, tree, x, y))
    torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())


def test_static_norm_layers_use_batch_statistics():
    net, (x, y) = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 4)), images(40)
    running, static = (gradient_at(net, cross_entropy, tree_of(net), x, y, static=s)["2.weight"] for s in (False, True))
    assert not torch.allclose(running, static)


def test_a_network_of_recurrent_layers_and_one_that_the_loss_does_not_touch():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.out = nn.LSTM(8, 5, num_layers=2, dropout=0.9, batch_first=True), nn.Linear(5, 4)
            self.idle = nn.Linear(2, 2)

        def forward(self, x):
            return self.out(self.lstm(x[:, 0])[0][:, -1])

    net, (x, y) = Net(), images(20)
    found = gradient_at(net, cross_entropy, tree_of(net), x, y)
    cross_entropy(net.eval()(x.float() / 255), y).mean().backward()
    assert torch.allclose(found["lstm.weight_ih_l0"][0], net.lstm.weight_ih_l0.grad, rtol=1e-4, atol=1e-7), "no dropout"
    assert not found["idle.weight"].any()


def test_what_is_not_finite_is_refused():
    net, (x, y) = nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), images(8)
    tree = {name: value * 1e38 * 1e38 for name, value in tree_of(net).items()}
    with pytest.raises(TrainingError, match=r"gradient of '1\.weight' on the probe set is not finite"):
        gradient_at(net, cross_entropy, tree, x, y)
