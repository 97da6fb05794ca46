"""Images that stay bytes in memory, and their variants: keyed, so the same alone, in a cohort and stacked."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap

from sparing.core.context import context
from sparing.core.errors import ConfigError
from sparing.core.method import Local, Phase
from sparing.core.optimiser import Optimiser
from sparing.core.tree import take_rows, tree_of, tree_sha256
from sparing.data.augment import _random_crop, _random_flip, augment_batch, read_augmentations
from sparing.data.clients import Clients
from sparing.data.dataset import to_network_input
from sparing.models import cnn
from sparing.tasks.task import Task
from sparing.train.evaluate import evaluate_all, evaluate_rows
from sparing.train.local import train
from sparing.train.losses import cross_entropy

SHAPE = (2, 8, 8)
SIZES = (5, 1, 12)
BOTH = ["flip", {"crop": {"padding": 2}}]


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return cnn(2, 3, side=8)


def cohort(augment=None) -> Clients:
    g = torch.Generator().manual_seed(0)
    data = Clients.of(
        [
            (torch.randint(256, (n, *SHAPE), generator=g, dtype=torch.uint8), torch.randint(3, (n,), generator=g))
            for n in SIZES
        ]
    )
    return replace(data, augment=read_augmentations(augment, SHAPE))


def trained(data, path="loop", ids=(0, 1, 2), seed=5, round=2, phases=1, model=None):
    model, ids = model or net(), torch.tensor(ids)
    ctx = context(seed=seed, round=round, rounds=9, ids=ids, n=data.count[ids], clients=len(data), samples=len(data.y))
    local = Local((Phase(epochs=2, batch=4, optimiser=Optimiser(lr=0.1)),) * phases)
    return train(model, cross_entropy, data, local, tree_of(model), ctx, path=path)[0]


def close(a, b) -> bool:
    return all(torch.allclose(x, b[name], rtol=1e-4, atol=1e-6) for name, x in a.items())


def test_bytes_stay_bytes_and_train_like_floats():
    data = cohort()
    floats = replace(data, x=to_network_input(data.x))
    assert data.x.dtype == torch.uint8
    assert (float(floats.x.min()), float(floats.x.max())) == (0, 1)
    for path in ("loop", "loop-fast", "stacked"):
        assert tree_sha256(trained(data, path)) == tree_sha256(trained(floats, path))
    model, ids = net(), torch.arange(3)
    for tree in (tree_of(model), trained(data)):
        mine, theirs = (evaluate_rows(model, cross_entropy, tree, d, ids) for d in (data, floats))
        assert torch.equal(mine["loss"], theirs["loss"])
    mine, theirs = (evaluate_all(model, cross_entropy, tree_of(model), d.x, d.y) for d in (data, floats))
    assert mine == theirs


def test_only_samples_may_be_bytes():
    data = Clients.of([(np.zeros((2, *SHAPE), np.uint8), np.array([0, 1], np.uint8))])
    assert (data.x.dtype, data.y.dtype) == (torch.uint8, torch.int64)
    assert Clients.of([([[1, 2]], [0])]).x.dtype == torch.int64


def test_stacked_as_in_the_loop():
    for augment in (BOTH, "crop", [{"flip": {}}]):
        data = cohort(augment)
        assert close(trained(data, "stacked", phases=2), trained(data, phases=2))
        assert not close(trained(data), trained(cohort()))


def test_a_client_alone_is_the_client_in_a_cohort():
    data = cohort(BOTH)
    whole = trained(data, ids=(2, 0, 1))
    for k, i in enumerate((2, 0, 1)):
        assert tree_sha256(take_rows(whole, slice(k, k + 1))) == tree_sha256(trained(data, ids=(i,)))


def test_every_seed_round_step_and_phase_draws_anew():
    seen = []

    class Watching(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 3)

        def forward(self, x):
            seen.append(x.detach().clone())
            return self.head(x.mean((2, 3)))

    only = Clients.of([(cohort().x[:1], [0])])
    only = replace(only, augment=read_augmentations(["flip", {"crop": {"padding": 7}}], SHAPE))
    model = Watching()
    for seed, round in ((5, 2), (6, 2), (5, 3)):
        trained(only, ids=(0,), seed=seed, round=round, phases=2, model=model)
    assert len(seen) == 12  # two epochs of one step, two phases, three runs
    assert len({x.numpy().tobytes() for x in seen}) >= 11  # of 450 variants: two may coincide
    trained(only, ids=(0,), phases=2, model=model)
    assert all(torch.equal(a, b) for a, b in zip(seen[:4], seen[12:], strict=True))


def test_flips_happen_half_the_time():
    x = torch.rand(2000, 1, 2, 3)
    out = _random_flip(x, torch.arange(2000))
    mirrored = (out == x.flip(-1)).flatten(1).all(1)
    assert bool((mirrored | (out == x).flatten(1).all(1)).all())
    assert 900 < int(mirrored.sum()) < 1100


def test_a_crop_is_a_window_of_the_framed_image_and_all_windows_occur():
    x = torch.rand(500, 2, 4, 5) + 1
    out = _random_crop(x, torch.arange(500), padding=2)
    windows = F.pad(x, [2] * 4).unfold(2, 4, 1).unfold(3, 5, 1).flatten(2, 3)
    fits = (out[:, :, None] == windows).all(1).flatten(2).all(2)
    assert bool(fits.any(1).all())
    times = fits[fits.sum(1) == 1].sum(0)
    assert len(times) == 25
    assert int(times.min()) > 5
    assert int(times.max()) < 45


def test_a_sample_does_not_depend_on_its_company():
    x, keys, chosen = torch.rand(3, 4, *SHAPE), torch.tensor([7, 8, 9]), read_augmentations(BOTH, SHAPE)
    whole = augment_batch(x, keys, chosen)
    assert torch.equal(whole[1:2, :2], augment_batch(x[1:2, :2], keys[1:2], chosen))
    single = vmap(lambda x, key: augment_batch(x[None], key[None], chosen)[0])(x, keys)
    assert torch.equal(single, whole)
    assert augment_batch(x, keys, ()) is x
    before, each = x.clone(), torch.arange(4)
    for augment in chosen:
        assert torch.equal(augment(x[0], each)[2:3], augment(x[0, 2:3], each[2:3]))
    assert torch.equal(x, before)


def test_augmentations_draw_independently():
    x = torch.rand(1, 800, 1, 5, 5) + 1
    twice = augment_batch(x, torch.tensor([3]), [_random_flip, _random_flip])
    assert 300 < int((twice == x).flatten(2).all(2).sum()) < 500  # with one draw for both it would be all


def test_evaluation_never_augments():
    plain, varied, model, ids = cohort(), cohort(BOTH), net(), torch.arange(3)
    for tree in (tree_of(model), trained(varied)):
        mine, theirs = (evaluate_rows(model, cross_entropy, tree, data, ids) for data in (varied, plain))
        assert torch.equal(mine["loss"], theirs["loss"])
    task = Task(model, varied, test=varied).to(torch.device("cpu"))
    assert task.train.augment == varied.augment
    mine, theirs = (evaluate_all(model, cross_entropy, tree_of(model), *t) for t in (task.test_all, (plain.x, plain.y)))
    assert mine == theirs


def test_none_and_travelling():
    assert read_augmentations(None, (5,)) == read_augmentations("none", (5,)) == read_augmentations([], (5,)) == ()
    varied = cohort(BOTH)
    assert tree_sha256(trained(pickle.loads(pickle.dumps(varied)))) == tree_sha256(trained(varied))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: read_augmentations(["crp"], SHAPE), "no augmentation is called 'crp': did you mean 'crop'"),
        (
            lambda: read_augmentations({"crop": {"paddin": 2}}, SHAPE),
            "augment 'crop' has no option 'paddin'; did you mean 'padd",
        ),
        (lambda: read_augmentations([{"flip": {"p": 1}}], SHAPE), "augment 'flip' has no option 'p'; it takes none"),
        (
            lambda: read_augmentations([{"crop": {"padding": 0}}], SHAPE),
            "crop.padding is 0: input should be greater than 0",
        ),
        (
            lambda: read_augmentations([{"crop": {"padding": 8}}], SHAPE),
            "crop.padding is 8: it must be below the side.* 8",
        ),
        (lambda: read_augmentations("crop", (1, 4, 9)), "crop.padding is 4: it must be below"),
        (
            lambda: read_augmentations("flip", (80,)),
            r"augment: flip is for images .*, seen samples of shape \(80,\): leave",
        ),
        (lambda: read_augmentations([3], SHAPE), "augment is 3: write a name"),
        (
            lambda: replace(Clients.of([([[1.0]], [0])]), augment=(_random_flip,)),
            r"augment is for images .* shape \(1,\)",
        ),
        (
            lambda: replace(Clients.of([(torch.zeros(1, *SHAPE).long(), [0])]), augment=(_random_flip,)),
            "augment is for images in floats or uint8, seen int64",
        ),
    ],
)
def test_augmentations_that_cannot_be_meant(call, sentence):
    with pytest.raises(ConfigError, match=sentence):
        call()
