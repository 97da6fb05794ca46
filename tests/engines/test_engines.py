"""Law: the fast engine and the plain one agree, in every bit on the loop path, within rounding on the stacked one."""

import pytest
import torch

import sparing
from sparing.core.errors import SparingError, TrainingError
from sparing.runs.start import start_run
from sparing.runs.study import study_from

METHODS = [
    "fedavg",
    "psfed",
    [{"psfed": {"per_client": True, "fraction": 0.3}}],
    "topk",
    [{"topk": {"over": "model"}}, "memory"],
    "randk+memory",
    "int8",
    "fedavgm",
    "personal",
    "local",
    "psfed+int8",
    "topk+int8+memory",
    "int8+topk",
    ["personal", {"psfed": {"per_client": True}}, {"topk": {"ratio": 0.2}}, "int8", "memory", "fedavgm"],
    ["psfed", {"randk": {"ratio": 0.5}}, "fp16"],
]
QUICK = {"rounds": 3, "sample": 6, "seed": 5, "local": {"steps": 3, "batch": 16, "momentum": 0.9}}
TASK = {"clients": 12, "split": {"dirichlet": 0.3}}


def play(method, **options):
    values = {"task": {**TASK, "model": options.pop("model", "cnn")}, "method": method, **QUICK, **options}
    return sparing.run(values.pop("task"), values.pop("method"), **values)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_loop_path_same_model_and_bytes_in_every_bit(method):
    """Chunks of one client are in test_side_by_side.py."""
    plain = play(method, engine="debug", plan={"path": "loop"}, evaluate={"every": 3})
    for chunk, threads in ((64, 1), (4, 2)):
        fast = play(method, plan={"path": "loop", "chunk": chunk, "threads": threads}, evaluate={"every": 3})
        assert fast.model_sha256 == plain.model_sha256
        assert fast.up_bytes == plain.up_bytes
        assert fast.down_bytes == plain.down_bytes
        assert fast.personal_accuracy == plain.personal_accuracy


@pytest.mark.parametrize("method", ["fedavg", "psfed", "personal", "psfed+personal"])
@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_stacked_path_same_bytes_and_model_within_rounding(method, model):
    plain = play(method, model=model, engine="debug", plan={"path": "loop"})
    fast = play(method, model=model, plan={"path": "stacked"})
    assert (fast.up_bytes, fast.down_bytes) == (plain.up_bytes, plain.down_bytes)
    for name, x in plain.model.items():
        assert torch.allclose(fast.model[name], x, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("method", ["psfed+topk+int8+memory", [{"psfed": {"per_client": True}}, "randk"]], ids=str)
def test_masks_and_bytes_do_not_depend_on_torch_threads(method):
    before, seen = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            result = play(method, plan={"path": "loop", "threads": threads})
            seen.append((result.model_sha256, result.up_bytes, result.down_bytes))
    finally:
        torch.set_num_threads(before)
    assert seen[0] == seen[1]


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_gpu_agrees_with_the_cpu(method):
    """One round without TF32: the same bytes down; up, where rounding moves a top-k position, nearly so."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        cpu = play(method, rounds=1, plan={"path": "loop"})
        gpu = play(method, rounds=1, device="cuda", plan={"path": "stacked"})
    assert gpu.down_bytes == cpu.down_bytes
    assert abs(gpu.up_bytes - cpu.up_bytes) <= 0.002 * cpu.up_bytes
    far = [float((gpu.model[name] - x).abs().max()) for name, x in cpu.model.items()]
    moved = 0.05 if "topk" in str(method) else 2e-3
    assert max(far) < moved


def test_debug_names_stage_client_and_round():
    def broken(output, y):
        return output.sum(dim=1) * float("nan" if output.requires_grad else 0)

    x, y = torch.rand(8, 2), torch.tensor([0, 1] * 4)
    task = sparing.Task(lambda: torch.nn.Linear(2, 2), train=[(x, y), (x, y)], loss=broken)
    with pytest.raises(TrainingError, match=r"round 1, client 0, local training.*client 0.*lr"):
        sparing.run(task, rounds=1, sample=1.0, engine="debug")


def test_debug_names_the_place_of_a_foreign_error():
    def broken(output, y):
        if output.requires_grad and len(output) > 2:  # in the first round, not in the look before it
            raise KeyError("boom")
        return output[:, 0]

    x, y = torch.rand(8, 2), torch.tensor([0, 1] * 4)
    task = sparing.Task(lambda: torch.nn.Linear(2, 2), train=[(x, y)], loss=broken)
    with pytest.raises(SparingError, match=r"round 1, client 0, local training .*: KeyError: 'boom'"):
        sparing.run(task, rounds=1, sample=1, engine="debug")


def test_evaluating_changes_nothing():
    often = play("psfed+topk+memory", evaluate={"every": 1})
    seldom = play("psfed+topk+memory", evaluate={"every": 3})
    assert often.model_sha256 == seldom.model_sha256
    assert seldom.table[0].accuracy != seldom.table[0].accuracy, "not evaluated: NaN, not a number from elsewhere"


def test_a_run_does_not_touch_global_random_state():
    torch.manual_seed(1)
    want = torch.rand(3)
    torch.manual_seed(1)
    start_run(study_from({"rounds": 1, "method": "randk", "task": TASK}))
    assert torch.equal(torch.rand(3), want)
