"""The plan: by rule for a short run, else by trials; recorded, remembered, bounded by memory, never chosen twice."""

import io
import json
from contextlib import nullcontext

import pytest
import torch
import yaml
from rich.console import Console

import sparing
from sparing.cli.data_and_cost import show_cost
from sparing.core.errors import ConfigError, TrainingError
from sparing.core.method import Trained
from sparing.reports.run_folders import flat_settings
from sparing.runs.cost import run_cost_trial as cost_of
from sparing.runs.plan import plan_trials
from sparing.runs.plan import settle as planning
from sparing.runs.plan.plan_cache import _nearest_power_of_two
from sparing.runs.plan.plan_trials import WorkLayout, race_layouts
from sparing.runs.start import settle_study_and_plan, task_from_study
from sparing.runs.study import load_study, study_from

TASK = {"clients": 12, "model": "mlp", "split": "iid"}
STUDY = {"task": TASK, "sample": 10, "rounds": 2, "local": {"epochs": 1}, "seed": 3}
STACKED, IMPLICIT, LOOP = WorkLayout("stacked", 10, 1), WorkLayout("implicit", 10, 2), WorkLayout("loop-fast", 10, 2)


@pytest.fixture(autouse=True)
def fixed(monkeypatch, tmp_path):
    """Two idle cores, and a cache folder of its own; runs of 20 s are long, as they are outside of tests."""
    monkeypatch.setattr(planning, "LONG_RUN_SECONDS", 20.0)
    monkeypatch.setattr(planning.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(planning.os, "getloadavg", lambda: (0.5, 9.0, 9.0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def trials(monkeypatch):
    """Makes every run long enough to measure, with trials whose outcomes are given here; a way not given is slow."""
    asked, speeds = [], {}

    def tried(job, cohort, steps):
        def trial(way):
            asked.append(way)
            return speeds.get(way, 1.0)

        return trial

    monkeypatch.setattr(planning, "LONG_RUN_SECONDS", 0.0)
    monkeypatch.setattr(planning, "_LEAST_TRIAL_SECONDS", 600.0)
    monkeypatch.setattr(planning, "layout_trial", tried)
    tried.asked, tried.speeds = asked, speeds
    return tried


def no_trials(monkeypatch):
    def never(*_):
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr(planning, "layout_trial", never)


def settle(**study):
    values = study_from({**STUDY, **study})
    return settle_study_and_plan(values, task_from_study(values))[2]


def way_of(found):
    return WorkLayout(found.plan.path, found.plan.chunk, found.plan.threads)


def kept(tmp_path):
    return sorted((tmp_path / "cache").rglob("*.json"))


# by rule


def test_a_short_run_is_laid_out_by_rule(monkeypatch, tmp_path):
    no_trials(monkeypatch)
    found = settle()
    assert (found.how, way_of(found), found.speeds) == ("rule", IMPLICIT, {})
    assert found.why == "about 0.1 s of training are too few to measure"
    assert not kept(tmp_path)


@pytest.mark.parametrize("items", [[], ["rounds=50"], ["task.model=mlp", "rounds=100", "method=psfed+int8+memory"]])
def test_studies_of_the_digits_are_short(items):
    study = load_study(None, items)
    found = settle_study_and_plan(study, task_from_study(study))[2]
    assert found.how == "rule"


def test_the_debug_engine_never_measures(monkeypatch, trials):
    no_trials(monkeypatch)
    found = settle(engine="debug")
    assert (found.how, way_of(found)) == ("rule", WorkLayout("loop", 1, 1))


def test_what_is_given_is_not_measured(monkeypatch, trials):
    no_trials(monkeypatch)
    found = settle(plan={"path": "stacked", "chunk": 3, "threads": 2})
    assert (found.how, way_of(found), found.why) == ("given", WorkLayout("stacked", 3, 2), "")


def test_the_guess_counts_multiplications():
    values = study_from({**STUDY, "local": {"epochs": 2, "batch": 16}})
    job, _, _ = settle_study_and_plan(values, task_from_study(values))
    assert plan_trials._multiplications(job) == 64 * 64 + 64 * 10
    assert plan_trials.guess_training_seconds(job._replace(rounds=200), 10) == pytest.approx(
        100 * plan_trials.guess_training_seconds(job, 10)
    )
    values = study_from({**STUDY, "task": {**TASK, "model": "cnn"}})
    conv, _, _ = settle_study_and_plan(values, task_from_study(values))
    shapes = [w.shape for w in conv.model.parameters() if w.ndim == 4]
    assert plan_trials._multiplications(conv) > 64 * shapes[0].numel() + sum(shape.numel() for shape in shapes)
    assert not any(layer._forward_hooks for layer in conv.model.modules()), "the model is as it was"


# by trials


def test_the_fastest_way_is_taken(trials):
    trials.speeds |= {IMPLICIT: 100.0, STACKED: 300.0}
    found = settle()
    assert (found.how, way_of(found)) == ("measured", STACKED)
    assert found.speeds[STACKED] == 300.0
    assert trials.asked[0] == IMPLICIT, "the rule's own choice is tried first"
    both = {way._replace(threads=n) for way in (LOOP, STACKED, IMPLICIT) for n in (1, 2)}
    assert {way for way in found.speeds if way.chunk == 10} == both


def test_the_rule_has_its_way_unless_another_is_clearly_faster(trials):
    trials.speeds |= {IMPLICIT: 100.0, STACKED: 109.0}
    assert way_of(settle()) == IMPLICIT


def test_then_chunks_are_tried(trials):
    best = STACKED._replace(chunk=5)
    trials.speeds |= {STACKED: 200.0, best: 300.0}
    found = settle()
    assert way_of(found) == best
    assert {way.chunk for way in found.speeds if way._replace(chunk=10) == STACKED} == {5, 10}, "the cohort is 10"
    wide = settle(sample=400, task={**TASK, "clients": 450}, plan={"threads": 1})
    assert {way.chunk for way in wide.speeds if way.path == "implicit"} >= {128, 256, 400}


def test_convolutions_have_no_implicit_path(trials):
    found = settle(task={**TASK, "model": "cnn"})
    assert {way.path for way in found.speeds} == {"loop-fast", "stacked"}


@pytest.mark.parametrize(
    "given", [{"path": "loop"}, {"path": "loop-fast"}, {"chunk": 4}, {"threads": 1}, {"path": "implicit", "threads": 2}]
)
def test_what_is_given_stays(trials, given):
    found = settle(plan=given)
    assert found.how == "measured"
    assert all(getattr(way, key) == value for way in found.speeds for key, value in given.items())
    assert all(getattr(found.plan, key) == value for key, value in given.items())
    assert len(found.speeds) > 1


def test_a_way_that_fails_is_not_taken(trials):
    trials.speeds |= {IMPLICIT: 0.0, LOOP: 2.0}
    assert way_of(settle()) == LOOP
    trials.speeds |= dict.fromkeys(set(trials.asked) - {LOOP}, 0.0) | {LOOP: 5.0}
    alone = settle(seed=4, sample=9, plan={"chunk": 10})
    assert (alone.how, way_of(alone), alone.why) == ("rule", IMPLICIT, "there was no time to compare")


def test_nothing_is_measured_on_a_busy_machine(monkeypatch, tmp_path, trials):
    trials.speeds[STACKED] = 300.0
    with monkeypatch.context() as patch:
        patch.setattr(planning.os, "getloadavg", lambda: (3.1, 0.0, 0.0))
        found = settle()
        assert (found.how, found.why, way_of(found)) == ("rule", "the machine is too busy to measure", IMPLICIT)
        assert not kept(tmp_path)
    settle()
    monkeypatch.setattr(planning.os, "getloadavg", lambda: (3.1, 0.0, 0.0))
    assert way_of(settle()) == STACKED, "what is remembered holds"


def test_real_trials_train(monkeypatch):
    monkeypatch.setattr(planning, "LONG_RUN_SECONDS", 0.0)
    monkeypatch.setattr(planning, "_LEAST_TRIAL_SECONDS", 600.0)
    monkeypatch.setattr(plan_trials, "_TRIAL_TURNS", 1)
    state = torch.get_rng_state()
    found = settle(method="fedsim+topk+memory")
    assert found.how == "measured"
    assert {way.path for way in found.speeds} == {"loop-fast", "stacked", "implicit"}
    assert all(speed > 0 for speed in found.speeds.values())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_long_phase_is_cut_and_scaled(monkeypatch):
    values = study_from({**STUDY, "task": {**TASK, "model": "cnn"}, "local": {"epochs": 3, "batch": 4}})
    job, _, _ = settle_study_and_plan(values, task_from_study(values))
    n, steps = job.task.train.count[:4], []

    def watched(self, lesson, ctx):
        steps.append(lesson.phases[0].steps)
        return Trained(lesson.start, lesson.memory, {"loss": torch.zeros(len(ctx.ids))})

    assert plan_trials._shorten_phases(job, 3, n).method.local.phases[0].steps == 3
    assert plan_trials._shorten_phases(job, 10_000, n) == plan_trials._shorten_phases(job, None, n) == job
    monkeypatch.setattr(plan_trials.Job, "train", watched)
    clock = iter(range(100))
    monkeypatch.setattr(plan_trials, "synchronized_time", lambda: float(next(clock)))
    speed = plan_trials.layout_trial(job, 10, 3)(WorkLayout("loop", 10, 1))
    assert steps == [1, 3], "one step to warm up, then the trial"
    took = 1.0  # the clock ticks once for all of them
    assert speed == pytest.approx(4 / took * (3 * 4) / (3 * 112)), "they visited but 12 of their samples"


def test_training_that_breaks_down_is_no_way(monkeypatch):
    values = study_from(STUDY)
    job, _, _ = settle_study_and_plan(values, task_from_study(values))

    def broken(*_):
        raise TrainingError("not finite")

    monkeypatch.setattr(plan_trials.Job, "train", broken)
    assert plan_trials.layout_trial(job, 10, 3)(LOOP) == 0.0


# the race


def ways(count):
    return [WorkLayout("stacked", 1, i + 1) for i in range(count)]


def test_slow_ways_are_tried_once():
    asked = []

    def trial(way):
        asked.append(way)
        return [90.0, 100.0, 60.0][way.threads - 1] + len(asked) / 10

    best = race_layouts(ways(3), trial, lambda way: 1, until=plan_trials.synchronized_time() + 60)
    assert [asked.count(way) for way in ways(3)] == [3, 3, 1]
    assert list(best.values()) == pytest.approx([90.6, 100.7, 60.3]), "the best of three"


def test_no_trial_starts_that_would_take_too_long(monkeypatch):
    clock, asked = [0.0], []
    monkeypatch.setattr(plan_trials, "synchronized_time", lambda: clock[0])

    def trial(way):
        asked.append(way)
        clock[0] += 0.1 * way.threads
        return 1.0

    race_layouts(ways(8), trial, lambda way: way.threads, until=1.2)
    assert [way.threads for way in asked] == [1, 2, 3, 4, 1], "a client takes 0.1 s"
    assert clock[0] <= 1.2
    clock[0], asked[:] = 5.0, []
    assert len(race_layouts(ways(3), trial, lambda way: way.threads, until=1.2)) == len(asked) == 1, (
        "the first, in any case"
    )


# remembered


def test_a_choice_is_remembered(monkeypatch, tmp_path, trials):
    trials.speeds[STACKED] = 300.0
    first = settle()
    assert len(kept(tmp_path)) == 1
    no_trials(monkeypatch)
    again = settle(rounds=40, seed=3, evaluate={"every": 2})
    assert (again.how, way_of(again), again.speeds) == ("remembered", STACKED, first.speeds)


OTHER = [
    {"sample": 6},
    {"method": "topk"},
    {"local": {"epochs": 2}},
    {"task": {**TASK, "model": "cnn"}},
    {"task": {**TASK, "clients": 100}},
    {"plan": {"threads": 1}},
    {"plan": {"memory": "1GB"}},
]


@pytest.mark.parametrize("other", OTHER, ids=str)
def test_another_study_is_measured_anew(tmp_path, trials, other):
    settle()
    assert settle(**other).how == "measured"
    assert len(kept(tmp_path)) == 2


def test_another_machine_is_measured_anew(monkeypatch, trials):
    settle()
    monkeypatch.setattr(planning, "_cpu_cores", lambda: 64)
    assert settle().how == "measured"
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert settle().how == "measured"
    assert settle().how == "remembered"


BROKEN = ["", "{", "[]", "{}", '{"chosen": ["loop", 10, 2]}', '{"chosen": ["loop", 10], "speeds": []}']
BROKEN += [f'{{"chosen": {way}, "speeds": []}}' for way in ('["warp", 10, 2]', '["loop", 0, 2]', '["auto", 10, 2]')]
BROKEN += ['{"chosen": ["loop", 10, 2], "speeds": [["loop", 10, 2]]}', '{"chosen": 5, "speeds": []}', "\x00"]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_memory_is_ignored_and_rewritten(tmp_path, trials, text):
    trials.speeds[STACKED] = 300.0
    settle()
    (file,) = kept(tmp_path)
    file.write_text(text)
    found = settle()
    assert (found.how, way_of(found)) == ("measured", STACKED)
    assert json.loads(file.read_text())["chosen"] == list(STACKED)
    assert [path.name for path in file.parent.iterdir()] == [file.name], "no draft is left"


def test_a_remembered_path_must_still_train_alike(monkeypatch, trials):
    trials.speeds[STACKED] = 300.0
    settle()
    monkeypatch.setattr(planning, "path_agrees", lambda job, path, graph=False: path != "stacked")
    found = settle()
    assert (found.how, found.plan.path) == ("measured", "implicit")


def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(tmp_path, trials):
    (tmp_path / "cache").write_text("a file, no folder")
    with pytest.warns(UserWarning, match="measured anew each time"):
        assert settle().how == "measured"


def test_similar_counts_are_alike():
    assert _nearest_power_of_two(50) == _nearest_power_of_two(55) != _nearest_power_of_two(100)
    assert _nearest_power_of_two(0) == 0


# part of the run


class Stop(Exception):
    pass


def stop(record):
    if record.round == 1:
        raise Stop


def test_the_measured_plan_is_recorded_and_resumed(monkeypatch, tmp_path, trials):
    best = WorkLayout("stacked", 5, 1)
    trials.speeds |= {STACKED: 200.0, best: 300.0}
    study = {key: value for key, value in STUDY.items() if key != "task"}
    with pytest.raises(Stop):
        sparing.run(TASK, "topk+memory", out=tmp_path / "run", loggers=[stop], **study)
    plan = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["plan"]
    assert {key: plan[key] for key in best._fields} == best._asdict()
    assert "stacked, chunk 5, threads 1" in (tmp_path / "run/log.txt").read_text()
    no_trials(monkeypatch)
    for file in kept(tmp_path):
        if file.parent.name == "plans":
            file.unlink()
    resumed = sparing.resume(tmp_path / "run")
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["plan"] == plan
    whole = sparing.run(TASK, "topk+memory", plan=plan, **study)
    assert resumed.model_sha256 == whole.model_sha256, "seed and recorded plan give the bits"
    assert resumed.rounds == 2


# memory, precision, graphs


def test_memory_bounds_the_chunk(trials):
    one = settle().client_bytes
    for memory, chunk in ((3 * one, 3), (4 * one - 1, 3), (one, 1)):
        trials.asked.clear()
        found = settle(plan={"memory": memory})
        assert max(way.chunk for way in found.speeds if way.path == "implicit") == chunk
        assert found.plan.chunk * found.client_bytes <= found.memory_bytes == memory
    assert settle(plan={"memory": f"{3 * one / 1e3}kB"}).plan.chunk == 3


def test_a_chunk_that_is_given_wins():
    one = settle(plan={"path": "loop"}).client_bytes
    assert settle(plan={"memory": 2 * one, "path": "loop"}).plan.chunk == 2
    assert settle(plan={"memory": 2 * one, "path": "loop", "chunk": 7}).plan.chunk == 7


MISTAKES = {
    "plan.memory is 'lots'; write a number of bytes, such as 20000 or 20kB": {"memory": "lots"},
    "plan.memory is '0MB', which holds nothing; write a size such as 500MB": {"memory": "0MB"},
    "plan.memory is 1kB, but the models and updates of 1 at once take 153,920 bytes": {"memory": "1kB"},
    "plan.memory is 200kB, but the models and updates of 2 at once take": {"memory": "200kB", "threads": 2},
    "plan.precision is tf32, which is for CUDA, but the device is cpu; drop it": {"precision": "tf32"},
    "plan.path is stacked, on a CPU for float32 alone, but plan.precision is bf16; use loop-fast": {
        "precision": "bf16",
        "path": "stacked",
    },
    "plan.path is loop, on a CPU for float32 alone, but plan.precision is bf16; use loop-fast": {
        "precision": "bf16",
        "path": "loop",
    },
    "plan.graph is true, which is for CUDA, but the device is cpu; drop it": {"graph": True},
    "plan.bank is host, which is for CUDA, but the device is cpu; drop it": {"bank": "host"},
    "plan.precision: input should be 'float32', 'tf32' or 'bf16'": {"precision": "half"},
    "chunk is true, which no key can be": {"chunk": True},
}


@pytest.mark.parametrize("said", MISTAKES)
def test_mistakes_are_said(said):
    with pytest.raises(ConfigError) as error:
        settle(plan=MISTAKES[said], device="cpu")
    assert said in str(error.value)


def test_precision_and_graph_reach_the_job():
    values = study_from({**STUDY, "plan": {"graph": False}})
    job, study, _ = settle_study_and_plan(values, task_from_study(values))
    assert (job.precision, job.graph, study.plan.graph) == ("float32", False, False)
    auto = study_from(STUDY)
    assert settle_study_and_plan(auto, task_from_study(auto))[0].graph is False, "graphs are for CUDA"
    assert load_study(None, ["plan.graph=true"]).plan.graph is True
    same = [study_from({"plan": {"chunk": 3, "graph": graph}}).fingerprint() for graph in (True, False, "auto")]
    assert len(set(same)) == 1, "runs from before there were graphs can be resumed"


@pytest.mark.parametrize("able", ["avx512_bf16", "amx_bf16", ""])
def test_a_processor_that_only_emulates_bf16_is_named(able, monkeypatch):
    flags = {name: name == able for name in ("avx512_bf16", "amx_bf16")}
    monkeypatch.setattr(planning.torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", **flags})
    for momentum, path in ((0.0, "implicit"), (0.9, "loop-fast")):  # in float32 it would be stacked
        with nullcontext() if able else pytest.warns(UserWarning, match="no instructions, so float32 may be faster"):
            plan = settle(plan={"precision": "bf16"}, device="cpu", local={"epochs": 1, "momentum": momentum}).plan
        assert (plan.precision, plan.path) == ("bf16", path)


def test_precision_alone_makes_another_experiment():
    plans = [{}, {"path": "loop", "graph": True, "memory": "2GB"}, {"precision": "bf16"}]
    plain, laid_out, coarse = (flat_settings(study_from({"plan": plan}).model_dump()) for plan in plans)
    assert plain == laid_out
    assert coarse == {**plain, "plan.precision": "bf16"}


# sparing check


def shown(cost):
    with io.StringIO() as file:
        show_cost(cost, 2, 2, Console(width=100, file=file))
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def test_check_shows_what_was_tried(trials):
    trials.speeds |= {IMPLICIT: 1234.5, STACKED: 300.0}
    cost = cost_of(study_from(STUDY))
    text = shown(cost)
    assert "implicit, chunk 10, 2 threads, bank memory" in text
    assert "measured now, and cached" in text
    assert "1,234.5 clients/s  implicit, chunk 10, 2 threads, chosen" in text
    assert "300.0 clients/s  stacked, chunk 10, 1 thread\n" in text
    assert "10 clients at a time: " in text
    assert "of 1.1 GB allowed (plan.memory)" in text
    assert "measured earlier" in shown(cost_of(study_from(STUDY)))
    assert json.loads(json.dumps(cost._asdict()))["how"] == "measured"


def test_check_says_why_not():
    assert "chosen by rule: about 0.1 s of training are too few" in shown(cost_of(study_from(STUDY)))
    given = {"path": "loop", "chunk": 4, "threads": 1}
    assert "set in the study" in shown(cost_of(study_from({**STUDY, "plan": given})))


def test_compiled_steps_are_for_recorded_training_in_fewer_bits(monkeypatch):
    monkeypatch.setattr(planning, "fastest_path", lambda *_: "compiled")
    assert settle().plan.path == "stacked", "on a CPU nothing is recorded"
    study = study_from(STUDY)
    job = settle_study_and_plan(study, task_from_study(study))[0]._replace(graph=True, precision="bf16")
    assert planning._can_compile_steps(job)
    assert not planning._can_compile_steps(job._replace(precision="float32"))
    assert not planning._can_compile_steps(job._replace(model=torch.nn.Dropout(0.5)))


def test_a_study_may_name_compiled_steps_anywhere():
    compiled, stacked = (sparing.run(TASK, rounds=1, sample=3, plan={"path": path}) for path in ("compiled", "stacked"))
    assert compiled.model_sha256 == stacked.model_sha256
    with pytest.raises(ConfigError, match=r"plan\.path.*'stacked', 'compiled' or 'implicit'"):
        settle(plan={"path": "captured"})
