import torch

from sparing.core.protocols import Local, Phase
from sparing.train.control_variates import pull, renewed_variates
from support import make_ctx


def drawn(k, seed=0, *shape):
    return torch.randn(k, *shape, generator=torch.Generator().manual_seed(seed))


START = {"w": drawn(1, 0, 3), "w.control": drawn(1, 1, 3), "h": drawn(1, 2, 2), "net.control": drawn(1, 3, 2)}
AFTER = {"w": drawn(2, 4, 3), "h": drawn(2, 5, 2), "net.control": drawn(2, 6, 2)}
MEMORY = {"control/w": drawn(2, 7, 3), "velocity/w": drawn(2, 8, 3)}


def test_what_is_added_to_a_gradient():
    got = pull(START, MEMORY)
    assert set(got) == {"w"}, "a tensor of the network that happens to be called control is not one"
    assert torch.equal(got["w"], START["w.control"] - MEMORY["control/w"])


def test_a_control_variate_becomes_the_mean_gradient_of_the_steps_taken():
    ctx = make_ctx([4, 7], [5, 12])
    phases = (Phase(epochs=2, batch=5, lr=0.1), Phase(steps=3, lr=0.2), Phase(steps=9, trains=frozenset({"h"})))
    memory = dict(MEMORY)
    out = renewed_variates(START, AFTER, memory, Local(phases), ctx)
    length = torch.tensor([[2 * 1 * 0.1 + 3 * 0.2], [2 * 3 * 0.1 + 3 * 0.2]])
    want = MEMORY["control/w"] - START["w.control"] + (START["w"] - AFTER["w"]) / length
    torch.testing.assert_close(memory["control/w"], want)
    torch.testing.assert_close(out["w.control"], START["w.control"] + want - MEMORY["control/w"])
    assert set(out) == {"w.control"}
    assert memory["velocity/w"] is MEMORY["velocity/w"]


def test_each_client_as_if_alone():
    ctx, local = make_ctx([4, 7], [5, 12]), Local((Phase(epochs=2, batch=5, lr=0.3),))
    together = dict(MEMORY)
    renewed_variates(START, AFTER, together, local, ctx)
    for k in range(2):
        alone = {name: x[k : k + 1] for name, x in MEMORY.items()}
        renewed_variates(START, {n: x[k : k + 1] for n, x in AFTER.items()}, alone, local, ctx.at(slice(k, k + 1)))
        assert torch.equal(alone["control/w"][0], together["control/w"][k])


def test_what_no_phase_trains_keeps_its_control_variate():
    memory = dict(MEMORY)
    out = renewed_variates(START, AFTER, memory, Local((Phase(steps=1, trains=frozenset({"h"})),)), make_ctx([4, 7]))
    assert torch.equal(memory["control/w"], MEMORY["control/w"])
    assert torch.equal(out["w.control"], START["w.control"].expand(2, 3))
