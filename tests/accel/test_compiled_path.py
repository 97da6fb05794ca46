"""Steps compiled once for every client come to the same as one client after the other."""

import pytest
import torch
from torch import nn

import sparing
from sparing.accel.train_cuda import captured, compiled_path, compiled_step
from sparing.accel.train_cuda.client_streams import ClientStreams
from sparing.core.context import context
from sparing.core.method import Local, Phase
from sparing.core.optimiser import Optimiser
from sparing.core.tree import tree_of
from sparing.data.augment import read_augmentations
from sparing.data.clients import Clients
from sparing.train.call import PathCall
from sparing.train.local import train
from sparing.train.losses import cross_entropy

PLAIN = Phase(epochs=1, batch=4, optimiser=Optimiser(lr=0.1))
HEAVY = PLAIN._replace(epochs=2, optimiser=Optimiser(lr=0.1, momentum=0.9, weight_decay=0.01, clip=1.0))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 20, 1), nn.Tanh(), nn.Flatten(), nn.Linear(320, 5),
    )  # fmt: skip


class Attentive(nn.Module):
    """A layer of a transformer, of which the positions are a buffer and the first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 5)
        self.mix = nn.Linear(8, 24)
        self.first.requires_grad_(False)
        self.register_buffer("at", torch.randn(16, 8))

    def forward(self, x):
        h = self.first(x.flatten(2).transpose(1, 2).reshape(len(x), 16, 12)) + self.at
        q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in self.mix(self.norm(h)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head((h + mixed).mean(1))


MODELS = {"conv": conv, "attentive": Attentive}


def clients(counts: list[int], augment: tuple = (), device: str = "cpu") -> Clients:
    g = torch.Generator().manual_seed(1)
    count = torch.tensor(counts)
    x = torch.randn(int(count.sum()), 3, 8, 8, generator=g).to(device)
    y = torch.randint(5, (len(x),), generator=g).to(device)
    return Clients(x, y, count.cumsum(0) - count, count, augment)


@pytest.fixture
def uncompiled(monkeypatch):
    """The traced step, operation by operation, in place of what the compiler makes of it."""
    monkeypatch.setattr(compiled_step, "COMPILER", {"backend": "eager"})


def lesson_of(model: nn.Module, data: Clients, local: Local, precision: str = "float32") -> PathCall:
    ids = torch.tensor([2, 0, 3])
    device = str(data.y.device)
    ctx = context(5, 2, 3, ids, data.count[ids], clients=len(data), samples=99, device=device)
    start = {name: x.to(device) for name, x in tree_of(model).items()}
    return PathCall(model, cross_entropy, data, local, start, ctx, {}, precision=precision, graph=True)


def compared(lesson: PathCall) -> None:
    """By the plain loop, and by streams where there are none."""
    loop, notes = train(*lesson[:6])
    out = captured.play_phases(lesson, ClientStreams)
    assert out is not None
    for name, x in loop.items():
        torch.testing.assert_close(out[0][name], x, rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(out[1].float(), notes["loss"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("counts", [[8, 8, 8, 8], [8, 3, 9, 5], [6, 6, 6, 6]])
@pytest.mark.parametrize("phase", [PLAIN, HEAVY])
def test_equals_the_loop(uncompiled, name, counts, phase):
    torch.manual_seed(0)
    compared(lesson_of(MODELS[name](), clients(counts), Local((phase,))))


def test_phases_own_starts_and_varied_images(uncompiled):
    torch.manual_seed(0)
    data = clients([8, 8, 8, 8], read_augmentations(["flip", "crop"], (3, 8, 8)))
    lesson = lesson_of(conv(), data, Local((PLAIN._replace(trains=frozenset({"7.weight", "4.bias"})), PLAIN)))
    lesson.start["7.weight"] = torch.randn(3, 5, 320) / 20
    lesson.start["0.weight"] = torch.randn(3, 8, 3, 3, 3) / 5
    compared(lesson)


@pytest.mark.parametrize("name", MODELS)
def test_weights_beside_their_rounded_copies(uncompiled, name):
    torch.manual_seed(0)
    lesson = lesson_of(MODELS[name](), clients([8, 3, 9, 5]), Local((PLAIN,)), "bf16")
    loop, after = train(*lesson[:6])[0], captured.play_phases(lesson, ClientStreams)
    assert after is not None
    for key, x in loop.items():
        assert (after[0][key] - x).norm() <= 0.1 * (x - lesson.start[key]).norm(), key


def test_as_the_compiler_makes_it():
    torch.manual_seed(0)
    compared(lesson_of(conv(), clients([8, 8, 8, 8]), Local((PLAIN,))))


def test_weights_that_nobody_trains_are_there_once(uncompiled):
    torch.manual_seed(0)
    lesson = lesson_of(Attentive(), clients([8] * 4), Local((PLAIN,)))
    captured.play_phases(lesson, ClientStreams)
    ((_, streams),) = captured.RECORDS[lesson.model]
    assert isinstance(streams, ClientStreams)
    assert {name: len(room) for name, room in streams.others.items()} == {"at": 1, "first.weight": 1, "first.bias": 1}
    assert {len(room) for room in streams.params.values()} == {3}


def test_a_step_is_compiled_once_for_any_number_of_clients(uncompiled):
    torch.manual_seed(0)
    lesson = lesson_of(conv(), clients([8, 3, 9, 5]), Local((PLAIN,)))
    for ids in ([2, 0, 3], [1], [0, 1, 2, 3]):
        who = torch.tensor(ids)
        ctx = context(5, 2, 3, who, lesson.data.count[who], clients=4, samples=99)
        captured.play_phases(lesson._replace(ctx=ctx), ClientStreams)
    (step,) = compiled_step.STEPS[lesson.model].values()
    assert len(step.compiled) == 1


class Counting(nn.Linear):
    """It remembers something from one step to the next."""

    def __init__(self) -> None:
        super().__init__(192, 5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + 1
        return super().forward(x.flatten(1))


class DroppingAttention(Attentive):
    """Attention that draws, which is the same operation."""

    def forward(self, x):
        h = x.flatten(2).transpose(1, 2).reshape(len(x), 1, 16, 12)
        return (
            super().forward(x)
            + nn.functional.scaled_dot_product_attention(h, h, h, dropout_p=0.1).mean((1, 2, 3))[:, None]
        )


class Drawing(nn.Linear):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x.flatten(1)))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Counting(), "buffers move"),
        (Drawing(192, 5), "draws random numbers"),
        (DroppingAttention(), "draws random"),
    ],
)
def test_what_a_compiled_step_cannot_do(uncompiled, monkeypatch, model, why):
    lesson = lesson_of(model, clients([8] * 4), Local((PLAIN,)))
    with pytest.raises(compiled_step.Uncompilable, match=why):
        captured.play_phases(lesson, ClientStreams)
    monkeypatch.setattr(compiled_path, "may_record", lambda lesson: True)
    monkeypatch.setattr(compiled_path, "train_recorded_or_stacked", lambda lesson: "stacked")
    with pytest.warns(UserWarning, match="does not compile"):
        assert compiled_path.train_compiled(lesson) == "stacked"
    assert compiled_path.train_compiled(lesson) == "stacked"


@pytest.mark.parametrize(
    ("layer", "local", "fits"),
    [
        (nn.Dropout(0.1), Local(), False),
        (nn.Dropout(0.0), Local(), True),
        (nn.BatchNorm2d(3), Local(), False),
        (nn.BatchNorm2d(3), Local(buffers="static"), True),
        (nn.GroupNorm(1, 3), Local((PLAIN._replace(frobenius=0.1),)), False),
    ],
)
def test_layers_and_phases_that_fit(layer, local, fits):
    assert compiled_path.can_compile(nn.Sequential(layer), local) == fits


def test_on_a_cpu_it_trains_as_stacked_does():
    torch.manual_seed(0)
    lesson = lesson_of(conv(), clients([8, 3, 9, 5]), Local((PLAIN,)))
    ours, stacked = (train(*lesson[:6], path)[0] for path in ("compiled", "stacked"))
    assert all(torch.equal(x, stacked[name]) for name, x in ours.items())


def test_loops_that_the_compiler_cannot_reorder_stay_in_order(monkeypatch):
    from torch._inductor.exc import InductorError

    asked = []

    def compile_or_not(step, **how):
        asked.append(how.get("options"))

        def call(*tensors):
            if not how.get("options"):
                raise InductorError(AssertionError(), None)
            return step(*tensors)

        return call

    monkeypatch.setattr(torch, "compile", compile_or_not)
    x = torch.ones(3)
    step = compiled_step._compiled(torch.fx.symbolic_trace(lambda x: x.add_(1)), [x])
    assert asked == [None, {"loop_ordering_after_fusion": False}]
    assert step(x).tolist() == [3.0] * 3


def on_gpu(
    model: nn.Module, counts: list[int], phase: Phase, precision: str = "float32"
) -> tuple[PathCall, dict, dict]:
    """The lesson, and the models of both paths; the compiled one is trained twice."""
    lesson = lesson_of(model.cuda(), clients(counts, device="cuda"), Local((phase,)), precision)
    with torch.backends.cudnn.flags(allow_tf32=False):
        loop, notes = train(*lesson[:6])
        (after, told), (again, _) = (train(*lesson[:6], "compiled", precision=precision, graph=True) for _ in range(2))
    assert any(isinstance(player, ClientStreams) for _, player in captured.RECORDS[lesson.model])
    assert all(torch.equal(x, again[name]) for name, x in after.items())
    if precision == "float32":
        torch.testing.assert_close(told["loss"], notes["loss"], rtol=1e-4, atol=1e-5)
    return lesson, loop, dict(after)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("counts", "phase"), [([8, 8, 8, 8], PLAIN), ([8, 3, 9, 5], HEAVY)])
def test_equals_the_loop_on_a_gpu(name, counts, phase):
    torch.manual_seed(0)
    _, loop, after = on_gpu(MODELS[name](), counts, phase)
    for key, x in loop.items():
        torch.testing.assert_close(after[key], x, rtol=2e-4, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "close"), [("tf32", 0.05), ("bf16", 0.2)])
def test_fewer_bits_stay_near(precision, close):
    torch.manual_seed(0)
    lesson, loop, after = on_gpu(conv(), [8, 8, 8, 8], PLAIN, precision)
    for name, x in loop.items():
        assert (after[name] - x).norm() / (x - lesson.start[name]).norm() < close, name


@pytest.mark.gpu
def test_a_run_by_compiled_steps_has_the_bytes_of_the_loop():
    how = {"rounds": 2, "sample": 3, "seed": 1, "local": {"steps": 4}, "device": "cuda"}
    task = {"data": "digits", "clients": 8, "model": {"resnet18": {"norm": "group"}}}
    with torch.backends.cudnn.flags(allow_tf32=False):
        loop, compiled = (sparing.run(task, plan={"path": path}, **how) for path in ("loop", "compiled"))
    assert (loop.up_bytes, loop.down_bytes) == (compiled.up_bytes, compiled.down_bytes)
    for name, x in loop.model.items():
        assert torch.allclose(compiled.model[name], x, rtol=1e-3, atol=1e-3), name
