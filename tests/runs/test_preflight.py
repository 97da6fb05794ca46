"""What is refused before the first round, and which models are left to the loop."""

from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import sparing
from sparing.core.errors import ConfigError, DataError, SparingError

G = torch.Generator().manual_seed(0)
X = torch.rand(40, 6, generator=G)
Y = X[:, :3].argmax(1)
TOKENS = torch.randint(0, 10, (40, 6), generator=G)
QUICK = {"rounds": 1, "sample": 1.0, "local": {"epochs": 1, "lr": 0.1}}


def play(model, x=X, y=Y, loss=None, plan=None, test=None, **study):
    task = sparing.Task(model, [(x[i::4], y[i::4]) for i in range(4)], test or (x, y), loss=loss)
    return sparing.run(task, **{**QUICK, "plan": plan or {}, **study})


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.main, self.aux = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.main(x)


class Detached(Two):
    def forward(self, x):
        return self.main(x).detach()


class DetachedInTraining(Two):
    def forward(self, x):
        return self.main(x).detach() if self.training else self.main(x)


def wrong_share(output, y):
    return (output.argmax(1) != y).float()


@pytest.mark.parametrize("path", ["loop", "loop-fast", "stacked", "implicit"])
def test_a_loss_that_no_gradient_comes_through_is_refused(path):
    for model, loss in (
        (lambda: nn.Linear(6, 3), wrong_share),
        (lambda: nn.Linear(6, 3), lambda output, y: torch.ones(len(y))),
        (Detached, None),
        (DetachedInTraining, None),
    ):
        with pytest.raises(ConfigError, match="no gradient of the loss reaches any parameter that is trained"):
            play(model, loss=loss, plan={"path": path})


def test_parameters_that_the_loss_does_not_see_may_stand_beside_others():
    assert play(Two).accuracy > 0
    assert play(Two, method="ditto").accuracy > 0
    chain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    assert play(chain, method="split-mix").accuracy > 0, "a network whose tensors hold several"


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda output, y: (output.argmax(1) != y).long(), "the loss gives torch.int64 numbers"),
        (lambda output, y: None, "the loss gives something of type NoneType"),
        (lambda output, y: output.sum(1).tolist(), "the loss gives something of type list"),
    ],
)
def test_a_loss_that_is_no_tensor_of_floats_is_refused(loss, words):
    with pytest.raises(ConfigError, match=words):
        play(Two, loss=loss)


class Scale(nn.Module):
    """Takes samples of any float type, and lets the wider one win."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return (x * self.by)[:, :3]


class Narrow(Scale):
    def forward(self, x):
        return super().forward((x - x.mean()).float())


def test_float64_beside_a_model_in_float32():
    for model, words in (
        (Scale, "train: x is float64, but the model has no weight in float64"),
        (lambda: nn.Linear(6, 3), "the weights are in float32: give the samples in that"),
    ):
        with pytest.raises(DataError, match=words):
            play(model, X.double())
    with pytest.raises(DataError, match="test: x is float64"):
        play(Scale, test=(X.double(), Y))
    with pytest.raises(DataError, match=r"train: y is float64, but the model gives torch.float32: give y.float\(\)"):
        play(lambda: nn.Linear(6, 1), y=X[:, 0].double())
    assert play(Narrow, X.double()).accuracy > 0, "a model may narrow them itself"
    assert play(lambda: Scale().double(), X.double()).accuracy > 0
    assert play(lambda: nn.Linear(6, 1).double(), X.double(), X[:, 0].double()).loss > 0


def test_labels_of_test_sets_per_client_are_looked_at_beside_a_global_one():
    parts = [(X[i::4], Y[i::4]) for i in range(4)]
    task = sparing.Task(Two, parts, [(x, y + 5) for x, y in parts], test_all=(X, Y))
    with pytest.raises(DataError, match="test: sample 1 has label 7, but the model tells 3 classes apart"):
        sparing.run(task, **QUICK)


Pair = namedtuple("Pair", "logits aux")


class Tuple(Two):
    def forward(self, x):
        return Pair(self.main(x), self.aux(x))


class Dict(Two):
    def forward(self, x):
        return {"logits": self.main(x), "aux": self.aux(x)}


class TupleInTraining(Tuple):
    def forward(self, x):
        return super().forward(x) if self.training else self.main(x)


def both(output, y):
    if isinstance(output, torch.Tensor):
        return cross_entropy(output, y, reduction="none")
    return sum(weight * cross_entropy(x, y, reduction="none") for weight, x in zip((1, 0.4), output, strict=True))


@pytest.mark.parametrize("path", ["loop", "loop-fast", "stacked"])
def test_auxiliary_outputs(path):
    with pytest.raises(ConfigError, match="in evaluation, what the model gives is of type dict"):
        play(Dict, loss=both, plan={"path": path})
    first, whole = play(TupleInTraining, plan={"path": path}), play(Tuple, loss=both, plan={"path": path})
    assert first.accuracy == first.accuracy
    assert whole.accuracy == whole.accuracy
    result = play(TupleInTraining, loss=both, plan={"path": path})
    start = sparing.Task(TupleInTraining, [(X, Y)]).build(0).state_dict()
    assert not torch.equal(result.model["aux.weight"], start["aux.weight"]), "both outputs are learned from"


def test_auxiliary_outputs_in_bfloat16():
    assert play(TupleInTraining, loss=both, plan={"path": "loop-fast", "precision": "bf16"}).accuracy > 0


def spectral():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)))


def looked_up(sparse=True):
    return nn.Sequential(nn.Embedding(10, 4, sparse=sparse), nn.Flatten(), nn.Linear(24, 3))


class ThroughNumpy(Two):
    def forward(self, x):
        return self.main(torch.from_numpy(x.numpy()))


@pytest.mark.parametrize(("model", "x"), [(spectral, X), (looked_up, TOKENS), (ThroughNumpy, X)])
def test_what_cannot_be_stacked_is_left_to_the_loop(model, x, tmp_path):
    play(model, x, out=tmp_path / "a")
    assert "path: loop-fast" in (tmp_path / "a/config.yaml").read_text()
    with pytest.raises(
        ConfigError, match=r"plan.path is stacked, but this model trains differently or not at all by it"
    ):
        play(model, x, plan={"path": "stacked"})


@pytest.mark.parametrize("local", [{}, {"momentum": 0.9, "clip": 1.0, "weight_decay": 0.1}, {"optimiser": "adam"}])
def test_sparse_gradients_move_weights_as_dense_ones_do(local):
    runs = [
        play(lambda sparse=sparse: looked_up(sparse), TOKENS, local={**QUICK["local"], **local}, plan={"path": "loop"})
        for sparse in (True, False)
    ]
    assert runs[0].model_sha256 == runs[1].model_sha256


def fails():
    return nn.Linear(6, 3, device="xla")


class Locked(Two):
    def __init__(self):
        super().__init__()
        self.rows = (row for row in ())  # as what cannot be copied


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Linear(6, 3, device="meta"), "'weight' is on the meta device, where there are no values"),
        (fails, r"the function given as model failed \(.*\): let it build the network on the CPU"),
        (lambda wide: nn.Linear(6, wide), "the function given as model failed .TypeError"),
        (Locked, r"the model \(Locked\) cannot be copied \(TypeError"),
        (Locked(), r"the model \(Locked\) cannot be copied \(TypeError"),
    ],
    ids=["meta", "no such device", "arguments", "built", "given"],
)
def test_models_that_are_nowhere(model, words):
    with pytest.raises(ConfigError, match=words) as caught:
        play(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["loop", "loop-fast", "stacked", "implicit"])
def test_a_batch_larger_than_all_samples_is_all_of_them(path):
    runs = [
        play(lambda: nn.Linear(6, 3), local={"batch": batch, **how}, plan={"path": path}).model_sha256
        for how in ({"epochs": 2}, {"steps": 3})
        for batch in (10, 10**7, 2**63 - 1)
    ]
    assert len(set(runs[:3])) == len(set(runs[3:])) == 1
    with pytest.raises(SparingError, match=r"local.batch"):
        play(lambda: nn.Linear(6, 3), local={"batch": 2**63})
