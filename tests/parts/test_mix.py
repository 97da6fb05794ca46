"""Split-Mix's bases: how they start, what they give together, and which of them a client holds."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from sparing.core.errors import ConfigError, MethodError
from sparing.core.tree import layout_of, tree_of, with_extra
from sparing.models import build_network
from sparing.models.small import cnn
from sparing.parts.size.mixture import Mix
from sparing.parts.size.split_mix import bases_fit, bases_for_ratio, held_bases, split_by_width
from support import changed, make_ctx, random_tree


def normed():
    layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(96, 4))


def fit_of(bases=4):
    return bases_fit(layout_of(split_by_width(cnn(1, 10, 8), bases)))


def test_bases_start_apart_and_as_networks_of_their_width_do():
    mix = split_by_width(nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 400), nn.Linear(400, 10)), 4)
    assert isinstance(mix, Mix)
    first, hidden, head = (mix.get_parameter(f"net.{i}.weight").detach() for i in (0, 2, 3))
    assert [tuple(w.shape) for w in (first, hidden, head)] == [(4, 100, 400), (4, 100, 100), (4, 10, 100)]
    for weight, inputs in ((first, 400), (hidden, 100), (head, 100)):
        assert weight.std() == pytest.approx((3 * inputs) ** -0.5, rel=0.05)
        assert float(torch.corrcoef(weight.flatten(1)).fill_diagonal_(0).abs().max()) < 0.15


def test_splitting_depends_on_the_seed_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, same, other = (tree_of(split_by_width(cnn(1, 10, 8), 4, seed=seed)) for seed in (5, 5, 6))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["net.conv1.weight"], other["net.conv1.weight"])
    state = torch.get_rng_state()
    split_by_width(cnn(1, 10, 8), 4)
    torch.set_rng_state(before)
    for _ in range(3):
        cnn(1, 10, 8)
    assert torch.equal(torch.get_rng_state(), state), "nothing but the networks themselves drew from torch's RNG"


def test_one_base_is_the_model_itself():
    model = cnn(1, 10, 8)
    assert split_by_width(model, 1) is model


@pytest.mark.parametrize("static", [False, True])
def test_norms_are_the_bases_own(static):
    mix = split_by_width(normed(), 2, static)
    names = layout_of(mix, static)
    assert ("net.1.running_mean" in names.shapes) is not static
    assert names.shapes["net.1.weight"] == (2, 4)
    assert names.bases == 2
    assert not names.kinds


def test_the_mix_is_the_mean_of_what_bases_give():
    mix = split_by_width(normed(), 3)
    assert isinstance(mix, Mix)
    x = torch.rand(5, 1, 8, 8)
    mix.eval()
    want = torch.stack([mix.base(i)(x) for i in range(3)]).mean(0)
    assert torch.allclose(mix(x), want, atol=1e-6)
    assert torch.allclose(mix.first(2)(x), torch.stack([mix.base(i)(x) for i in range(2)]).mean(0), atol=1e-6)
    assert not torch.allclose(mix.base(0)(x), mix.base(1)(x), atol=1e-3)
    assert mix.alone().state_dict().keys() == mix.state_dict().keys()
    rows = {name: torch.stack([w, w * 2]) for name, w in mix.state_dict().items()}
    stacked = vmap(lambda state: functional_call(mix, state, (x,)))(rows)
    assert torch.allclose(stacked[0], want, atol=1e-6)


def test_norms_of_every_base_follow_its_own_batches():
    mix = split_by_width(normed(), 2)
    assert isinstance(mix, Mix)
    bases, x = [mix.base(i) for i in range(2)], torch.rand(5, 1, 8, 8)
    for net in (mix, *bases):
        net.train()(x)
    for i, base in enumerate(bases):
        for name, w in base.state_dict().items():
            assert torch.equal(mix.state_dict()[f"net.{name}"][i], w), name


@pytest.mark.parametrize("size", range(4))
def test_clients_get_the_bases_drawn_for_them_and_they_return_to_their_places(size):
    fit, count = fit_of(), 4 - size
    ctx = make_ctx([3, 8, 20, 21, 40])
    model = random_tree(layout_of(split_by_width(cnn(1, 10, 8), 4)), 1)
    drawn = held_bases(ctx, 4, count)
    small = fit.resize.shrink({}, model, size, ctx)
    full, covered = fit.resize.grow(small, size, ctx)
    for name, x in model.items():
        assert small[name].shape[1:] == fit.layouts[size].shapes[name]
        for k in range(5):
            mine = small[name][k if count < 4 else 0]
            assert torch.equal(mine, x[0, drawn[k]])
            if count < 4:
                mask = covered[name]
                assert mask is not None
                assert torch.equal(full[name][k][drawn[k]], mine)
                assert not bool(full[name][k][~drawn[k]].any())
                assert mask.shape == full[name].shape
                assert bool((mask[k] == drawn[k].reshape(4, *[1] * (x.dim() - 2))).all())
    assert count < 4 or all(mask is None for mask in covered.values())


def test_rows_do_not_depend_on_who_else_is_there():
    fit, ctx = fit_of(), make_ctx([3, 8, 20])
    model = random_tree(layout_of(split_by_width(cnn(1, 10, 8), 4)), 1)
    together = fit.resize.shrink({}, model, 2, ctx)
    whole, masks = fit.resize.grow(together, 2, ctx)
    for k in range(3):
        one = ctx.at(slice(k, k + 1))
        alone = fit.resize.shrink({}, model, 2, one)
        grown, mask = fit.resize.grow(alone, 2, one)
        for name in model:
            assert torch.equal(alone[name][0], together[name][k])
            assert torch.equal(grown[name][0], whole[name][k])
            assert torch.equal(mask[name][0], masks[name][k])  # type: ignore[index]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_draws_differ_by_client_and_round_and_favour_no_base(count):
    drawn = torch.stack([held_bases(make_ctx(list(range(200)), t=t), 5, count) for t in range(1, 41)])
    assert bool((drawn.sum(2) == count).all())
    assert bool((drawn.double().mean((0, 1)) - count / 5).abs().max() < 0.02)
    seen = {tuple(row) for row in drawn[:, 7].tolist()}
    assert len(seen) == (5 if count in (1, 4) else 10), "in time a client holds every set of bases"
    pairs = drawn[0].double().T @ drawn[0].double() / 200
    odds = count * (count - 1) / 20
    assert bool((pairs - torch.eye(5) * (count / 5 - odds) - odds).abs().max() < 0.1)


def test_all_bases_are_trained_by_few_clients_of_one_base_each():
    for t in range(1, 6):
        for ids in (range(8), range(16, 24), range(7, 64, 8)):  # undeclared, every eighth client affords one base
            assert bool((held_bases(make_ctx(list(ids), t=t), 8, 1).sum(0) == 1).all())


def test_clients_that_keep_something_keep_their_bases():
    fit, model = fit_of(), {"x": torch.arange(4.0)[None]}
    assert fit.kept is not None
    turns = [make_ctx(list(range(12)), t=t) for t in (1, 2, 3, 4)]
    kept, fresh = (torch.stack([f.resize.shrink({}, model, 2, ctx)["x"] for ctx in turns]) for f in (fit.kept, fit))
    assert bool((kept == kept[0]).all())
    assert bool((fresh != fresh[0]).any())
    grown, _ = fit.kept.resize.grow({"x": kept[3]}, 2, turns[3])
    assert grown["x"].tolist() == [[i if i in row else 0 for i in range(4)] for row in kept[0].tolist()]
    assert len({tuple(row) for row in kept[0].tolist()}) > 2
    assert not torch.equal(fit.kept.resize.shrink({}, model, 2, changed(turns[0], seed=1))["x"], kept[0])


def test_capacity_buys_whole_bases_and_at_least_one():
    sizes = fit_of(8).sizes
    widths = [1, 0.99, 0.3, 0.25, 0.2, 0.125, 0.1, 0.0]
    ctx = changed(make_ctx(list(range(8))), capacity={"width": torch.tensor(widths)})
    assert [8 - size for size in sizes(ctx).tolist()] == [8, 7, 2, 2, 1, 1, 1, 1]
    undeclared = make_ctx(list(range(10)))
    assert [8 - size for size in sizes(undeclared).tolist()] == [8, 7, 6, 5, 4, 3, 2, 1, 8, 7]


def test_what_methods_put_beside_the_network_is_left_to_them():
    layout = with_extra(layout_of(split_by_width(cnn(1, 10, 8), 2)), ["net.conv1.bias"], "second")
    fit = bases_fit(layout)
    assert "net.conv1.bias.second" not in fit.layouts[1].shapes
    ctx = make_ctx([7])
    small = fit.resize.shrink({}, {"net.conv1.bias.second": torch.arange(16.0).reshape(1, 2, 8)}, 1, ctx)
    assert tuple(small["net.conv1.bias.second"].shape) == (1, 1, 8)


@pytest.mark.parametrize(("ratio", "bases"), [(1, 1), (0.5, 2), (0.3333, 3), (0.125, 8), (0.1, 10)])
def test_a_ratio_is_one_of_so_many(ratio, bases):
    assert bases_for_ratio(ratio) == bases


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (0.3, "split-mix.ratio is 0.3.*such as 0.3333"),
        (0.7, "such as 1"),
        (0, "split-mix.ratio is 0"),
        (2, "is 2"),
        (1e-320, "split-mix.ratio is 1e-320; it must lie between 0.0001 and 1"),
        (float("nan"), "split-mix.ratio is nan"),
    ],
)
def test_other_ratios_are_refused(ratio, words):
    with pytest.raises(ConfigError, match=words):
        bases_for_ratio(ratio)


def test_more_bases_than_units_are_refused():
    def net():
        return nn.Sequential(nn.Linear(40, 8), nn.Linear(8, 16), nn.Linear(16, 30))

    assert isinstance(split_by_width(net(), 16), Mix)
    with pytest.raises(MethodError, match=r"17 bases.*'1', has 16 units; use a ratio of 0.0625 or more"):
        split_by_width(net(), 17)


def frozen():
    model = cnn(1, 10, 8)
    model.get_parameter("conv1.weight").requires_grad_(False)
    return model


def with_a_table():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    model.register_buffer("table", torch.ones(3, dtype=torch.bool))
    return model


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (lambda: build_network("lstm", (20,), 30), "cannot narrow 'emb.*neither of a convolution nor of a dense layer"),
        (lambda: build_network("transformer", (20,), 30), "neither of a convolution.*chains and residual"),
        (frozen, "cannot narrow 'conv1'.*frozen"),
        (with_a_table, "split-mix cannot split 'table'"),
    ],
)
def test_networks_of_other_kinds_are_refused(net, words):
    with pytest.raises(MethodError, match=words):
        split_by_width(net(), 4)
