"""A sweep: what it refuses, what it tries, what it averages, and that stopping it loses nothing."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import sparing
from sparing.core.errors import ConfigError, SparingError
from sparing.reports.run_folders import find_run_folders, read_run_folder
from sparing.runs.files import run_folder as folder_of_runs
from sparing.runs.start import start_run
from sparing.runs.study import load_study
from sparing.sweeps import execute
from sparing.sweeps.execute import run_sweep, train_winner
from sparing.sweeps.folder import Trial, TrialScore, pareto_trials, planned_trials, starred_trials, winning_trial
from sparing.sweeps.optuna_search import propose_settings
from sparing.sweeps.processes import _train_in_child
from sparing.sweeps.pruning import score_bars
from sparing.sweeps.spec import grid_settings, load_sweep, sweep_from, trial_study

TASK = {"data": "digits", "clients": 4, "validation": 0.2, "model": "mlp"}
STUDY = {"task": TASK, "rounds": 2, "sample": 2, "local": {"lr": 0.1}}


def plan_of(section, **base):
    return sweep_from({**STUDY, **base, "sweep": section})


def test_a_grid_is_every_combination_in_order():
    plan = plan_of({"local.lr": [0.1, 0.2], "sample": [1, 2]})
    assert grid_settings(plan) == [
        {"local.lr": 0.1, "sample": 1},
        {"local.lr": 0.1, "sample": 2},
        {"local.lr": 0.2, "sample": 1},
        {"local.lr": 0.2, "sample": 2},
    ]


def test_options_of_parts_that_a_method_lacks_are_not_tried():
    section = {"method.topk.ratio": [0.1, 0.2], "method": ["fedavg", "topk+memory"]}
    assert grid_settings(plan_of(section)) == [
        {"method": "fedavg"},
        {"method.topk.ratio": 0.1, "method": "topk+memory"},
        {"method.topk.ratio": 0.2, "method": "topk+memory"},
    ]


def test_nested_and_dotted_keys_mean_the_same():
    assert plan_of({"local": {"lr": [0.1]}}) == plan_of({"local.lr": [0.1]})


def test_a_run_of_a_trial_is_the_study_with_its_settings():
    plan = plan_of({"method.topk.ratio": [0.1]}, method=["psfed", {"topk": {"ratio": 0.5, "mode": "quantile"}}])
    study = trial_study(plan, {"method.topk.ratio": 0.1, "task.split.dirichlet": 0.9}, 7)
    assert study.method == ["psfed", {"topk": {"ratio": 0.1, "mode": "quantile"}}]
    assert study.task.split == {"dirichlet": 0.9}
    assert (study.seed, study.evaluate.set, study.plan.threads) == (7, "validation", 1)
    assert trial_study(plan, {}, 7, final=True).evaluate.set == "test"
    assert plan.base["method"][1] == {"topk": {"ratio": 0.5, "mode": "quantile"}}, "the base is left alone"


def test_a_task_that_is_a_word_keeps_its_name(tmp_path):
    (tmp_path / "s.yaml").write_text("task: mnist\nsweep: {task.clients: [3]}")
    plan = load_sweep(tmp_path / "s.yaml", ["task.validation=0.2"])
    assert trial_study(plan, {"task.clients": 3}, 0).task.data == "mnist"


def test_seeds_are_a_count_from_the_studys_own_or_a_list():
    plan = plan_of({"seeds": 2, "final": [9, 1], "local.lr": [0.1]}, seed=5)
    assert (plan.seeds, plan.final) == ([5, 6], [9, 1])


REFUSED = {
    "nothing to try": ({}, ["nothing to try"]),
    "only about": ({"seeds": 2}, ["nothing to try"]),
    "one value": ({"local.lr": 0.1}, ["sweep.local.lr is 0.1", "list"]),
    "empty": ({"local.lr": []}, ["sweep.local.lr", "list"]),
    "twice": ({"local.lr": [0.1, 0.1]}, ["twice"]),
    "range without trials": ({"local.lr": {"log": [0.1, 1]}}, ["sweep.trials"]),
    "log from zero": ({"trials": 2, "local.lr": {"log": [0, 1]}}, ["above 0"]),
    "backwards": ({"trials": 2, "local.lr": {"log": [1, 0.1]}}, ["sweep.local.lr"]),
    "unknown range": ({"trials": 2, "local.lr": {"logg": [0.1, 1]}}, ["local.lr.logg", "valid number"]),
    "fractions": ({"trials": 2, "local.epochs": {"whole": [1, 2.5]}}, ["whole numbers", "linear"]),
    "unknown key": ({"local.lrr": [1]}, ["local.lrr", "did you mean 'lr'"]),
    "bad value": ({"local.lr": [0.1, -1]}, ["local.lr", "-1"]),
    "bad end": ({"trials": 3, "local.momentum": {"linear": [0, 1.5]}}, ["local.momentum", "1.5"]),
    "unknown method": ({"method": ["fedavg", "topkk"]}, ["'topkk'", "did you mean 'topk'"]),
    "absent part": ({"method.topk.ratio": [0.1]}, ["no part 'topk'"]),
    "bad option": ({"method": ["topk"], "method.topk.ration": [0.1]}, ["'ration'", "did you mean 'ratio'"]),
    "too short": ({"method.topk": [0.1]}, ["method.NAME.option"]),
    "method range": ({"trials": 2, "method": {"log": [1, 2]}}, ["sweep.method", "list of methods"]),
    "seed": ({"seed": [1, 2]}, ["sweep.seeds"]),
    "judge": ({"local.lr": [1], "judge": "acuracy"}, ["did you mean 'accuracy'"]),
    "trials": ({"local.lr": [1], "trials": 0}, ["sweep.trials is 0"]),
    "seeds": ({"local.lr": [1], "seeds": [1, 1]}, ["sweep.seeds", "different"]),
    "the set judged by": ({"evaluate.set": ["test"]}, ["evaluate.set"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_meant_is_refused(name):
    section, words = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        plan_of(section)
    for word in words:
        assert word in str(error.value)


def test_settings_are_never_chosen_on_test_samples():
    with pytest.raises(ConfigError, match=r"evaluate\.set is test"):
        plan_of({"local.lr": [0.1]}, evaluate={"set": "test"})
    with pytest.raises(ConfigError, match=r"task\.validation is 0"):
        plan_of({"local.lr": [0.1]}, task={"data": "digits"})


def test_run_says_that_a_sweep_is_another_command(tmp_path):
    (tmp_path / "s.yaml").write_text("sweep: {local.lr: [0.1]}")
    with pytest.raises(ConfigError, match="sparing sweep"):
        load_study(tmp_path / "s.yaml")


def trial(number, *points, seeds=None):
    scores = {seed: TrialScore(accuracy, sent, 0) for seed, (accuracy, sent) in enumerate(points)}
    return Trial(number, {"local.lr": number}, list(range(seeds or len(points))), scores, {})


def test_nothing_incomplete_is_averaged():
    half = trial(0, (0.9, 10), seeds=2)
    assert math.isnan(half.over_seeds("value").mean)
    assert half.over_seeds("value").seeds == 1
    assert trial(1, (0.5, 10), (0.7, 20)).over_seeds("value").mean == pytest.approx(0.6)
    assert winning_trial([half, trial(1, (0.5, 10), (0.7, 20))]).number == 1
    assert winning_trial([half]) is None


def test_the_pareto_set_is_what_nobody_beats():
    trials = [trial(0, (0.9, 100)), trial(1, (0.8, 50)), trial(2, (0.8, 60)), trial(3, (0.7, 50)), trial(4, (0.1, 1))]
    assert [one.number for one in pareto_trials(trials)] == [0, 1, 4]
    assert winning_trial(trials).number == 0
    equals = [trial(0, (0.9, 100)), trial(1, (0.9, 100)), trial(2, (0.9, 90))]
    assert [one.number for one in pareto_trials(equals)] == [2]
    assert len(pareto_trials(equals[:2])) == 2


def test_a_star_is_better_by_more_than_noise():
    clear, noisy = trial(0, (0.9, 100), (0.92, 100)), trial(1, (0.95, 100), (0.88, 100))
    low = trial(2, (0.5, 100), (0.52, 100))
    assert [one.number for one in starred_trials([clear, low])] == [0]
    assert starred_trials([clear, noisy, low]) == [], "their difference is noise"
    assert len(pareto_trials([clear, noisy, low])) == 1, "the winner is still the highest mean"
    assert starred_trials([trial(0, (0.9, 100)), trial(1, (0.1, 100))]) == [], "one seed claims nothing"


def inline(source, jobs, finished, tick):
    """Instead of processes."""
    while (work := source()) is not None:
        _train_in_child(work.folder, work.study)
        finished(work)
        tick([])


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(execute, "run_in_processes", inline)


def test_a_grown_grid_keeps_what_was_tried(here, tmp_path):
    small = plan_of({"local.lr": [0.1]}, rounds=1)
    run_sweep(small, tmp_path / "s", 1)
    before = (tmp_path / "s" / "000-seed0" / "log.txt").read_text()
    grown = plan_of({"local.lr": [0.2, 0.1]}, rounds=1)
    trials = run_sweep(grown, tmp_path / "s", 1)
    assert [(one.number, one.settings["local.lr"]) for one in trials] == [(1, 0.2), (0, 0.1)]
    assert all(one.complete for one in trials)
    assert (tmp_path / "s" / "000-seed0" / "log.txt").read_text() == before, "it was not run again"
    assert len(planned_trials(tmp_path / "s", small)) == 1


def test_a_run_that_is_just_beginning_is_no_concern_of_others(here, tmp_path, monkeypatch):
    """Another process makes its folder, or empties its tables, while this one looks."""
    plan, seen = plan_of({"local.lr": [0.1]}, rounds=1), []
    whole = folder_of_runs.write_atomic

    def looking(path, data):
        whole(path, data)
        seen.append(read_run_folder(path.parent).table)

    monkeypatch.setattr(folder_of_runs, "write_atomic", looking)
    run_sweep(plan, tmp_path / "s", 1)
    assert seen == [[]], "once there is a config, there is all that a reader wants"
    (tmp_path / "s" / "000-seed0" / "summary.json").unlink()
    (tmp_path / "s" / "000-seed0" / "metrics.csv").unlink()
    assert not planned_trials(tmp_path / "s", plan)[0].complete


def test_another_study_in_the_folder_is_refused(here, tmp_path):
    run_sweep(plan_of({"local.lr": [0.1]}, rounds=1), tmp_path / "s", 1)
    with pytest.raises(ConfigError, match="another sweep"):
        run_sweep(plan_of({"local.lr": [0.1]}, rounds=2), tmp_path / "s", 1)
    start_run(trial_study(plan_of({"local.lr": [0.1]}, rounds=1), {}, 0), out=tmp_path / "run")
    with pytest.raises(ConfigError, match="something else than a sweep"):
        run_sweep(plan_of({"local.lr": [0.1]}, rounds=1), tmp_path / "run", 1)


SPACE = {"local.lr": {"log": [1e-3, 1.0]}, "local.epochs": {"whole": [1, 3]}, "method": ["fedavg", ["topk", "memory"]]}


def test_proposals_lie_in_their_ranges_and_follow_from_what_is_known():
    plan = plan_of({"trials": 9, **SPACE})
    drawn, trials = [], []
    for number in range(8):
        settings = propose_settings(plan, trials, 3)
        assert settings == propose_settings(plan, trials, 3)
        assert 1e-3 <= settings["local.lr"] <= 1
        assert settings["local.epochs"] in (1, 2, 3)
        assert settings["method"] in SPACE["method"]
        assert settings not in drawn
        drawn.append(settings)
        trials.append(trial(number, (0.5, 10))._replace(settings=settings))
    assert propose_settings(plan, trials, 4) != propose_settings(plan, trials, 3)


def test_a_search_learns_from_accuracy_and_from_bytes():
    plan = plan_of({"trials": 99, "local.lr": {"log": [1e-3, 1.0]}})

    def late(score):
        trials = []
        for number in range(30):
            settings = propose_settings(plan, trials, 0)
            trials.append(Trial(number, settings, [0], {0: score(math.log10(settings["local.lr"]))}, {}))
        return sum(math.log10(one.settings["local.lr"]) for one in trials[15:]) / 15

    assert late(lambda x: TrialScore(x, 10, 0)) > -1, "more accuracy is at the upper end"
    assert late(lambda x: TrialScore(-x, 10, 0)) < -2
    assert late(lambda x: TrialScore(0.5, int(1000 * (4 + x)), 0)) < -2, "fewer bytes are at the lower"


def test_a_search_without_anything_new_ends():
    plan = plan_of({"trials": 9, "sample": [1, 2]})
    known = [trial(0, (0.5, 10))._replace(settings={"sample": 1}), trial(1, (0.5, 10))._replace(settings={"sample": 2})]
    assert propose_settings(plan, known, 0) is None
    assert propose_settings(plan, known[:1], 0) == {"sample": 2}


def test_a_broken_search_goes_on_as_if_unbroken(here, tmp_path, monkeypatch):
    plan = plan_of({"trials": 4, **SPACE}, rounds=1)
    whole = run_sweep(plan, tmp_path / "whole", 1)
    seen = []

    def stop(course):
        seen.append(course.done)
        if course.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(plan, tmp_path / "cut", 1, stop)
    assert len(json.loads((tmp_path / "cut" / "trials.json").read_text())) == 2
    assert run_sweep(plan, tmp_path / "cut", 1) == whole
    assert len(whole) == 4


def test_a_search_without_optuna_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"sparing\[sweep\]"):
        run_sweep(plan_of({"trials": 2, **SPACE}), tmp_path / "s", 1)
    assert not (tmp_path / "s").exists()


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """In processes: one trial that trains and one that runs away; a run of the first was broken off before."""
    plan, folder = plan_of({"seeds": 2, "final": 1, "local.lr": [0.1, 1e30]}), tmp_path_factory.mktemp("sweep") / "s"

    def stop(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start_run(trial_study(plan, {"local.lr": 0.1}, 1), out=folder / "000-seed1", loggers=[stop])
    trials = run_sweep(plan, folder, 2)
    return plan, folder, trials, train_winner(plan, folder, trials, 2)


def test_trials_are_the_runs_one_would_have_made_by_hand(swept):
    plan, folder, trials, _ = swept
    for seed in (0, 1):
        alone = start_run(trial_study(plan, {"local.lr": 0.1}, seed))
        assert trials[0].scores[seed] == TrialScore(alone.accuracy, alone.up_bytes, alone.down_bytes)
        assert (
            json.loads((folder / f"000-seed{seed}" / "summary.json").read_text())["model_sha256"] == alone.model_sha256
        )
    assert "after round 1" in (folder / "000-seed1" / "log.txt").read_text(), "it went on, not over again"


def test_a_trial_that_runs_away_is_told_and_never_wins(swept):
    plan, folder, trials, _ = swept
    assert not trials[1].complete
    assert "lower lr" in next(iter(trials[1].failed.values()))
    assert winning_trial(trials).number == 0
    plan = plan._replace(judge=trials[0].judge)
    assert planned_trials(folder, plan) == trials, "what the folder tells is what was told"


def test_the_winner_is_judged_on_test_samples(swept):
    plan, folder, _, final = swept
    config = yaml.safe_load((folder / "final" / "000-seed0" / "config.yaml").read_text())
    assert config["evaluate"]["set"] == "test"
    study = trial_study(plan, {"local.lr": 0.1}, 0, final=True)
    assert final.scores[0].value == start_run(study).accuracy


def test_a_sweep_that_is_over_does_nothing(swept, monkeypatch):
    plan, folder, trials, final = swept

    def never(source, jobs, finished, tick):
        assert source() is None

    monkeypatch.setattr(execute, "run_in_processes", never)
    assert run_sweep(plan, folder, 2) == trials
    assert train_winner(plan, folder, trials, 2) == final


def test_compare_reads_the_folder_of_a_sweep(swept):
    runs = [read_run_folder(folder) for folder in find_run_folders([swept[1]])]
    assert sum(run.finished for run in runs) == 2


def test_what_one_run_refuses_ends_the_sweep(tmp_path):
    with pytest.raises(ConfigError, match="001-seed0: sample asks for 50 clients"):
        run_sweep(plan_of({"sample": [2, 50]}, rounds=1), tmp_path / "s", 1)
    assert (tmp_path / "s" / "000-seed0" / "summary.json").exists()


BEFORE = {
    "first trial": ({"sample": [50]}, "sample asks for 50"),
    "last of a grid": ({"method": ["fedavg", "topk"], "method.topk.ratio": [0.1, 2]}, "topk.ratio is 2"),
    "end of a range": (
        {"trials": 3, "method": ["fedavg", "topk"], "method.topk.ratio": {"log": [0.1, 2]}},
        "topk.ratio",
    ),
    "unsound": ({"method": ["fedavg", "int8+fp16"]}, "fp16"),
    "no such layer": ({"method": ["fedavg", [{"personal": {"layers": ["heat"]}}]]}, "heat"),
}


@pytest.mark.parametrize("name", BEFORE)
def test_what_can_be_known_is_refused_before_anything_is_written(name, tmp_path):
    section, words = BEFORE[name]
    with pytest.raises(SparingError, match=words):
        run_sweep(plan_of(section), tmp_path / "s", 1)
    assert not (tmp_path / "s").exists()


STOPPABLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
if __name__ == "__main__":
    from sparing.cli.app import main
    main()
"""


def test_ctrl_c_leaves_every_run_to_be_resumed(tmp_path):
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({**STUDY, "rounds": 100000, "sweep": {"local.lr": [0.1, 0.2]}}))
    (tmp_path / "main.py").write_text(STOPPABLE)
    command = [sys.executable, "main.py", "sweep", "s.yaml", "--jobs", "2"]
    child = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    runs = [tmp_path / "sweeps" / "s" / f"{i:03}-seed0" for i in range(2)]
    while not all((run / "config.yaml").exists() for run in runs):  # written last, so both have begun
        assert child.poll() is None
        time.sleep(0.1)
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert err == "sparing: stopped; finished work is kept, continue with: sparing sweep s.yaml --jobs 2\n"
    for run in runs:
        rounds = len((run / "rounds.csv").read_text().splitlines())

        def stop(record):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            sparing.resume(run, loggers=[stop])
        assert len((run / "rounds.csv").read_text().splitlines()) in (rounds, rounds + 1)


DOCS = Path(__file__).parents[2] / "docs"


def test_what_the_page_on_sweeps_shows_is_a_sweep():
    found = re.findall(r"```yaml\n(.*?)```", (DOCS / "sweeps.md").read_text(), re.DOTALL)
    plans = [sweep_from(yaml.safe_load(text)) for text in found]
    assert [len(grid_settings(plan)) for plan in plans if plan.trials is None] == [6]
    assert [plan.trials for plan in plans] == [None, 40]


def test_a_search_stops_trials_below_the_median_and_a_grid_does_not(tmp_path):
    assert plan_of({"trials": 3, "local.lr": [0.1, 0.2]}).prune
    assert not plan_of({"local.lr": [0.1]}).prune
    with pytest.raises(ConfigError, match=r"sweep\.prune is 'some'; use true or false"):
        plan_of({"local.lr": [0.1], "prune": "some"})
    rates = [0.1, 0.11, 0.12, 0.13, 1e-6]
    plan = plan_of({"local.lr": rates, "prune": True}, rounds=8)
    trials = run_sweep(plan, tmp_path / "sweep", jobs=1)
    assert [trial.complete for trial in trials] == [True] * 4 + [False]
    why = trials[4].failed[0]
    assert re.fullmatch(r"stopped after round [2-7]: accuracy .* %, below the median of the trials before it .*", why)
    assert winning_trial(trials).number < 4
    assert score_bars(tmp_path / "sweep", plan._replace(prune=False), trials) == {}


def test_a_sweep_from_python(tmp_path):
    found = sparing.sweep(STUDY, {"local.lr": [0.1, 0.2]}, out=tmp_path / "sweep", jobs=1)
    assert found.best.settings["local.lr"] in (0.1, 0.2)
    rows = found.table()
    rows = rows if isinstance(rows, list) else rows.to_dict("records")
    assert [row["local.lr"] for row in rows] == [0.1, 0.2]
    again = sparing.sweep(STUDY, {"local.lr": [0.1, 0.2]}, out=tmp_path / "sweep", jobs=1)
    assert again.trials == found.trials
