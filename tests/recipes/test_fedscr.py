"""FedSCR as a method: what waits is sent later, thresholds follow reports, both engines agree."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sparing
from reference import drive
from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError, WireError
from sparing.core.method import Blended
from sparing.core.round import begin, first_server, incoming, outgoing
from sparing.core.tree import layout_of, tree_of
from sparing.parts.blend.unbiased import unbiased_step
from sparing.recipes.fedscr import fedscr
from sparing.recipes.memory import memory
from sparing.recipes.personal import personal
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.study import method_list
from sparing.wire import nbytes
from support import changed, make_ctx, small_layout, small_net

PAIR = nn.Conv2d(2, 2, 1, bias=False)  # two filters, two channels, one weight each
LAYOUT = layout_of(PAIR)
ZERO = {"weight": torch.zeros(1, 2, 2, 1, 1)}


def constant(mass):
    """An update in which every filter and every channel weighs so much."""
    return {"weight": np.full((2, 2, 1, 1), mass / 2)}


def sent_in(played, k=0):
    """In which rounds (from 1) client k's convolution was sent."""
    return [r.ctx.round for r in played if r.up.leaves["weight"].value[r.ctx.ids.tolist().index(k)].any()]


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 40), st.integers(0, 100))
def test_a_constant_update_is_first_sent_once_it_has_added_up(a, theta):
    a, theta = a / 16, theta / 16
    first = math.floor(theta / a) + 1
    played, states = drive.play(compose(LAYOUT, fedscr(theta)), ZERO, [{0: constant(a)}] * first, [8])
    assert sent_in(played) == [first]
    assert torch.equal(played[-1].server.model["weight"], torch.full((1, 2, 2, 1, 1), first * a / 2))
    assert not states[0]["up/residual/weight"].any()


def test_what_waits_survives_rounds_sat_out():
    """theta / a = 3: sent at the fourth time client 0 takes part, whenever that is."""
    here, away = {0: constant(0.25), 1: constant(0.0)}, {1: constant(0.0)}
    played, _ = drive.play(
        compose(LAYOUT, fedscr(0.75)), ZERO, [here, away, here, away, away, here, away, here], [8, 8]
    )
    assert sent_in(played[:1] + played[2:3] + played[5:6] + played[7:8]) == [8]


def test_what_waits_survives_lost_uploads():
    """Round 2 loses an upload that held nothing of the layer, round 4 one that held it all; round 5 sends it again."""
    both = {0: constant(0.25), 1: constant(0.0)}
    method = compose(LAYOUT, fedscr(0.75))
    played, states = drive.play(method, ZERO, [both] * 6, [8, 8], lost={(1, 0), (3, 0)})
    assert sent_in(played) == [4, 5]
    assert not played[3].server.model["weight"].any(), "the server never saw round 4's"
    assert torch.equal(played[4].up.leaves["weight"].value[0], torch.full((2, 2, 1, 1), 5 * 0.25 / 2))
    assert torch.equal(states[0]["up/residual/weight"], torch.full((1, 2, 2, 1, 1), 0.25 / 2)), "round 6 waits again"


def test_thresholds_differ_with_what_clients_report_and_stay_within_bounds():
    net = small_net()
    layout, model = layout_of(net), tree_of(net)
    rng = np.random.default_rng(0)

    def move(scale):
        return {n: np.round(rng.normal(size=s) * (scale if s else 0)) for n, s in layout.shapes.items()}

    moves = [{0: move(0), 1: move(30)}, {1: move(30), 2: move(1)}, {0: move(1), 1: move(1), 2: move(1), 3: move(1)}]
    method = compose(layout, fedscr(0.5, adaptive=True))
    played, _ = drive.play(method, model, moves, [8] * 4, lost={(1, 2)})
    told = [dict(zip(r.ctx.ids.tolist(), r.down.notes["threshold"].tolist(), strict=True)) for r in played]
    assert told[0] == {0: 0.5, 1: 0.5}, "the first threshold until the first report"
    assert 0.25 < told[1][1] < 0.5
    assert told[2][0] == 0.25, "client 0 neither moved nor sent: sigmoid(0), kept while it sat out"
    assert told[2][2] == 0.5, "its only upload was lost"
    assert told[2][3] == 0.5
    assert played[1].report["threshold_min"] == played[1].report["threshold_max"] == told[1][1], "of those who arrived"
    assert (played[2].report["threshold_min"], played[2].report["threshold_max"]) == (0.25, 0.5)
    assert played[2].report["threshold_mean"] == pytest.approx(sum(told[2].values()) / 4)


def test_the_spread_of_losses_counts_from_the_fourth_round_on():
    moves = [{0: constant(0.0), 1: constant(0.0)}] * 6
    losses = [{0: 0.0, 1: 2.0 * t} for t in range(6)]  # variance t^2
    played, _ = drive.play(compose(LAYOUT, fedscr(1.0, adaptive=True)), ZERO, moves, [8, 8], losses=losses)
    told = [float(r.down.notes["threshold"][0]) for r in played]
    means = [sum(i * i for i in range(t + 1)) / (t + 1) for t in range(6)]
    want = [1.0, 0.5, 0.5, 0.5] + [1 / (1 + math.exp(-means[t])) for t in (3, 4)]
    assert told == pytest.approx(want, rel=1e-6)


def test_the_scalars_of_adaptive_thresholds_are_counted():
    played = [
        drive.play(compose(LAYOUT, fedscr(math.inf, adaptive=a)), ZERO, [{0: constant(1.0)}], [8])[0][0] for a in (0, 1)
    ]
    assert int(nbytes(played[1].up) - nbytes(played[0].up)) == 8, "divergence and significance up"
    assert int(nbytes(played[1].down) - nbytes(played[0].down)) == 4, "a threshold down"


@pytest.mark.parametrize(("name", "bad"), [("divergence", math.nan), ("significance", -1.0), ("loss", math.inf)])
def test_senseless_reports_are_refused(name, bad):
    method = compose(LAYOUT, fedscr(0.5, adaptive=True))
    (r,), _ = drive.play(method, ZERO, [{0: constant(1.0), 3: constant(1.0)}], [8] * 4)
    notes = {**r.up.notes, name: torch.tensor([0.0, bad])}
    server = first_server(method, ZERO, 4)
    with pytest.raises(WireError, match=rf"round 1: client 3 reported a {name} of {bad:g}"):
        incoming(method, server, begin(method, server, r.ctx), r.down, r.up._replace(notes=notes), r.ctx)


def test_unbiased_is_normalised_for_equal_clients_and_leaves_buffers_alone():
    net = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
    layout, model = layout_of(net), tree_of(net)
    rng = np.random.default_rng(1)
    moves = [{k: {n: np.round(rng.normal(size=s) * 4) for n, s in layout.shapes.items()} for k in (0, 1, 4)}]

    def after(counts, aggregation):
        method = compose(layout, fedscr(0.5, aggregation=aggregation))
        return drive.play(method, model, moves, counts)[0][-1].server.model

    for name, x in after([7] * 5, "normalised").items():
        assert torch.equal(x, after([7] * 5, "unbiased")[name]), name
    plain, scaled = after([8, 24, 8, 8, 32], "normalised"), after([8, 24, 8, 8, 32], "unbiased")
    factor = 5 / 3 * (8 + 24 + 32) / 80
    for name in layout.shapes:
        want = plain[name] if name in layout.buffers else model[name] + factor * (plain[name] - model[name])
        assert torch.allclose(scaled[name].double(), want.double(), atol=1e-5), name


def test_unbiased_counts_only_clients_that_train():
    """N is the number of those who can come: clients held out never do, and have no samples among everyone's."""
    step, ids = unbiased_step(LAYOUT), [0, 1]
    ctx = changed(make_ctx(ids, n=[10, 30], clients=10), samples=100, held=4)
    name = LAYOUT.params[0]
    update = {name: torch.ones(1, *LAYOUT.shapes[name], dtype=torch.float64)}
    seen = {"n": torch.tensor([10.0, 30.0])}
    blended = Blended(update, {name: None}, torch.tensor(ids), torch.ones(2).double(), seen)
    moved, _, _ = step.apply({}, blended, ctx)
    assert float(moved[name].unique()) == pytest.approx((10 - 4) / 2 * (10 + 30) / 100)


def test_memory_in_the_list_changes_nothing():
    moves = [{0: constant(0.25)}] * 4
    one, two = compose(LAYOUT, fedscr(0.6)), compose(LAYOUT, fedscr(0.6), memory())
    assert torch.equal(
        drive.play(one, ZERO, moves, [8])[0][-1].server.model["weight"],
        drive.play(two, ZERO, moves, [8])[0][-1].server.model["weight"],
    )


def test_what_quantising_rounds_away_is_remembered_too():
    layout = small_layout()
    method = compose(layout, *recipes_from_entries(method_list([{"fedscr": {"threshold": 1.0}}, "int8"])))
    rng = np.random.default_rng(5)
    move = {
        n: rng.normal(size=s) if layout.dtypes[n].is_floating_point else np.zeros(s) for n, s in layout.shapes.items()
    }
    (r,), states = drive.play(method, tree_of(small_net()), [{0: move}], [8])
    assert r.up.leaves["3.weight"].value.dtype == torch.int8
    assert states[0]["up/residual/3.weight"].any(), "a dense layer, which fedscr does not touch"


def test_a_private_convolution_is_not_counted():
    layout = small_layout()
    method = compose(layout, personal(["0"]), fedscr(0.5, dense=True))
    down = outgoing(method, first_server(method, tree_of(small_net()), 4), make_ctx([0]))
    assert "0.weight" not in down.leaves
    move = {n: np.ones(s) for n, s in layout.shapes.items()}
    (r,), _ = drive.play(method, tree_of(small_net()), [{0: move}], [8])
    assert {name for name in r.report if name.startswith("pruned")} == {"pruned_share", "pruned_share/3.weight"}


TASK = {"clients": 10, "split": {"dirichlet": 0.5}, "model": "cnn"}
QUICK = {"rounds": 4, "sample": 5, "seed": 5, "local": {"steps": 3, "batch": 32}, "evaluate": {"every": 4}}
METHODS = [
    "fedscr",
    [{"fedscr": {"adaptive": True}}],
    "psfed+fedscr+int8",
    [{"fedscr": {"threshold_mode": "budget"}}],
    [{"psfed": {"per_client": True}}, {"fedscr": {"threshold_mode": "budget", "dense": True}}, "topk", "fedavgm"],
    [{"fedscr": {"threshold_mode": "relative", "adaptive": True, "aggregation": "unbiased", "dense": True}}, "fp16"],
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_both_engines_agree_in_every_bit(method):
    """Some clients vanish before their upload, some are away."""
    options = {**QUICK, "fleet": {"dropout": 0.2, "available": 0.8}}
    plain = sparing.run(TASK, method, engine="debug", plan={"path": "loop"}, **options)
    fast = sparing.run(TASK, method, plan={"path": "loop", "chunk": 3}, **options)
    assert fast.model_sha256 == plain.model_sha256
    assert (fast.up_bytes, fast.down_bytes) == (plain.up_bytes, plain.down_bytes)
    assert [r.metrics for r in fast.table] == [r.metrics for r in plain.table]
    shares = plain.metric("pruned_share")
    assert min(shares) < 1, "something is sent"
    assert max(shares) > 0, "and something is not"


def test_a_higher_threshold_sends_less_and_infinity_only_the_rest():
    runs = [sparing.run(TASK, [{"fedscr": {"threshold": x}}], **QUICK) for x in (0.0, 0.3, 0.9, math.inf)]
    assert sorted((r.up_bytes for r in runs), reverse=True) == [r.up_bytes for r in runs]
    # in a run training differs too; for one and the same update this is exact, see tests/parts/test_structured.py
    assert [r.metric("pruned_share")[0] for r in runs] == sorted(r.metric("pruned_share")[0] for r in runs)
    assert runs[-1].metric("pruned_share") == [1.0] * 4
    assert set(runs[0].table[0].metrics) == {"pruned_share", "pruned_share/conv1.weight", "pruned_share/conv2.weight"}
    plain = sparing.run(TASK, "fedavg", **QUICK)
    assert runs[0].up_bytes <= plain.up_bytes + 4 * 5 * 2 * (2 + 4 + 2), "at most F + C bits and two tags a layer"


def test_thresholds_survive_a_resume(tmp_path):
    class Stop(Exception):
        pass

    def stop(record):
        if record.round == 2:
            raise Stop

    method = [{"fedscr": {"adaptive": True}}]
    whole = sparing.run(TASK, method, **QUICK)
    with pytest.raises(Stop):
        sparing.run(TASK, method, out=tmp_path / "a", loggers=[stop], **QUICK)
    resumed = sparing.resume(tmp_path / "a")
    assert resumed.model_sha256 == whole.model_sha256
    assert resumed.metric("threshold_mean") == whole.metric("threshold_mean")


@pytest.mark.parametrize(
    ("method", "kind", "words"),
    [
        ([{"fedscr": {"threshold": -1}}], ConfigError, r"fedscr\.threshold is -1"),
        ([{"fedscr": {"threshold": float("nan")}}], ConfigError, r"fedscr\.threshold is nan"),
        ([{"fedscr": {"threshold_mode": "quantile"}}], ConfigError, r"fedscr\.threshold_mode is 'quantile'"),
        ([{"fedscr": {"aggregation": "sum"}}], ConfigError, r"fedscr\.aggregation is 'sum'"),
        (
            [{"fedscr": {"threshold_mode": "budget", "threshold": 2}}],
            ConfigError,
            r"share to send in budget mode, is 2",
        ),
        ("int8+fedscr", MethodError, "'fedscr' needs values, and a quantiser before it gives codes; put it first"),
        ([{"randk": {"unbiased": True}}, "fedscr"], MethodError, r"'randk' scales its values up"),
    ],
)
def test_bad_input_is_refused(method, kind, words):
    with pytest.raises(kind, match=words):
        compose(small_layout(), *recipes_from_entries(method_list(method)))


def test_a_model_without_convolutions_asks_for_dense():
    with pytest.raises(MethodError, match=r"would thin out nothing.*dense: true"):
        sparing.run({**TASK, "model": "mlp"}, "fedscr", **QUICK)
    study = {**QUICK, "rounds": 1, "local": {"epochs": 1, "batch": 32}}
    result = sparing.run({**TASK, "model": "mlp"}, [{"fedscr": {"dense": True}}], **study)
    assert 0 < result.metric("pruned_share")[0] < 1
