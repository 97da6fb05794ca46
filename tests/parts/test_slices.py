"""HeteroFL's client models: which entries they hold, and that they are the full network with zeros elsewhere."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from sparing.core.errors import MethodError
from sparing.core.tree import layout_of, tree_of, with_extra
from sparing.models import build_network
from sparing.models.resnet import BasicBlock, BottleneckBlock, resnet
from sparing.parts.size.heterofl import width_slices_fit
from sparing.parts.size.widths import narrowed_model, narrower_layout
from support import changed, make_ctx

RATIOS = (1, 0.5, 0.25, 0.125, 0.0625, 0.3)
CTX = make_ctx([0])


def made(build, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def mobile():
    """A convolution of each channel by itself, as in MobileNet, dilated and padded."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.Conv2d(16, 16, 3, padding=2, dilation=2, groups=16),
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 24, 1, bias=False),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 5),
    )


def sound():
    """Over one axis, with a norm over flattened units."""
    return nn.Sequential(
        nn.Conv1d(2, 12, 3), nn.Sigmoid(), nn.Conv1d(12, 8, 3, padding_mode="circular", padding=1),
        nn.Flatten(), nn.BatchNorm1d(48), nn.Linear(48, 20), nn.PReLU(20), nn.Linear(20, 4),
    )  # fmt: skip


def inputs_normed():
    """Norms before the first layer and after the last keep their width."""
    layers = [nn.BatchNorm1d(6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.BatchNorm1d(4)]
    return nn.Sequential(*layers)


NETS = {
    "mlp": (lambda: build_network("mlp", (1, 4, 4), 10, hidden=[30, 17]), (1, 4, 4)),
    "cnn": (lambda: build_network("cnn", (1, 8, 8), 10), (1, 8, 8)),
    "adapter": (lambda: build_network("cnn", (1, 8, 8), 10, adapter=12), (1, 8, 8)),
    "lenet5": (lambda: build_network("lenet5", (1, 28, 28), 10), (1, 28, 28)),
    "basic": (lambda: resnet(BasicBlock, (1, 2), 3, 7, "batch", width=20), (3, 8, 8)),
    "bottleneck": (lambda: resnet(BottleneckBlock, (1, 1), 3, 7, "batch", width=8), (3, 8, 8)),
    "groups": (lambda: resnet(BasicBlock, (1, 1), 3, 7, "group", width=16), (3, 8, 8)),
    "mobile": (mobile, (3, 9, 9)),
    "sound": (sound, (2, 8)),
    "inputs normed": (inputs_normed, (6,)),
}


def filled(fit, size, full, seed=1):
    """The narrower network, and the full one with zeros where it has nothing, both with the same random values."""
    thin, wide = copy.deepcopy(fit.module(full, size)).eval(), copy.deepcopy(full).eval()
    g = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in fit.layouts[size].shapes.items():
        value = torch.rand(1, *shape, generator=g).double() + 0.5
        value = value if name.endswith("running_var") else value - 1
        state[name] = value if fit.layouts[size].dtypes[name].is_floating_point else torch.ones(1, *shape).long()
    grown, _ = fit.resize.grow(state, size, CTX)
    thin.double().load_state_dict({name: x[0] for name, x in state.items()})
    wide.double().load_state_dict({name: x[0] for name, x in grown.items()})
    return thin, wide


APART = [("groups", 4), ("groups", 5)]  # groups of two channels cannot stay together in 1 or 5 channels
CASES = [(name, size) for name in NETS for size in range(len(RATIOS)) if (name, size) not in APART]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_narrower_network_is_the_full_one_with_zeros_elsewhere(name, size):
    build, shape = NETS[name]
    full = made(build)
    fit = width_slices_fit(layout_of(full), RATIOS, scaler=False)
    thin, wide = filled(fit, size, full)
    x = made(lambda: torch.rand(3, *shape, dtype=torch.float64))
    with torch.no_grad():
        a, b = thin(x), wide(x)
    assert a.abs().max() > 1e-3
    assert torch.allclose(a, b, rtol=1e-9, atol=1e-9 * float(b.abs().max()))


@pytest.mark.parametrize("name", NETS)
def test_layouts_are_those_of_the_modules(name):
    full = made(NETS[name][0])
    fit = width_slices_fit(layout_of(full), RATIOS)
    for size, layout in enumerate(fit.layouts):
        found = layout_of(fit.module(full, size))
        assert found == layout
        assert list(found.shapes) == list(layout.shapes)
    assert fit.layouts[0] == layout_of(full)
    assert fit.module(full, 0) is full
    fit.check(full, torch.rand(1, *NETS[name][1]))


def test_widths_of_the_five_levels():
    fit = width_slices_fit(layout_of(build_network("cnn", (1, 8, 8), 10)), RATIOS)
    shapes = [layout.shapes for layout in fit.layouts]
    assert [s["conv1.weight"] for s in shapes[:5]] == [(c, 1, 3, 3) for c in (16, 8, 4, 2, 1)]
    assert [s["conv2.weight"] for s in shapes[:5]] == [(2 * c, c, 3, 3) for c in (16, 8, 4, 2, 1)]
    assert [s["dense.weight"] for s in shapes[:5]] == [(4 * c, 2 * c * 4) for c in (16, 8, 4, 2, 1)]
    assert [s["head.weight"] for s in shapes[:5]] == [(10, 4 * c) for c in (16, 8, 4, 2, 1)]
    assert {s["head.bias"] for s in shapes} == {(10,)}
    assert shapes[5]["conv1.weight"] == (5, 1, 3, 3), "rounded up"
    assert shapes[5]["dense.weight"] == (20, 40)


def test_resnet18_at_half_width():
    fit = width_slices_fit(layout_of(build_network("resnet18", (3, 32, 32), 10)), (1, 0.5))
    small = fit.layouts[1].shapes
    assert small["stem.conv.weight"] == (32, 3, 3, 3)
    assert small["layer2.0.shortcut.conv.weight"] == (64, 32, 1, 1)
    assert small["layer4.1.norm2.weight"] == (256,)
    assert small["head.weight"] == (10, 256)


def test_shrink_takes_the_first_and_grow_puts_them_back():
    full = made(NETS["cnn"][0])
    fit = width_slices_fit(layout_of(full), RATIOS)
    model = tree_of(full)
    for size in range(len(RATIOS)):
        small = fit.resize.shrink({}, model, size, CTX)
        assert {name: tuple(x.shape[1:]) for name, x in small.items()} == fit.layouts[size].shapes
        again, covered = fit.resize.grow(small, size, CTX)
        for name, x in again.items():
            part, mask = small[name][0], covered[name]
            hits = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
            assert hits.shape == x.shape == model[name].shape
            assert int(hits.sum()) == part.numel()
            assert torch.equal(x[hits], model[name][hits])
            assert not bool(x[~hits].any())
            corner = tuple(slice(n) for n in part.shape)
            assert bool(hits[0][corner].all())
    assert all(mask is None for mask in fit.resize.grow(fit.resize.shrink({}, model, 0, CTX), 0, CTX)[1].values())


def test_rows_stay_rows():
    full = made(NETS["basic"][0])
    fit = width_slices_fit(layout_of(full), RATIOS)
    g = torch.Generator().manual_seed(0)
    rows = {name: torch.randn(3, *shape, generator=g) for name, shape in fit.layouts[1].shapes.items()}
    whole, _ = fit.resize.grow(rows, 1, CTX)
    for k in range(3):
        alone, _ = fit.resize.grow({name: x[k : k + 1] for name, x in rows.items()}, 1, CTX)
        assert all(torch.equal(alone[name], x[k : k + 1]) for name, x in whole.items())


def test_hidden_layers_are_scaled_before_their_norms_and_the_last_is_not():
    full = made(lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2))).double()
    for bias in (x for name, x in full.named_parameters() if name.endswith("bias")):
        nn.init.zeros_(bias)
    plain, scaled = (
        width_slices_fit(layout_of(full), (1, 0.25), scaler=on).module(full, 1).eval() for on in (False, True)
    )
    heard = []
    for net in (plain, scaled):
        net.get_submodule("1").register_forward_pre_hook(lambda layer, x: heard.append(x[0]))
    x = made(lambda: torch.randn(5, 3).double())
    with torch.no_grad():
        a, b = plain(x), scaled(x)
    assert torch.equal(heard[1], heard[0] * 4), "what the norm sees"
    assert torch.allclose(b, a * 16), "two hidden layers"
    assert not full[0]._forward_hooks, "the full network stays as it is"


def test_a_client_uses_the_network_that_it_trains():
    full = made(NETS["mlp"][0])
    thin = width_slices_fit(layout_of(full), (0.25,)).module(full, 0)
    x = torch.rand(5, 1, 4, 4)
    assert torch.equal(thin.train()(x), thin.eval()(x))


@pytest.mark.parametrize(
    ("groups", "channels", "ratio", "want"),
    [(32, 64, 0.5, 16), (4, 16, 0.25, 1), (8, 16, 0.0625, 1), (1, 10, 0.5, 1), (10, 10, 0.3, 3), (2, 12, 0.25, 1)],
)
def test_groups_of_a_norm_keep_their_size_where_they_can(groups, channels, ratio, want):
    for affine in (True, False):
        norm = nn.GroupNorm(groups, channels, affine=affine)
        full = nn.Sequential(nn.Conv2d(1, channels, 1), norm, nn.Flatten(), nn.Linear(channels, 2))
        thin = width_slices_fit(layout_of(full), (ratio,)).module(full, 0)
        assert thin.get_submodule("1").num_groups == want
        assert thin(torch.rand(2, 1, 1, 1)).shape == (2, 2)


def test_norms_over_all_units_are_narrowed_too():
    norms = (nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False), nn.RMSNorm(8), nn.BatchNorm1d(8, affine=False))
    for norm in norms:
        full = nn.Sequential(nn.Linear(3, 8), norm, nn.Linear(8, 2))
        fit = width_slices_fit(layout_of(full), (0.25,))
        fit.check(full, torch.rand(1, 3))
        assert fit.module(full, 0)(torch.rand(4, 3)).shape == (4, 2)


def test_static_statistics_are_left_out_of_narrower_networks():
    full = made(NETS["basic"][0])
    fit = width_slices_fit(layout_of(full, static=True), (1, 0.5))
    thin = fit.module(full, 1)
    assert not list(thin.buffers())
    assert list(full.buffers())
    thin(torch.rand(2, 3, 8, 8))


def test_what_stands_beside_the_network_is_cut_like_what_it_stands_beside():
    layout = layout_of(made(NETS["cnn"][0]))
    for known in (layout, with_extra(layout, ["conv2.weight"], "second")):
        fit = width_slices_fit(known, (0.5,))
        assert fit.layouts[0].shapes.keys() == layout.shapes.keys(), "the recipes add it again"
        x = torch.rand(2, 32, 16, 3, 3)
        small = fit.resize.shrink({}, {"conv2.weight.second": x}, 0, CTX)
        assert torch.equal(small["conv2.weight.second"], x[:, :16, :8])
        grown, covered = fit.resize.grow(small, 0, CTX)
        assert grown["conv2.weight.second"].shape == x.shape
        assert covered["conv2.weight.second"] is not None


def test_sizes_by_id_or_by_the_declared_width():
    fit = width_slices_fit(layout_of(made(NETS["cnn"][0])), (1, 0.5, 0.25))
    ctx = make_ctx([0, 1, 2, 3, 7])
    assert fit.sizes(ctx).tolist() == [0, 1, 2, 0, 1]
    declared = changed(ctx, capacity={"width": torch.tensor([0.25, 0.9, 1.0, 0.1, 0.5])})
    assert fit.sizes(declared).tolist() == [2, 1, 0, 2, 1]


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([nn.Linear(3, 4)], "no hidden layer"),
        ([nn.Conv2d(2, 8, 1), nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 2, 1)], "cannot narrow '1'.*in 2 groups"),
        ([nn.Conv2d(2, 8, 1), nn.ConvTranspose2d(8, 8, 1), nn.Conv2d(8, 2, 1)], "'1.weight' is neither.*4 axes"),
        ([nn.Conv2d(2, 8, 1), nn.LayerNorm([8, 2, 2]), nn.Conv2d(8, 2, 1)], "'1.weight' is neither.*3 axes"),
        ([nn.Linear(3, 8), nn.Linear(12, 8), nn.Linear(8, 2)], "cannot narrow '1': no layer before.*12 inputs"),
        ([nn.Linear(3, 8), nn.Flatten(), nn.Linear(16, 2)], "cannot narrow '2': no layer before.*16 inputs"),
    ],
    ids=str,
)
def test_layers_that_cannot_be_narrowed_are_refused_by_name(layers, words):
    with pytest.raises(MethodError, match=words):
        width_slices_fit(layout_of(nn.Sequential(*layers)), (0.5,))
    width_slices_fit(layout_of(nn.Sequential(*layers)), (1,))


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (lambda: nn.Embedding(6, 8), r"cannot narrow '0': '0.weight' is neither.*2 axes"),
        (lambda: nn.LSTM(8, 8), r"cannot narrow '0': '0.weight_ih_l0' is neither.*2 axes"),
        (lambda: nn.ConvTranspose1d(8, 8, 1), r"cannot narrow '0': '0.weight' is neither.*3 axes"),
        (lambda: weight_norm(nn.Linear(8, 8)), r"cannot narrow '0.param.*original0' is neither.*2 axes"),
    ],
    ids=["embedding", "lstm", "transposed", "weight norm"],
)
@pytest.mark.parametrize("place", [0, 2])
def test_other_layers_before_the_first_or_after_the_last_are_refused_too(layer, words, place):
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    layers.insert(place, layer())
    for resized in (width_slices_fit, lambda layout, ratios: narrower_layout(layout, *ratios)):
        with pytest.raises(MethodError, match=words.replace("'0", f"'{place}")):
            resized(layout_of(nn.Sequential(*layers)), (0.5,))


def test_buffers_before_the_first_layer_stay_whole():
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    net.register_buffer("centre", torch.rand(1, 4))
    smaller = narrower_layout(layout_of(net), 0.5)
    assert smaller.shapes["centre"] == (1, 4)
    assert smaller.shapes["0.weight"] == (4, 4)


@pytest.mark.parametrize("layer", [nn.ConvTranspose1d(8, 8, 1), nn.Linear(8, 8)], ids=str)
def test_a_layer_whose_weight_has_no_kind_is_refused_by_name(layer):
    net = nn.Sequential(nn.Linear(8, 8), layer)
    layout = layout_of(net)
    layout = layout._replace(kinds={"0.weight": layout.kinds["0.weight"]})
    with pytest.raises(MethodError, match=rf"cannot narrow '1': its weight.*{type(layer).__name__}"):
        narrowed_model(net, layout, layout, 0.5)


def test_only_layers_that_train_count_as_hidden():
    net = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    net[:2].requires_grad_(False)
    with pytest.raises(
        MethodError, match=r"no hidden layer.* 1 conv.*that train.*frozen.*let more of its layers train"
    ):
        width_slices_fit(layout_of(net), (0.5,))


def test_frozen_and_tied_tensors_are_refused_by_name():
    full = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    full[1].weight.requires_grad_(False)
    with pytest.raises(MethodError, match=r"cannot narrow '1'.*'1.weight' is frozen"):
        width_slices_fit(layout_of(full), (0.5,)).module(full, 0)
    full[1].weight.requires_grad_(True)
    full[2].weight = full[1].weight
    with pytest.raises(MethodError, match=r"cannot narrow '2'.*second name"):
        width_slices_fit(layout_of(full), (0.5,)).module(full, 0)
