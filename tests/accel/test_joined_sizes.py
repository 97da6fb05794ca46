"""Clients of several ranks trained together, zeros around the smaller factors, are the same clients trained apart."""

from contextlib import closing

import pytest
import torch
from torch import nn

import sparing
from sparing.accel.joined_sizes import join_ranks, pad_factors
from sparing.core.compose import compose
from sparing.core.round import first_server, outgoing
from sparing.core.tree import layout_of, tree_of
from sparing.engines.engine import chunks_by_thread, cohort_context
from sparing.engines.parcel_sizes import join_sizes
from sparing.parts.factors import factor_product
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.start import new_run, settle_study
from sparing.runs.study import method_list, study_from
from support import declared, make_ctx

THIN = {"fedhm": {"ratios": [0.5, 0.3, 0.1], "full": 0}}
LOCAL = {"epochs": 1, "batch": 8, "momentum": 0.9, "weight_decay": 0.01}


def normed():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, (3, 2), stride=2),
        nn.BatchNorm2d(12), nn.Dropout(0.2), nn.Flatten(), nn.Linear(12 * 3 * 4, 20), nn.ReLU(), nn.Linear(20, 4),
    )  # fmt: skip


def dense():
    return nn.Sequential(nn.Flatten(), *[nn.Linear(a, b) for a, b in ((64, 40), (40, 30), (30, 4))])


def square():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(12 * 4 * 4, 40), nn.ReLU(), nn.Linear(40, 4),
    )  # fmt: skip


def task(net, clients=12):
    g = torch.Generator().manual_seed(0)
    n = [8 + 8 * (i % 2) for i in range(clients)]
    data = [(torch.randn(k, 1, 8, 8, generator=g), torch.randint(0, 4, (k,), generator=g)) for k in n]
    return sparing.Task(net, train=data, test=data)


def played(
    net, method, engine="vector", path="stacked", rounds=3, chunk=64, device="cpu", precision="float32", **options
):
    """The model after some rounds, everyone's bytes in each, and how many calls there were in the last."""
    whole = {"task": "x", "method": method, "rounds": rounds, "sample": 7, "local": LOCAL, "device": device, **options}
    plan = {"path": path, "chunk": chunk, "threads": 1, "precision": precision}
    study = study_from({**whole, "engine": engine, "plan": plan})
    job, study = settle_study(study, task(net))[:2]
    tables, calls = [], 0
    with closing(new_run(study, job, None)) as run:
        for t in range(1, rounds + 1):
            ids = job.fleet.cohort(study.seed, t, run.clients, 7)
            calls = len(list(chunks_by_thread(join_sizes(job), cohort_context(job, run.server, ids, t))))
            run.server, outcome = run.engine.round(run.server, ids, t)
            tables.append([{kind: x.tolist() for kind, x in way.items()} for way in (outcome.down, outcome.up)])
            tables.append(outcome.report)
        return run.server.model, tables, calls


def agree(one, other, within=2e-5):
    assert [x for x in one[1] if isinstance(x, list)] == [x for x in other[1] if isinstance(x, list)], "bytes"
    for mine, yours in zip(one[1][1::2], other[1][1::2], strict=True):
        assert mine == pytest.approx(yours, rel=max(1e-3, within), abs=within)
    for name, x in other[0].items():
        assert float((one[0][name].to(x.device) - x).abs().max()) <= within * max(1.0, float(x.abs().max())), name


def apart(*args, **options):
    """The same, every size in a chunk of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(join_sizes, "body", join_sizes.plain)
        return played(*args, **options)


@pytest.fixture(autouse=True)
def on_a_cpu_too(monkeypatch):
    def join(job):
        method = join_ranks(job.method) if job.path == "stacked" else None
        return job if method is None else job._replace(method=method)

    monkeypatch.setattr(join_sizes, "body", join)


WAYS = (("vector", "stacked"), ("debug", "loop"))
CASES = {
    "some whole": (dense, "fedhm", {}),
    "products": (dense, [{"fedhm": {"ratios": [0.5, 0.3, 0.1], "full": 0, "blend": "products"}}], {}),
    "none whole": (dense, [THIN], {}),
    "square": (square, [THIN], {}),
    "convolutions": (normed, [THIN], {}),
    "by samples": (normed, [{"fedhm": {"weighting": "samples"}}], {}),
    "personal": (normed, ["personal", THIN], {}),
    "clipped": (dense, [THIN], {"local": {**LOCAL, "clip": 0.5, "prox": 0.1}}),
    "adam": (dense, [THIN], {"local": {"epochs": 1, "batch": 8, "optimiser": "adam", "lr": 0.01}}),
    "own buffers": (normed, [THIN], {"local": {**LOCAL, "buffers": "own"}}),
    "broadcast": (dense, [THIN, "broadcast"], {}),
    "some vanish": (dense, [THIN], {"fleet": {"dropout": 0.4}}),
    "attackers": (dense, [THIN, "median"], {"fleet": {"attack": {"kind": "sign-flip", "share": 0.2}}}),
    "momentum of the server": (dense, [THIN, "fedavgm"], {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_together_is_as_apart(case):
    net, method, options = CASES[case]
    one, other = played(net, method, **options), apart(net, method, **options)
    assert one[2] < other[2]
    agree(one, other, within=1e-4 if net is normed else 2e-5)


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_in_any_chunks(chunk):
    agree(played(dense, [THIN], chunk=chunk), apart(dense, [THIN]))


def test_bytes_are_those_that_are_really_written(tmp_path):
    for fleet in ({}, {"capacity": declared(tmp_path / "devices.csv", "rank")}):
        one, debug = (played(dense, [THIN], engine=e, path=p, fleet=fleet) for e, p in WAYS)
        agree(one, debug)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("net", "precision", "within"),
    [(dense, "float32", 1e-4), (normed, "float32", 1e-3), (square, "float32", 1e-4), (square, "bf16", 3e-2)],
)
@pytest.mark.parametrize("blend", ["products", "increments"])
def test_together_on_a_gpu(net, precision, within, blend):
    how = {"rounds": 2, "device": "cuda", "local": {"epochs": 1, "batch": 8, "lr": 0.05}, "precision": precision}
    one, other = (play(net, [{"fedhm": {"full": 0, "blend": blend}}], **how) for play in (played, apart))
    assert one[2] == 2 < other[2]
    agree(one, other, within)


@pytest.mark.gpu
@pytest.mark.parametrize("net", [dense, square])
@pytest.mark.parametrize("blend", ["products", "increments", "partitioned"])
def test_blends_on_a_gpu_are_those_on_the_cpu(net, blend):
    how = {"rounds": 2, "local": {"epochs": 1, "batch": 8, "lr": 0.05}}
    method = [{"fedhm": {"full": 0, "blend": blend}}]
    agree(played(net, method, device="cuda", **how), played(net, method, **how), 1e-3)


@pytest.mark.gpu
def test_what_a_gpu_hands_to_its_host_goes_on_being_right():
    how = {"rounds": 5, "local": {"epochs": 1, "batch": 8, "lr": 0.05}}
    agree(played(square, [THIN], device="cuda", **how), played(square, [THIN], **how), 1e-3)


@pytest.mark.parametrize(
    ("method", "may"),
    [
        ("fedhm", True),
        ("personal+fedhm", True),
        ("fedhm+int8", False),
        ("fedhm+topk", False),
        ("heterofl", False),
        ("fedavg", False),
        ([{"fedhm": {"ratios": [1]}}], False),
        ("fedhm+fp16", False),
        ("fedhm+broadcast", True),
        ([{"fedhm": {"blend": "products"}}], True),
        ([{"fedhm": {"blend": "partitioned"}}], False),
    ],
    ids=str,
)
def test_only_where_nobody_looks_at_the_factors(method, may):
    joined = join_ranks(compose(layout_of(dense()), *recipes_from_entries(method_list(method))))
    assert (joined is not None) is may


def test_what_is_sent_is_zero_beyond_a_rank():
    net = normed()
    method = compose(layout_of(net), *recipes_from_entries([THIN]))
    server = first_server(method, tree_of(net), 9)
    ctx = make_ctx([2, 0, 1])
    together = outgoing(join_ranks(method), server, ctx).leaves
    for k in range(3):
        for name, leaf in outgoing(method, server, ctx.at(slice(k, k + 1))).leaves.items():
            whole = together[name].value[k if len(together[name].value) > 1 else 0]
            part = whole[tuple(slice(n) for n in leaf.value.shape[1:])]
            assert torch.equal(part, leaf.value[0])
            assert int(whole.count_nonzero()) == int(leaf.value.count_nonzero())


def test_padded_factors_have_the_same_product():
    g = torch.Generator().manual_seed(0)
    for a, b in (((6, 4), (4, 5)), ((6, 4, 3, 1), (4, 5, 1, 2))):
        a, b = (torch.randn(1, *shape, generator=g) for shape in (a, b))
        wide = factor_product(*pad_factors(a, b, torch.tensor([1, 3, 4])))
        for k, rank in enumerate((1, 3, 4)):
            assert torch.allclose(wide[k], factor_product(a[:, :, :rank], b[:, :rank])[0], atol=1e-6)
