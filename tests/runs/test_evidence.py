"""benchmarks/evidence: rates are bracketed, verdicts rest on intervals, and docs/results.md says what was measured."""

import doctest
import subprocess
import sys
from pathlib import Path

import pytest

EVIDENCE = Path(__file__).parents[2] / "benchmarks" / "evidence"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(EVIDENCE))


def job(row, stage, rate, seed, accuracy, setting="here"):
    curve = [[round, accuracy * round / 8, None, None, None, 100 * round, 10 * round, None] for round in range(1, 9)]
    about = {"question": "q", "setting": setting, "row": row, "stage": stage, "rate": rate, "seed": seed}
    return {**about, "curve": curve, "seconds": 1.0, "machine": "m", "torch": "0", "metrics": {}}


@pytest.mark.parametrize("name", ["rates", "intervals", "play"])
def test_what_the_small_functions_say(name):
    found = doctest.testmod(__import__(name))
    assert found.attempted
    assert not found.failed


def question_of_two(tuning_rounds):
    from question import Question, Row, Setting

    study = {"task": {"data": "digits"}, "rounds": 8, "local": {"epochs": 1}}
    setting = Setting("digits", study, rate=0.1, tuning_rounds=tuning_rounds, seconds=0.1)
    return Question("q", "?", {"here": setting}, {"FedAvg": Row(["fedavg"]), "other": Row(["int8"])}, seeds=range(2))


def test_rates_are_found_before_final_runs_begin_and_each_row_has_its_own():
    from runs import TUNING_SEED, wanted_jobs

    question, done = question_of_two(4), []
    first = list(wanted_jobs(question, done))
    assert [(one["row"], one["rate"]) for one in first] == [
        (row, rate) for row in ("FedAvg", "other") for rate in (0.05, 0.1, 0.2)
    ]
    done += [job("FedAvg", "rate", rate, TUNING_SEED, a) for rate, a in ((0.05, 0.5), (0.1, 0.6), (0.2, 0.4))]
    done += [job("other", "rate", rate, TUNING_SEED, a) for rate, a in ((0.05, 0.5), (0.1, 0.6), (0.2, 0.7))]
    second = [(one["row"], one["stage"], one["rate"], one["seed"]) for one in wanted_jobs(question, done)]
    assert ("other", "rate", 0.4, TUNING_SEED) in second, "the best lies at the edge"
    assert [one for one in second if one[1] == "final"] == [("FedAvg", "final", 0.1, seed) for seed in (0, 1)]


def test_an_untuned_setting_has_one_rate():
    from runs import wanted_jobs

    assert {(one["stage"], one["rate"]) for one in wanted_jobs(question_of_two(0), [])} == {("final", 0.1)}


def test_a_row_of_which_a_run_comes_apart_goes_on_at_the_next_lower_rate_with_all_its_seeds():
    from runs import TUNING_SEED, finals, wanted_jobs

    question, done = question_of_two(4), []
    for row in ("FedAvg", "other"):
        done += [job(row, "rate", rate, TUNING_SEED, a) for rate, a in ((0.05, 0.5), (0.1, 0.6), (0.2, 0.4))]
    fallen = job("other", "final", 0.1, 1, 0.6)
    fallen["curve"][-1][1] = 0.2
    done += [job(row, "final", 0.1, 0, 0.6) for row in ("FedAvg", "other")]
    for apart in (fallen, {**job("other", "final", 0.1, 1, 0.6), "failed": "the loss became nan"}):
        came = [*done, apart]
        wanted = [(one["row"], one["rate"], one["seed"]) for one in wanted_jobs(question, came)]
        assert wanted == [("other", 0.05, 0), ("FedAvg", 0.1, 1), ("other", 0.05, 1)]
        came += [job("other", "final", 0.05, 0, 0.5)]
        assert [one["rate"] for one in finals("here", "other", came)] == [0.05]


def test_a_verdict_needs_an_interval_and_repetitions_do_not_count():
    from judge import difference, within

    done = [job("FedAvg", "final", 0.1, seed, 0.8) for seed in range(3)]
    done += [job("other", "final", 0.1, seed, a) for seed, a in enumerate((0.790, 0.792, 0.794))]
    assert within("here", "other", "FedAvg", done, 0.5).verdict == "not settled"
    assert within("here", "other", "FedAvg", done, 2.0).verdict == "holds"
    assert within("here", "other", "FedAvg", done, 0.1).verdict == "does not hold"
    assert within("here", "missing", "FedAvg", done, 0.1).verdict == "not settled"
    found = difference("here", "other", "FedAvg", done)
    done += [job(row, "final", 0.1, 100, a) for row, a in (("FedAvg", 0.1), ("other", 0.9))]
    assert difference("here", "other", "FedAvg", done) == found


def test_a_curve_that_still_rises_is_not_flat():
    from judge import is_flat

    rising = job("FedAvg", "final", 0.1, 0, 0.8)
    assert not is_flat(rising)
    level = {**rising, "curve": [[*line[:1], 0.8, *line[2:]] for line in rising["curve"]]}
    assert is_flat(level)


def test_a_pair_gains_over_the_better_part_after_the_bytes_of_the_one_that_sends_least():
    from ask_pairs import after_bytes

    curve = job("FedAvg", "final", 0.1, 0, 0.8)
    assert after_bytes(curve, 250.0, "global") == pytest.approx(25.0)
    assert after_bytes(curve, 900.0, "global") == pytest.approx(80.0), "at the end"


def test_the_results_page_says_what_the_raw_results_say():
    done = subprocess.run([sys.executable, EVIDENCE / "tables.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
