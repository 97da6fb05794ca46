"""Control variates: what they add to a gradient, and what they become after training."""

import torch

from sparing.core.method import Lesson, Phase, Trained
from sparing.core.optimiser import Optimiser
from sparing.parts.train.control_variates import correct_by_control_variates, renewed_variates
from support import make_ctx


def drawn(k, seed=0, *shape):
    return torch.randn(k, *shape, generator=torch.Generator().manual_seed(seed))


START = {"w": drawn(1, 0, 3), "w.control": drawn(1, 1, 3), "h": drawn(1, 2, 2), "net.control": drawn(1, 3, 2)}
AFTER = {"w": drawn(2, 4, 3), "h": drawn(2, 5, 2), "net.control": drawn(2, 6, 2)}
MEMORY = {"control/w": drawn(2, 7, 3), "velocity/w": drawn(2, 8, 3)}


def done(lesson, ctx):
    return Trained(AFTER, lesson.memory, {"loss": torch.zeros(len(ctx.ids))})


def renew(ctx, *phases):
    lesson = Lesson(START, dict(MEMORY), phases)
    return renewed_variates(lesson, done(lesson, ctx), ctx)


def test_what_is_added_to_a_gradient():
    seen, phases = [], (Phase(steps=1, correct=True),)

    def train(lesson, ctx):
        seen.append(lesson.pull)
        return done(lesson, ctx)

    around = correct_by_control_variates().around(train, ())
    after = around(Lesson(START, MEMORY, phases), make_ctx([4, 7])).after
    assert set(seen[0]) == {"w"}, "a tensor of the network that happens to be called control is not one"
    assert torch.equal(seen[0]["w"], START["w.control"] - MEMORY["control/w"])
    assert set(after) == {"w", "h", "net.control", "w.control"}
    around(Lesson(START, MEMORY, (Phase(steps=1),)), make_ctx([4, 7]))
    assert seen[1] == {}, "tuning for evaluation is not corrected"


def test_a_control_variate_becomes_the_mean_gradient_of_the_steps_taken():
    ctx = make_ctx([4, 7], [5, 12])
    phases = (
        Phase(epochs=2, batch=5, optimiser=Optimiser(lr=0.1)),
        Phase(steps=3, optimiser=Optimiser(lr=0.2)),
        Phase(steps=9, trains=frozenset({"h"})),
    )
    out, memory, _ = renew(ctx, *phases)
    length = torch.tensor([[2 * 1 * 0.1 + 3 * 0.2], [2 * 3 * 0.1 + 3 * 0.2]])
    want = MEMORY["control/w"] - START["w.control"] + (START["w"] - AFTER["w"]) / length
    torch.testing.assert_close(memory["control/w"], want)
    torch.testing.assert_close(out["w.control"], START["w.control"] + want - MEMORY["control/w"])
    assert set(out) == {*AFTER, "w.control"}
    assert all(out[name] is x for name, x in AFTER.items())
    assert memory["velocity/w"] is MEMORY["velocity/w"]


def test_each_client_as_if_alone():
    ctx, phase = make_ctx([4, 7], [5, 12]), Phase(epochs=2, batch=5, optimiser=Optimiser(lr=0.3))
    together = renew(ctx, phase).memory
    for k in range(2):
        lesson = Lesson(START, {name: x[k : k + 1] for name, x in MEMORY.items()}, (phase,))
        trained = Trained({n: x[k : k + 1] for n, x in AFTER.items()}, lesson.memory, {})
        alone = renewed_variates(lesson, trained, ctx.at(slice(k, k + 1))).memory
        assert torch.equal(alone["control/w"][0], together["control/w"][k])


def test_what_no_phase_trains_keeps_its_control_variate():
    out, memory, _ = renew(make_ctx([4, 7]), Phase(steps=1, trains=frozenset({"h"})))
    assert torch.equal(memory["control/w"], MEMORY["control/w"])
    assert torch.equal(out["w.control"], START["w.control"].expand(2, 3))
