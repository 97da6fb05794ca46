"""Rounds of adapters by the library against NumPy, from the factors that clients were sent and sent back."""

import numpy as np
import pytest
import torch

from reference import lora as reference
from reference.lora_rounds import MERGED, A, B, Play, drawn_moves
from sparing.parts.size.lora.adapted import keyed_rows
from sparing.parts.size.lora.products import strongest_directions

COHORTS = [[0, 1, 2, 3], [1, 2, 5], [4, 3], [2]]
KERNELS = [None, (3, 2)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_average_is_the_mean_of_each_factor(kernel):
    play = Play(kernel, rank=3)
    for ids in COHORTS:
        play.play(ids, chunk=2)
        b, a = reference.average(play.arrivals(ids, lambda rank: 16 / 3))
        assert np.allclose(play.factors()[0], b, rtol=0, atol=1e-9)
        assert np.allclose(play.factors()[1], a, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scale", ["shared", "rank", "root"])
def test_freeze_a_averages_columns_over_those_who_have_them(kernel, scale):
    play = Play(kernel, ranks=[5, 2], blend="freeze-a", scale=scale)
    scale_of = {"shared": lambda r: 16 / 5, "rank": lambda r: 16 / r, "root": lambda r: 16 / r**0.5}[scale]
    for ids in COHORTS:
        old, a = play.factors()
        play.play(ids, chunk=2)
        assert np.allclose(
            play.factors()[0], reference.freeze_a(play.arrivals(ids, scale_of), old, scale_of(5)), atol=1e-9
        )
        assert (play.factors()[1] == a).all()


def test_freeze_a_at_equal_ranks_is_the_mean_of_products():
    play = Play(rank=3, blend="freeze-a").play([0, 2, 5])
    b, a = play.factors()
    found = reference.mean_product(play.arrivals([0, 2, 5], lambda rank: 16 / 3))
    assert np.allclose(reference.product(b, a, 16 / 3), found, atol=1e-8)


OFFERED = [5, 2, 3]
SCALES = {"shared": lambda r: 16 / 5, "rank": lambda r: 16 / r, "root": lambda r: 16 / r**0.5}
GATHERED = ["svd", "partitioned", "increments"]


def wanted(blend, play, ids, old, scale_of, keep):
    """What the reference makes of this round, as a product."""
    uploads = play.arrivals(ids, scale_of)
    if blend == "svd":
        return reference.svd(uploads, keep)
    if blend == "partitioned":
        return reference.partitioned(uploads, (*old, scale_of(5)), OFFERED, keep)
    sent = [
        reference.product(play.sent[i][B], play.sent[i][A], scale_of(play.sent[i][B].shape[1])) for i in sorted(ids)
    ]
    return reference.increments(uploads, sent, reference.product(*old, scale_of(5)), keep)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("keep", ["largest", 2, 6, "all"])
@pytest.mark.parametrize("blend", GATHERED)
def test_products_of_any_rank_are_blended(blend, keep, scale, kernel):
    play, rank = (
        Play(kernel, ranks=OFFERED, blend=blend, scale=scale, keep=keep),
        {"largest": 5, "all": 7}.get(keep, keep),
    )
    for ids in COHORTS:
        old = play.factors()
        play.play(ids, chunk=2)
        found = wanted(blend, play, ids, old, SCALES[scale], rank)
        assert np.allclose(reference.product(*play.factors(), SCALES[scale](5)), found, rtol=0, atol=1e-8)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("blend", GATHERED)
def test_clients_are_sent_the_best_of_their_rank(blend, scale):
    play = Play(ranks=OFFERED, blend=blend, scale=scale, keep="all").play([0, 1, 2, 3])
    whole = reference.product(*play.factors(), SCALES[scale](5))
    play.play([3, 4, 5])
    for i, rank in ((3, 5), (4, 2), (5, 3)):
        b, a = play.sent[i][B], play.sent[i][A]
        assert b.shape[1] == rank
        assert np.allclose(reference.product(b, a, SCALES[scale](rank)), reference.cut(whole, rank), atol=1e-8)
        assert np.allclose(np.linalg.norm(b, axis=0), np.linalg.norm(a, axis=1))


def test_what_was_cut_is_the_root_of_the_squares_dropped():
    play = Play(rank=2, blend="svd").play([0, 1, 2])
    s = np.linalg.svd(reference.mean_product(play.arrivals([0, 1, 2], lambda rank: 8.0)), compute_uv=False)
    assert play.report["truncation_error"] == pytest.approx(np.sqrt((s[2:] ** 2).sum() / (s**2).sum()))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("blend", GATHERED)
def test_directions_that_are_none_get_a_row_drawn_anew(blend, kernel):
    still = Play(kernel, ranks=OFFERED, blend=blend, scale="rank", moves=only_client(1))
    shape, drawn = tuple(still.net.q.lora_a.weight.shape[1:]), []
    for ids in ([1, 2], [1, 2], [3]):
        still.play(ids)
        b, a = still.factors()
        rows = keyed_rows("q", 0, still.round, 5, shape).flatten(1).numpy()
        assert not b[:, 2:].any()
        assert np.array_equal(a[2:], rows[2:])
        drawn.append(a[2:])
    assert np.array_equal(still.sent[3][A][2:], drawn[1])
    assert not np.array_equal(drawn[0], drawn[1])


def only_client(one):
    return lambda who, name, shape, t: drawn_moves(who, name, shape, 1) if who == one else np.zeros(shape)


@pytest.mark.parametrize(
    "options",
    [{"ranks": OFFERED, "keep": "all"}, {"rank": 3, "blend": "exact"}, {"ranks": OFFERED, "blend": "stack"}],
    ids=str,
)
def test_sums_are_the_same_in_any_order_and_grouping(options):
    model = None
    for ids, chunk in (([0, 1, 2, 3, 4], 1), ([4, 2, 0, 3, 1], 8), ([3, 4, 0, 1, 2], 2)):
        play = Play(**options).play(ids, chunk).play(ids, chunk)
        assert model is None or all((x == model[name]).all() for name, x in play.server.model.items())
        model = play.server.model


@pytest.mark.parametrize(("m", "n", "ranks"), [(12, 9, [2, 3]), (9, 12, [4, 5, 3]), (5, 20, [1]), (6, 6, [0, 2])])
def test_directions_are_those_of_the_sum(m, n, ranks):
    g = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    pairs = [(draw(m, r), draw(r, n)) for r in ranks]
    whole, found = sum(b @ a for b, a in pairs), strongest_directions(pairs)
    assert torch.allclose(found.u * found.s @ found.vt, whole, atol=1e-10)
    assert np.allclose(
        found.s[: sum(ranks)], np.linalg.svd(whole.numpy(), compute_uv=False)[: len(found.s)][: sum(ranks)]
    )
    largest = found.u.gather(0, found.u.abs().argmax(0, keepdim=True))
    assert bool((largest > 0).all())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scale", SCALES)
def test_padded_factors_count_by_the_norms_of_products(scale, kernel):
    play = Play(kernel, ranks=OFFERED, blend="padded", scale=scale)
    for ids in COHORTS:
        old = play.factors()
        play.play(ids, chunk=2)
        for i in ids:
            rank = OFFERED[i % 3]
            root = np.sqrt(SCALES[scale](5) / SCALES[scale](rank))
            assert np.allclose(play.sent[i][B], old[0][:, :rank] * root)
            assert np.allclose(play.sent[i][A], old[1][:rank] * root)
        found = reference.padded(play.arrivals(ids, SCALES[scale]), 5, SCALES[scale](5))
        assert np.allclose(play.factors()[0], found[0], rtol=0, atol=1e-7)
        assert np.allclose(play.factors()[1], found[1], rtol=0, atol=1e-7)


def test_padded_where_nothing_was_learned_stays():
    play = Play(rank=3, blend="padded", moves=lambda who, name, shape, t: np.zeros(shape))
    before = play.factors()
    play.play([0, 1])
    assert all(np.array_equal(x, y) for x, y in zip(play.factors(), before, strict=True))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scale", ["rank", "root"])
def test_exact_averages_products(scale, kernel):
    play = Play(kernel, rank=3, blend="exact", scale=scale)
    for ids in COHORTS:
        before = play.merged()
        play.play(ids, chunk=2)
        uploads = play.arrivals(ids, SCALES_AT_3[scale])
        b, a, residual = reference.exact(uploads)
        assert np.allclose(play.factors()[0], b, rtol=0, atol=1e-9)
        assert np.allclose(play.factors()[1], a, rtol=0, atol=1e-9)
        assert np.allclose(play.merged(), before + residual, rtol=0, atol=1e-6)
        assert np.allclose(play.product(), before + reference.mean_product(uploads), rtol=0, atol=1e-6)
        assert np.linalg.matrix_rank(residual) <= (len(ids) - 1) * 3
        assert play.report["residual"] == pytest.approx(np.linalg.norm(residual), abs=1e-9)


SCALES_AT_3 = {"rank": lambda rank: 16 / 3, "root": lambda rank: 16 / 3**0.5}


def test_exact_is_exact_whatever_an_optimiser_makes_of_the_factors():
    """The residual is that of the factors that came; what moves them afterwards moves them alone."""
    plain, momentum = (Play(rank=3, blend="exact", beside=beside) for beside in ([], ["fedavgm"]))
    for ids in COHORTS[:1]:
        assert np.array_equal(plain.play(ids).merged(), momentum.play(ids).merged())
    assert plain.merged().any()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", [{"rank": 3}, *({"ranks": OFFERED, "scale": scale} for scale in SCALES)], ids=str)
def test_stacked_factors_join_the_base_and_new_ones_start(options, kernel):
    play = Play(kernel, **options, blend="stack")
    scale_of = SCALES[options["scale"]] if "scale" in options else SCALES_AT_3["rank"]
    shape, rows = tuple(play.net.q.lora_a.weight.shape[1:]), []
    for ids in COHORTS:
        before = play.merged()
        play.play(ids, chunk=2)
        uploads = play.arrivals(ids, scale_of)
        assert np.allclose(play.merged(), before + reference.mean_product(uploads), rtol=0, atol=1e-6)
        assert np.allclose(play.product(), before + reference.stack(uploads), rtol=0, atol=1e-6)
        for i in ids:
            assert not play.sent[i][B].any()
            rank = play.sent[i][B].shape[1]
            drawn = keyed_rows("q", 0, play.round - 1, rank, shape).flatten(1).numpy()
            assert np.array_equal(play.sent[i][A], drawn)
        rows.append(keyed_rows("q", 0, play.round, 2, shape))
    assert not torch.equal(rows[0], rows[1])


BLENDS = ["average", "exact", "padded", "stack", *GATHERED]


@pytest.mark.parametrize(("options", "who"), [({"rank": 3}, 4), ({"ranks": OFFERED}, 0), ({"ranks": OFFERED}, 1)])
@pytest.mark.parametrize("blend", BLENDS)
def test_one_client_alone_is_plain_training(blend, options, who):
    if blend in ("average", "exact") and "ranks" in options:
        return
    play = Play(**options, blend=blend).play([who])
    ((b, a, s, _),) = play.arrivals([who], lambda rank: play.scale)
    assert np.allclose(play.product(), reference.product(b, a, s), rtol=0, atol=1e-6)


@pytest.mark.parametrize("still", ["", A], ids=["both factors", "the common A"])
def test_identical_uploads_at_equal_ranks_are_blended_alike(still):
    def alike(who, name, shape, t):
        return np.zeros(shape) if name == still else drawn_moves(0, name, shape, t)

    found = []
    for blend in [*BLENDS, *["freeze-a"] * (still == A)]:
        found.append(Play(rank=3, blend=blend, moves=alike).play([0, 1, 3]).product())
    assert all(np.allclose(one, found[0], rtol=0, atol=1e-6) for one in found)


def test_increments_at_equal_ranks_are_svd():
    plays = [Play(rank=3, blend=blend) for blend in ("increments", "svd")]
    for ids in COHORTS:
        first, second = (reference.product(*play.play(ids).factors(), play.scale) for play in plays)
        assert np.allclose(first, second, rtol=0, atol=1e-6)


@pytest.mark.parametrize("blend", ["increments", "svd", "partitioned", "freeze-a", "padded"])
def test_no_training_under_increments_changes_nothing(blend):
    play = Play(ranks=OFFERED, blend=blend, keep="all" if blend in GATHERED else "largest").play([0, 1, 2, 3])
    before = reference.product(*play.factors(), play.scale)
    play.moves = lambda who, name, shape, t: np.zeros(shape)
    for ids in ([1, 2], [1], [0, 4]):
        play.play(ids)
    same = np.allclose(reference.product(*play.factors(), play.scale), before, rtol=0, atol=1e-9)
    assert same is (blend in ("increments", "freeze-a")), "what truncation cut away has a vote in the others"


@pytest.mark.parametrize("blend", GATHERED)
def test_a_client_trains_all_columns_though_the_server_has_fewer(blend):
    play = Play(ranks=OFFERED, blend=blend).play([1])
    assert np.linalg.matrix_rank(play.factors()[0]) == 2
    g = np.random.default_rng(0)
    x, y = (torch.from_numpy(g.standard_normal((20, n))) for n in (9, 7))

    def descend(lesson, ctx):
        b, a = (lesson.start[name][0].clone().requires_grad_() for name in (B, A))
        for _ in range(2):
            with torch.enable_grad():
                loss = (x @ a.mT @ b.mT * play.scale - y).square().mean()
                grads = torch.autograd.grad(loss, (b, a))
            with torch.no_grad():
                b -= 0.1 * grads[0]
                a -= 0.1 * grads[1]
        play.learned = (b - lesson.start[B][0]).detach(), (a - lesson.start[A][0]).detach()
        return lesson.start | {B: b.detach()[None], A: a.detach()[None]}

    play.play([0], descend=descend)
    assert bool((play.learned[0].abs().amax(0) > 1e-6).all())
    assert bool((play.learned[1].abs().amax(1) > 1e-6).all())
    assert np.linalg.matrix_rank(play.factors()[0]) == 5


@pytest.mark.parametrize("blend", [*BLENDS, "freeze-a"])
def test_nothing_of_the_base_is_in_any_parcel(blend):
    play = Play(rank=2, blend=blend)
    play.play([0, 1])
    up = {B} if blend == "freeze-a" else {A, B}
    down = {"exact": {A, B, MERGED}, "stack": {MERGED}}.get(blend, up)
    assert play.travelled == [down, up]
