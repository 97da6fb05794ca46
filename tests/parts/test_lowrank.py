"""FedHM's client models: factored layers, which ones, of what size, cut and grown."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

import sparing
from sparing.core.errors import ConfigError, MethodError
from sparing.core.tree import Kind, layout_of, tree_of, tree_to
from sparing.models import build_network
from sparing.parts.factors import FactoredConv, FactoredLinear, factor_product, factors_of, in_shape, matrix_of
from sparing.parts.size.fedhm.low_rank import low_rank_fit, rank_of
from sparing.parts.size.fedhm.svd import exact_svd
from support import changed, make_ctx

DEFAULTS = (1, 0.5, 0.25, 0.125)
CTX = make_ctx([0])


def made(seed, build):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def deep():
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.Conv2d(6, 8, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(8),
        nn.Flatten(),
        nn.Linear(8 * 16, 12),
        nn.Linear(12, 3),
    )


def filled(layer, rank):
    """A factored layer that holds the best factors of this rank, and the plain one with their product."""
    weight = layer.weight.detach()[None]
    thin = FactoredLinear(layer, rank) if isinstance(layer, nn.Linear) else FactoredConv(layer, rank)
    shape = tuple(weight.shape[1:])
    a, b = factors_of(*exact_svd(matrix_of(weight), rank), shape)
    plain = copy.deepcopy(layer)
    with torch.no_grad():
        thin.a.copy_(a[0])
        thin.b.copy_(b[0])
        plain.weight.copy_(in_shape(factor_product(a, b), shape)[0])
    return thin, plain


@pytest.mark.parametrize("stride", [1, 2, (2, 3)])
@pytest.mark.parametrize("padding", [0, 1, (2, 0)])
@pytest.mark.parametrize("dilation", [1, 2, (1, 3)])
@pytest.mark.parametrize("kernel", [3, 1, (3, 2), (1, 5)])
def test_a_factored_convolution_is_the_low_rank_convolution(stride, padding, dilation, kernel):
    layer = made(0, lambda: nn.Conv2d(5, 6, kernel, stride, padding, dilation).double())
    thin, plain = filled(layer, rank=2)
    x = made(1, lambda: torch.randn(2, 5, 15, 16, dtype=torch.float64))
    assert torch.allclose(thin(x), plain(x), rtol=0, atol=1e-12)
    assert torch.allclose(thin.weight, plain.weight, atol=1e-14)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_by_name(padding):
    layer = made(0, lambda: nn.Conv2d(3, 4, (3, 4), padding=padding, dilation=2, bias=False).double())
    thin, plain = filled(layer, rank=3)
    x = made(1, lambda: torch.randn(2, 3, 9, 11, dtype=torch.float64))
    assert torch.allclose(thin(x), plain(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 2, "valid"])
@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("kernel", [1, 4])
def test_along_one_axis(stride, padding, dilation, kernel):
    layer = made(0, lambda: nn.Conv1d(5, 6, kernel, stride, padding, dilation).double())
    thin, plain = filled(layer, rank=2)
    assert (thin.a.shape, thin.b.shape) == ((6, 2, 1, 1), (2, 5, 1, kernel))
    x = made(1, lambda: torch.randn(2, 5, 17, dtype=torch.float64))
    assert torch.allclose(thin(x), plain(x), rtol=0, atol=1e-12)
    assert torch.allclose(thin.weight, plain.weight, atol=1e-14)


@pytest.mark.parametrize("stride", [1, (2, 1, 3)])
@pytest.mark.parametrize("padding", [0, (2, 0, 1), "valid"])
@pytest.mark.parametrize("dilation", [1, (1, 2, 3)])
@pytest.mark.parametrize("kernel", [3, (1, 2, 3), (3, 1, 2)])
def test_along_three_axes(stride, padding, dilation, kernel):
    layer = made(0, lambda: nn.Conv3d(3, 4, kernel, stride, padding, dilation).double())
    thin, plain = filled(layer, rank=2)
    high, middle, wide = layer.kernel_size
    assert (thin.a.shape, thin.b.shape) == ((4, 2, high, 1), (2, 3, 1, middle * wide))
    x = made(1, lambda: torch.randn(2, 3, 8, 9, 10, dtype=torch.float64))
    assert torch.allclose(thin(x), plain(x), rtol=0, atol=1e-12)
    assert torch.allclose(thin.weight, plain.weight, atol=1e-14)


def test_convolutions_in_groups_stay_whole_and_are_named_once():
    net = nn.Sequential(
        nn.Conv1d(2, 6, 3),
        nn.Conv1d(6, 6, 3, groups=3),
        nn.Conv1d(6, 8, 3),
        nn.Conv1d(8, 8, 3, groups=8),
        nn.Linear(8, 2),
    )
    with pytest.warns(UserWarning, match="whole: 1, 3") as said:
        fit = low_rank_fit(layout_of(net), (0.5,))
    assert len(said) == 1
    assert {x for x in fit.layouts[0].shapes if x[-2:] == ".a"} == {"2.a"}


@pytest.mark.parametrize("axes", [1, 3])
def test_clients_of_every_rank_over_one_or_three_axes(axes):
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]

    def net():
        return nn.Sequential(conv(1, 4, 3), nn.ReLU(), conv(4, 6, 2), nn.Flatten(), nn.Linear(6 * 2**axes, 3))

    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(6, 1, *[5] * axes, generator=g), torch.randint(0, 3, (6,), generator=g)) for _ in range(4)]
    task = sparing.Task(net, train=data, test=data)
    for blend in ("products", "increments", "partitioned"):
        how = {"rounds": 2, "sample": 4, "local": {"epochs": 1, "batch": 3}}
        method = [{"fedhm": {"blend": blend}}]
        runs = [sparing.run(task, method, engine=e, plan={"path": "loop"}, **how) for e in ("vector", "debug")]
        assert runs[0].model_sha256 == runs[1].model_sha256
        assert (runs[0].up_bytes, runs[0].down_bytes) == (runs[1].up_bytes, runs[1].down_bytes)


def steep(layer_of, x):
    """A factored layer with large singular values, beside the whole one: how far one step moves each of the weights."""
    layer = made(0, layer_of)
    with torch.no_grad():
        layer.weight.mul_(8.0)
    thin, plain = filled(layer, rank=3)
    want = torch.randn(plain(x).shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    moved = []
    for one in (thin, plain):
        before = one.weight.detach().clone()
        (one(x) - want).square().sum().backward()
        with torch.no_grad():
            for p in one.parameters():
                p.sub_(1e-7 * p.grad)
        moved.append((one.weight.detach() - before) / 1e-7)
    return moved


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(lambda: nn.Linear(9, 8).double(), (5, 9)), (lambda: nn.Conv2d(4, 6, 3).double(), (2, 4, 6, 6))],
    ids=["dense", "convolution"],
)
def test_a_step_on_factors_moves_their_product_at_most_four_times_as_far_as_one_on_the_weight(layer, shape):
    thin, plain = steep(layer, made(1, lambda: torch.randn(*shape, dtype=torch.float64)))
    thin, plain = (matrix_of(x[None])[0] for x in (thin, plain))
    assert float(torch.linalg.matrix_norm(thin, 2)) <= 4 * float(torch.linalg.matrix_norm(plain, 2))
    assert float(thin.norm()) > 0.1 * float(plain.norm()), "and yet it moves"


def test_small_factors_train_as_they_are():
    layer = made(0, lambda: nn.Linear(6, 5).double())
    with torch.no_grad():
        layer.weight.mul_(0.1)
    thin, _ = filled(layer, rank=2)
    x = made(1, lambda: torch.randn(4, 6, dtype=torch.float64))
    got = torch.autograd.grad(thin(x).square().sum(), [thin.a, thin.b])
    a, b = (p.detach().requires_grad_() for p in (thin.a, thin.b))
    want = torch.autograd.grad((x @ b.mT @ a.mT + thin.bias).square().sum(), [a, b])
    assert all(torch.allclose(x, y, atol=1e-12) for x, y in zip(got, want, strict=True))


def test_a_factored_dense_layer():
    thin, plain = filled(made(0, lambda: nn.Linear(7, 5).double()), rank=2)
    x = made(1, lambda: torch.randn(4, 3, 7, dtype=torch.float64))
    assert torch.allclose(thin(x), plain(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(8, 6, 3, 3), (6, 8, 3, 3), (8, 6, 3, 2), (9, 5), (5, 9)])
def test_truncation_error_and_balanced_factors(shape):
    weight = made(2, lambda: torch.randn(1, *shape, dtype=torch.float64))
    m = matrix_of(weight)
    values = torch.linalg.svdvals(m[0])
    for r in range(1, min(m.shape[1:]) + 1):
        a, b = factors_of(*exact_svd(m, r), shape)
        left = (factor_product(a, b) - weight).norm()
        assert torch.allclose(left, values[r:].square().sum().sqrt(), atol=1e-10)
        assert torch.allclose(a.norm(), b.norm(), atol=1e-12)


def test_shrink_then_grow_is_the_best_approximation_and_leaves_the_rest_alone():
    net = made(3, deep)
    layout, model = layout_of(net), tree_of(net)
    fit = low_rank_fit(layout, DEFAULTS)
    state = fit.resize.init(model)
    assert fit.resize.shrink(state, model, 0, CTX).keys() == model.keys(), "ratio 1 is the model itself"
    for size, ratio in enumerate(DEFAULTS[1:], 1):
        cut = fit.resize.shrink(state, model, size, CTX)
        assert {name: tuple(x.shape[1:]) for name, x in cut.items()} == fit.layouts[size].shapes
        assert list(cut) == list(fit.layouts[size].shapes)
        whole, covered = fit.resize.grow({n: x for n, x in cut.items() if n not in model}, size, CTX)
        assert covered == dict.fromkeys(["1.weight", "4.weight"])
        for name, x in whole.items():
            r = rank_of(layout.shapes[name], ratio)
            u, s, vt = torch.linalg.svd(matrix_of(model[name])[0].double())
            best = u[:, :r] * s[:r] @ vt[:r]
            assert torch.allclose(matrix_of(x)[0].double(), best, atol=1e-6)
        assert all(cut[name] is model[name] for name in cut if name in model)


def test_growing_is_exact_by_rows():
    fit = low_rank_fit(layout_of(deep()), (0.5,))
    g = torch.Generator().manual_seed(0)
    rows = parts({n: torch.randn(5, *shape, generator=g) for n, shape in fit.layouts[0].shapes.items()})
    together = fit.resize.grow(rows, 0, CTX)[0]
    for k in range(5):
        alone = fit.resize.grow({n: x[k : k + 1] for n, x in rows.items()}, 0, CTX)[0]
        assert all(torch.equal(alone[n][0], x[k]) for n, x in together.items())


@pytest.mark.parametrize(
    ("name", "classes", "counts"),
    [
        ("resnet34", 100, {1: 21.328, 2: 8.401, 4: 4.985, 8: 3.277, 12: 2.708}),
        ("resnet18", 10, {1: 11.174, 2: 4.158, 4: 2.210, 8: 1.236}),
    ],
)
def test_parameter_counts_as_published(name, classes, counts):
    with torch.device("meta"):
        layout = layout_of(build_network(name, (3, 32, 32), classes))
    fit = low_rank_fit(layout, [1 / factor for factor in counts])
    assert [round(one.size / 1e6, 3) for one in fit.layouts] == list(counts.values())


def test_what_stays_whole():
    with torch.device("meta"):
        nets = {
            name: layout_of(build_network(name, (3, 32, 32), 10))
            for name in ("resnet18", "resnet34", "resnet50", "cnn")
        }

    def thin(name):
        first, small = nets[name], low_rank_fit(nets[name], (0.5,)).layouts[0]
        return {weight.removesuffix(".weight") for weight in first.kinds if weight not in small.shapes}

    assert not any("shortcut" in x or x in ("head", "stem.conv") for name in nets for x in thin(name))
    assert {x.partition(".conv")[0] for x in thin("resnet18")} == {
        "layer1.1", "layer2.0", "layer2.1", "layer3.0", "layer3.1", "layer4.0", "layer4.1"
    }  # fmt: skip
    assert {x.partition(".")[0] for x in thin("resnet34")} == {"layer3", "layer4"}
    assert {x.partition(".")[0] for x in thin("resnet50")} == {"layer2", "layer3", "layer4"}
    assert thin("cnn") == {"conv2", "dense"}
    kept = low_rank_fit(nets["cnn"], (0.5,), full=0, keep=["dense"]).layouts[0]
    assert {x for x in kept.shapes if x[-2:] == ".a"} == {"conv1.a", "conv2.a"}
    assert "conv2.weight" in low_rank_fit(nets["cnn"], (0.5,), full=2).layouts[0].shapes


def test_modules_fit_their_layouts_and_know_what_they_are():
    net = made(3, deep)
    layout = layout_of(net)
    fit = low_rank_fit(layout, DEFAULTS)
    assert fit.module(net, 0) is net
    before = copy.deepcopy(net.state_dict())
    for size in (1, 2, 3):
        small = fit.module(net, size)
        found = layout_of(small)
        assert (list(found.shapes.items()), found.buffers) == (list(fit.layouts[size].shapes.items()), layout.buffers)
        assert fit.layouts[size].kinds["1.a"] == fit.layouts[size].kinds["1.b"] == Kind("conv")
        assert fit.layouts[size].kinds["4.b"] == Kind("linear")
        assert small(torch.zeros(2, 2, 8, 8)).shape == (2, 3)
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())


def test_factored_models_run_stacked():
    net = made(3, lambda: nn.Sequential(*[m for m in deep() if not isinstance(m, nn.BatchNorm2d)]))
    fit, k = low_rank_fit(layout_of(net), (0.5,)), 3
    small = fit.module(net, 0)
    g = torch.Generator().manual_seed(0)
    rows = {name: torch.randn(k, *shape, generator=g) for name, shape in fit.layouts[0].shapes.items()}
    x = torch.randn(k, 2, 2, 8, 8, generator=g)
    stacked = vmap(lambda state, x: functional_call(small, state, (x,)))(rows, x)
    for i in range(k):
        alone = functional_call(small, {name: v[i] for name, v in rows.items()}, (x[i],))
        assert torch.allclose(stacked[i], alone, rtol=1e-4, atol=1e-4)


def test_attention_may_read_the_weight_of_a_factored_layer():
    layer = made(0, lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True))
    net = nn.Sequential(nn.Linear(16, 16), layer, nn.Linear(16, 2))
    fit = low_rank_fit(layout_of(net), (0.5,))
    assert "1.self_attn.out_proj.a" in fit.layouts[0].shapes
    for mode in (True, False):
        assert fit.module(net, 0).train(mode)(torch.rand(2, 5, 16)).shape == (2, 5, 2)


def test_sizes_follow_declared_capacity_or_the_id():
    fit = low_rank_fit(layout_of(deep()), (0.5, 1, 0.125, 0.3))
    ctx = make_ctx([0, 1, 2, 3, 4, 5, 6])
    assert fit.sizes(ctx).tolist() == [0, 1, 2, 3, 0, 1, 2]
    other = changed(ctx, capacity={"speed": torch.ones(7)})
    assert fit.sizes(other).tolist() == [0, 1, 2, 3, 0, 1, 2]
    declared = torch.tensor([1.0, 0.99, 0.5, 0.3, 0.2, 0.01, 7.0])
    assert fit.sizes(changed(ctx, capacity={"rank": declared})).tolist() == [1, 0, 0, 3, 2, 2, 1]


@pytest.mark.parametrize(
    ("shape", "ratio", "rank"),
    [
        ((64, 64, 3, 3), 0.5, 32),
        ((8, 2, 1, 1), 0.5, 2),
        ((10, 100), 0.01, 1),
        ((512, 64), 0.9, 64),
        ((96, 9, 3, 3), 1 / 12, 8),
    ],
)
def test_ranks(shape, ratio, rank):
    assert rank_of(shape, ratio) == rank


def grouped():
    return nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 8, 3, groups=2), nn.Conv2d(8, 8, 3), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("build", "options", "words"),
    [
        (
            lambda: nn.Sequential(nn.Linear(3, 3), nn.Conv2d(4, 8, 3, groups=2), nn.Linear(3, 3)),
            {},
            "finds no layer to factor.*convolutions in groups: 1; take a deeper model",
        ),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), {}, "no layer to factor.*deeper model.*fedhm.full"),
        (deep, {"keep": ["1", "4"]}, "no layer to factor"),
        (deep, {"keep": ["7"]}, "fedhm.keep: '7' matches no convolution or dense layer"),
        (deep, {"full": -1}, "fedhm.full is -1"),
        (deep, {"ratios": []}, r"fedhm.ratios is \[\]; offer at least one"),
        (deep, {"ratios": [0.5, 0.5]}, "each once"),
        (deep, {"ratios": [1, 1.5]}, "fedhm.ratios is 1.5; it must be above 0 and at most 1"),
        (deep, {"ratios": [0]}, "fedhm.ratios is 0"),
    ],
)
def test_what_cannot_be_factored_is_refused(build, options, words):
    with pytest.raises((MethodError, ConfigError), match=words):
        low_rank_fit(layout_of(build()), **({"ratios": DEFAULTS} | options))


def test_a_grouped_convolution_that_is_kept_is_no_trouble():
    fit = low_rank_fit(layout_of(grouped()), (0.5,), keep=["1"])
    assert "1.weight" in fit.layouts[0].shapes
    assert "2.a" in fit.layouts[0].shapes


def test_what_only_the_module_shows_is_refused_there():
    ring = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), nn.Linear(4, 4))
    with pytest.raises(MethodError, match=r"cannot factor '1': it pads with 'circular'.*fedhm.keep: \[1\]"):
        low_rank_fit(layout_of(ring), (0.5,)).module(ring, 0)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    tied[2].weight = tied[1].weight
    with pytest.raises(MethodError, match=r"cannot factor '1': its weight is also '2.weight'"):
        low_rank_fit(layout_of(tied), (0.5,)).module(tied, 0)


def test_the_report_names_every_factored_layer():
    net = made(3, deep)
    model = tree_of(net)
    fit = low_rank_fit(layout_of(net), DEFAULTS)
    _, report = fit.resize.learn(fit.resize.init(model), model, make_ctx([0]))
    keys = {f"{kind}/{layer}" for kind in ("approximation", "factor_norm") for layer in ("1", "4")}
    assert report.keys() == keys | {"approximation_error", "fallbacks"}
    missed = whole = 0.0
    for layer in ("1", "4"):
        m = matrix_of(model[f"{layer}.weight"])[0].double()
        r, s = rank_of(tuple(model[f"{layer}.weight"].shape[1:]), 0.125), torch.linalg.svdvals(m)
        assert report[f"approximation/{layer}"] == pytest.approx(float(s[r:].norm() / s.norm()), abs=1e-5)
        assert report[f"factor_norm/{layer}"] == pytest.approx(float(s[:r].sum().sqrt()), rel=1e-5)
        missed, whole = missed + float(s[r:].square().sum()), whole + float(s.square().sum())
    assert report["approximation_error"] == pytest.approx((missed / whole) ** 0.5, abs=1e-5)


def test_learning_goes_on_from_the_last_decomposition():
    """Large enough for the warm start; equal shapes are decomposed together."""
    net = made(3, lambda: nn.Sequential(*[nn.Linear(120, 120) for _ in range(4)]))
    layout, model = layout_of(net), tree_of(net)
    fit = low_rank_fit(layout, (0.25, 0.1))
    state = fit.resize.init(model)
    for t in (1, 2):
        g = torch.Generator().manual_seed(t)
        model = {n: x + 0.02 * torch.randn(x.shape, generator=g) for n, x in model.items()}
        state, report = fit.resize.learn(state, model, make_ctx([0], t=t))
        assert report["fallbacks"] == 0
        anew = fit.resize.init(model)
        for name in ("1.weight", "2.weight"):
            error, best = (
                fit.resize.grow(parts(fit.resize.shrink(x, model, 0, CTX)), 0, CTX)[0][name] - model[name]
                for x in (state, anew)
            )
            assert best.norm() <= error.norm() < 1.03 * best.norm()
            assert not torch.equal(state[f"v/{name}"], anew[f"v/{name}"]), "not decomposed from nothing"


@pytest.mark.gpu
def test_gpu_agrees_with_the_cpu():
    net = made(3, deep)
    fit, model = low_rank_fit(layout_of(net), DEFAULTS), tree_of(net)
    there = tree_to(model, "cuda")
    far = changed(CTX, device="cuda")
    (here, report), (state, said) = (
        fit.resize.learn(fit.resize.init(x), x, ctx) for x, ctx in ((model, CTX), (there, far))
    )
    assert dict(said) == pytest.approx(dict(report), abs=1e-5)
    for size in (1, 2, 3):
        small, large = fit.resize.shrink(here, model, size, CTX), fit.resize.shrink(state, there, size, far)
        assert all(large[name].is_contiguous() for name in small)
        whole, grown = fit.resize.grow(parts(small), size, CTX)[0], fit.resize.grow(parts(large), size, far)[0]
        assert all(torch.allclose(grown[name].cpu(), x, atol=1e-5) for name, x in whole.items())


def parts(tree):
    return {name: x for name, x in tree.items() if name[-2:] in (".a", ".b")}
