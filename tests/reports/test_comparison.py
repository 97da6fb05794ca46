"""Comparing runs: every number against one worked out by hand or by SciPy, and everything that must be said."""

import json
import math
import re

import numpy as np
import pytest
import torch
from scipy import stats

import sparing
from made import made_run
from sparing.core.errors import CheckpointError, ConfigError, TrainingError
from sparing.reports.comparison import accuracy_lead, compare_groups
from sparing.reports.comparison_tables import comparison_csv, comparison_json, mark_legend, tables_of_comparison
from sparing.reports.headline import headlines
from sparing.reports.latex_table import comparison_latex
from sparing.reports.run_folders import find_run_folders, group_runs, holds_study, read_run_folder
from sparing.runs.study import study_from
from sparing.tasks import fingerprint
from sparing.tasks.fingerprint import task_fingerprint

CURVES = {
    ("fedavg", 0): [0.10, 0.50, 0.70, 0.80, 0.79],
    ("fedavg", 1): [0.20, 0.40, 0.60, 0.90, 0.85],
    ("fedavg", 2): [0.15, 0.45, 0.66, 0.70, 0.75],
    ("topk", 0): [0.10, 0.40, 0.70, 0.81, 0.82],
    ("topk", 1): [0.10, 0.30, 0.75, 0.80, 0.86],
    ("topk", 2): [0.10, 0.35, 0.60, 0.71, 0.80],
}


@pytest.fixture
def runs(tmp_path):
    for (method, seed), curve in CURVES.items():
        more = {"loss": [1 - a for a in curve], "up_bytes": [1000 if method == "fedavg" else 150] * 5}
        more |= {"personal_accuracy": [a / 2 for a in curve], "worst_decile": [a / 4 for a in curve]}
        values = 900 if method == "fedavg" else 90
        made_run(tmp_path / f"{method}-{seed}", curve, method, seed, columns=more, values=values)
    return tmp_path


def compared(*places, **options):
    groups, notes = group_runs([read_run_folder(folder) for folder in find_run_folders(places)])
    found = compare_groups(groups, **options)
    return {row.label: row for row in found.rows}, notes + found.notes


def comparison_of(*places, **options):
    return compare_groups(group_runs([read_run_folder(folder) for folder in find_run_folders(places)])[0], **options)


def curves(method):
    return np.array([CURVES[method, seed] for seed in range(3)])


def test_means_and_deviations_over_seeds(runs):
    rows, notes = compared(runs)
    assert notes == []
    for method, row in rows.items():
        a = curves(method)
        expected = {
            "final_accuracy": a[:, -1],
            "best_accuracy": a.max(axis=1),
            "final_loss": 1 - a[:, -1],
            "best_loss": (1 - a).min(axis=1),
            "personal_accuracy": a[:, -1] / 2,
            "worst_decile": a[:, -1] / 4,
            "up_mb": np.full(3, 5e-3 if method == "fedavg" else 0.75e-3),
            "down_mb": np.full(3, 0.5e-3),
        }
        assert (row.seeds, row.rounds) == ([0, 1, 2], 5)
        for name, values in expected.items():
            assert row.stats[name].mean == pytest.approx(values.mean())
            assert row.stats[name].std == pytest.approx(values.std(ddof=1), abs=1e-15)


def test_convergence_is_the_first_round_within_the_tolerance_of_the_best(runs):
    assert compared(runs)[0]["fedavg"].stats["convergence_round"].mean == np.mean([4, 4, 5])
    assert compared(runs)[0]["topk"].stats["convergence_round"].mean == np.mean(
        [4, 5, 5]
    )  # 0.81 is within 0.01 of 0.82
    assert compared(runs, tolerance=0.0)[0]["topk"].stats["convergence_round"].mean == 5
    assert compared(runs, tolerance=0.2)[0]["fedavg"].stats["convergence_round"].mean == np.mean([3, 4, 3])


def test_compression_by_wire_and_by_values(runs):
    rows, _ = compared(runs)
    assert rows["fedavg"].ratios["compression"] == rows["fedavg"].ratios["compression_values"] == 1
    assert rows["topk"].ratios["compression"] == pytest.approx(1000 / 150)
    assert rows["topk"].ratios["compression_values"] == pytest.approx(900 / 90)


def test_stability(runs):
    rows, _ = compared(runs, warmup=1)
    for method, row in rows.items():
        a = curves(method)
        jitter = np.diff(a[:, 1:], axis=1).std(axis=1, ddof=1)
        assert row.stats["jitter"].mean == pytest.approx(jitter.mean())
        assert row.stats["seed_std"].mean == pytest.approx(a.std(axis=0, ddof=1).mean())
    ratio = rows["topk"].stats["jitter"].mean / rows["fedavg"].stats["jitter"].mean
    assert rows["topk"].ratios["jitter_change"] == pytest.approx(ratio - 1)
    assert math.isnan(compared(runs, warmup=3)[0]["topk"].stats["jitter"].mean)  # one change is no spread


def test_the_difference_is_paired_and_its_interval_is_students(runs):
    gap = compared(runs)[0]["topk"].gaps["final_accuracy"]
    more = (curves("topk") - curves("fedavg"))[:, -1]
    low, high = stats.ttest_1samp(more, 0).confidence_interval(0.95)
    assert (gap.mean, gap.low, gap.high) == pytest.approx((more.mean(), low, high))
    assert gap.seeds == 3
    unpaired = stats.ttest_ind(curves("topk")[:, -1], curves("fedavg")[:, -1]).confidence_interval(0.95)
    assert gap.high - gap.low < unpaired.high - unpaired.low
    assert compared(runs)[0]["fedavg"].gaps == {}


def test_a_target(runs):
    rows, _ = compared(runs, target=0.8)
    assert rows["topk"].stats["rounds_to_target"].mean == np.mean([4, 4, 5])
    assert rows["topk"].stats["mb_to_target"].mean == pytest.approx(np.mean([4, 4, 5]) * 250 / 1e6)
    fedavg = rows["fedavg"].stats["rounds_to_target"]
    assert math.isnan(fedavg.mean), "one seed never gets there, so there is no mean"
    assert fedavg.seeds == 2
    assert math.isnan(rows["topk"].stats["seconds_to_target"].mean)


def test_seconds_to_a_target_where_there_is_a_clock(tmp_path):
    clock = {"metrics": [{"clock": 10.0}, {"clock": 25.0}]}
    made_run(tmp_path / "a", [0.2, 0.6], columns=clock)
    rows, _ = compared(tmp_path, target=0.5)
    assert rows["fedavg"].stats["seconds_to_target"].mean == 25


def test_one_seed_has_no_spread_and_no_interval(runs):
    rows, notes = compared(runs / "fedavg-1", runs / "topk-1")
    assert [note.split(";")[0] for note in notes] == ["one seed is one draw: no deviation and no interval"]
    assert math.isnan(rows["topk"].stats["final_accuracy"].std)
    assert math.isnan(rows["topk"].stats["seed_std"].mean)
    gap = rows["topk"].gaps["final_accuracy"]
    assert gap.mean == pytest.approx(0.01)
    assert math.isnan(gap.low)


def test_runs_are_grouped_by_everything_but_the_seed(tmp_path):
    made_run(tmp_path / "a", [0.1], "topk", 0, study={"device": "cpu"})
    made_run(tmp_path / "b", [0.1], [{"topk": {"ratio": 0.1}}], 1, study={"plan": {"chunk": 3}})  # 0.1 is the default
    made_run(tmp_path / "c", [0.1], [{"topk": {"ratio": 0.2}}], 0)
    made_run(tmp_path / "d", [0.1], "topk", 0, study={"local": {"lr": 0.5}})
    rows, notes = compared(tmp_path)
    labels = {label: row.seeds for label, row in rows.items()}
    assert labels == {"topk (local.lr=0.1)": [0, 1], "topk (local.lr=0.1, ratio=0.2)": [0], "topk (local.lr=0.5)": [0]}
    assert "besides the method, these settings differ: local.lr" in notes
    assert any("there is no run of plain fedavg, so differences are to topk" in note for note in notes)


def test_unfinished_runs_are_left_out_or_all_are_cut_and_said(runs):
    made_run(runs / "psfed-0", [0.1, 0.2, 0.3], "psfed", 0, study={"rounds": 5}, finished=False)
    made_run(runs / "psfed-1", [0.1, 0.2, 0.3, 0.4, 0.5], "psfed", 1)
    rows, notes = compared(runs)
    assert rows["psfed"].seeds == [1], "the rest is compared"
    assert rows["psfed"].rounds == rows["fedavg"].rounds == 5
    assert f"{runs / 'psfed-0'} (psfed) is not finished: 3 of 5 rounds, so it is left out" in notes
    rows, notes = compared(runs, incomplete=True)
    assert {row.rounds for row in rows.values()} == {3}
    assert rows["psfed"].stats["final_accuracy"].mean == pytest.approx(0.3)
    assert rows["fedavg"].stats["final_accuracy"].mean == pytest.approx(curves("fedavg")[:, 2].mean())
    assert rows["psfed"].stats["up_mb"].mean == pytest.approx(300 / 1e6)
    assert any("psfed: 3 or 5" in note and "compared after round 3" in note for note in notes)
    with pytest.raises(ConfigError, match=r"none of these runs is finished.*3 of 5 rounds.*--allow-incomplete"):
        compared(runs / "psfed-0")


def test_runs_that_ended_early_are_not_averaged_silently(tmp_path):
    made_run(tmp_path / "a", [0.1, 0.2], seed=0, study={"rounds": 9})
    made_run(tmp_path / "b", [0.1, 0.4, 0.3], seed=1, study={"rounds": 9})
    rows, notes = compared(tmp_path)
    assert rows["fedavg"].stats["final_accuracy"].mean == pytest.approx(0.3), "both after round 2"
    assert any("fedavg: 2 or 3" in note and "compared after round 2" in note for note in notes)


def test_a_run_without_a_round_is_left_out_and_said(tmp_path):
    made_run(tmp_path / "a", [0.1, 0.2])
    made_run(tmp_path / "b", [], "psfed", finished=False, study={"rounds": 2})
    rows, notes = compared(tmp_path, incomplete=True)
    assert list(rows) == ["fedavg"]
    assert any("it is left out" in note for note in notes)


def test_different_seeds_and_rounds_are_said(runs, tmp_path):
    made_run(runs / "psfed-7", [0.1, 0.2], "psfed", 7)
    rows, notes = compared(runs)
    assert any("seeds differ (fedavg: 0, 1, 2; topk: 0, 1, 2; psfed: 7)" in note for note in notes)
    assert any("different numbers of rounds (fedavg: 5; psfed: 2; topk: 5)" in note for note in notes)
    assert {row.rounds for row in rows.values()} == {2}, "all at the shortest's last round"
    assert rows["fedavg"].stats["final_accuracy"].mean == pytest.approx(curves("fedavg")[:, 1].mean())
    assert rows["psfed"].gaps == {}, "no seed in common"
    assert rows["psfed"].ratios["compression"] == pytest.approx(10), "bytes a round, not in all"


def test_runs_evaluated_in_different_rounds_are_compared_where_all_were(tmp_path):
    nan = math.nan
    made_run(tmp_path / "a", [0.1, 0.2, 0.3, 0.4])
    made_run(tmp_path / "b", [nan, 0.3, nan, nan], "topk")
    rows, notes = compared(tmp_path)
    assert [rows[name].stats["final_accuracy"].mean for name in ("fedavg", "topk")] == [0.2, 0.3]
    assert any("evaluated in different rounds: all of them are compared after round 2" in note for note in notes)


def test_the_baseline_comes_first_then_the_best(runs):
    made_run(runs / "sign-0", [0.2, 0.3, 0.4, 0.5, 0.6], "sign", 0)
    made_run(runs / "psfed-0", [0.2, 0.3, 0.4, 0.5, 0.99], "psfed", 0)
    rows, _ = compared(runs)
    assert list(rows) == ["fedavg", "psfed", "topk", "sign"]
    assert [row.label for row in rows.values() if row.best] == ["psfed"]
    assert [row.label for row in rows.values() if row.baseline] == ["fedavg"]
    assert next(iter(compared(runs, baseline="sign")[0])) == "sign"


def test_a_star_is_better_by_more_than_noise(tmp_path):
    ends = {
        "fedavg": (0.80, 0.84, 0.88),
        "topk": (0.60, 0.63, 0.66),
        "int8": (0.79, 0.86, 0.85),
        "sign": (0.2, 0.3, 0.1),
    }
    sent = {"fedavg": 1000, "int8": 300, "topk": 200, "sign": 200}
    for method, accuracies in ends.items():
        for seed, last in enumerate(accuracies):
            made_run(tmp_path / f"{method}{seed}", [0.1, last], method, seed, columns={"up_bytes": [sent[method]] * 2})
    rows, _ = compared(tmp_path)
    assert {name for name, row in rows.items() if row.star} == {"int8", "topk"}, "fedavg's lead over int8 is noise"
    rows, _ = compared(*(tmp_path / f"{method}0" for method in ends))
    assert not any(row.star for row in rows.values()), "one seed claims nothing"
    assert "with one seed a lead cannot be told from noise" in mark_legend(
        comparison_of(*(tmp_path / f"{m}0" for m in ends))
    )


def test_leads_without_common_seeds_are_of_two_samples(tmp_path):
    mine, theirs = (0.9, 0.95, 0.91), (0.8, 0.7, 0.75, 0.81)
    for i, last in enumerate(mine):
        made_run(tmp_path / f"a{i}", [last], "topk", i)
    for i, last in enumerate(theirs):
        made_run(tmp_path / f"b{i}", [last], "fedavg", 10 + i)
    groups, _ = group_runs([read_run_folder(folder) for folder in find_run_folders([tmp_path])])
    numbers = [[{"final_accuracy": run.table[-1].accuracy} for run in group.runs] for group in groups]
    lead = accuracy_lead(groups[0], numbers[0], groups[1], numbers[1], "final_accuracy")
    low, high = stats.ttest_ind(mine, theirs, equal_var=False).confidence_interval(0.95)
    assert (lead.low, lead.high) == pytest.approx((low, high))


def test_the_headline_names_the_best_its_bytes_and_the_difference(runs):
    (said,) = headlines(comparison_of(runs))
    assert said == (
        "topk is the most accurate on digits: 82.67 % accuracy with 0.00125 MB sent in 5 rounds (fedavg sends "
        "0.0055 MB); accuracy difference vs fedavg: +3.00 percentage points (95 % interval −1.97 to +7.97, "
        "within noise)."
    )
    (said,) = headlines(comparison_of(runs / "fedavg-1", runs / "topk-1"))
    assert said.endswith("+1.00 percentage points, from one seed, which cannot tell it from noise.")
    (said,) = headlines(comparison_of(runs, baseline="topk"))
    assert said.startswith("topk, the baseline, is the most accurate on digits: 82.67 % accuracy with 0.00125 MB")
    assert "fedavg comes next with 0.0055 MB" in said


def own_task(flip: bool = False, **more) -> sparing.Task:
    """Two classes that a line tells apart; flipped, half of the labels are wrong."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, 40, 2, generator=draw)
    y = (x[..., 0] > 0).long()
    y = torch.where(torch.arange(40) % 2 == 0, 1 - y, y) if flip else y
    clients = list(zip(x, y, strict=True))
    return sparing.Task(lambda: torch.nn.Linear(2, 2), clients, test=(x[0], y[0]), **more)


QUICK = {"rounds": 2, "sample": 1.0, "local": {"lr": 0.5, "steps": 5}, "plan": {"threads": 1, "path": "loop"}}


def test_two_tasks_of_ones_own_never_merge(tmp_path):
    sparing.run(own_task(), **QUICK, seed=0, out=tmp_path / "a")
    sparing.run(own_task(flip=True), **QUICK, seed=1, out=tmp_path / "b")
    rows, notes = compared(tmp_path)
    assert len(rows) == 2, "93 and 47 have no mean"
    assert {row.seeds[0] for row in rows.values()} == {0, 1}
    assert all(re.fullmatch(r"fedavg on own task \(fingerprint=[0-9a-f]{8}\)", label) for label in rows)
    assert not any(row.best or row.star or row.gaps for row in rows.values()), "nothing is ranked between tasks"
    assert any("2 different tasks are called 'own task'" in note for note in notes)


def test_two_tasks_of_ones_own_with_one_seed_are_not_the_same_run(tmp_path):
    sparing.run(own_task(name="cars"), **QUICK, out=tmp_path / "a")
    sparing.run(own_task(flip=True, name="boats"), **QUICK, out=tmp_path / "b")
    rows, notes = compared(tmp_path)
    assert list(rows) == ["fedavg on cars", "fedavg on boats"]
    assert not any("the same study" in note for note in notes)


def test_one_task_of_ones_own_is_one_row_with_its_name(tmp_path):
    for seed in (0, 1):
        for method in ("fedavg", "topk"):
            sparing.run(own_task(name="cars"), method, **QUICK, seed=seed, out=tmp_path / f"{method}{seed}")
    found = comparison_of(tmp_path)
    assert [(row.label, row.task, row.seeds) for row in found.rows if row.baseline] == [("fedavg", "cars", [0, 1])]
    assert tables_of_comparison(found)[0].title == "Accuracy on cars (%)"
    assert " on cars" in headlines(found)[0]
    with pytest.raises(CheckpointError, match="belongs to another task: the training samples changed"):
        sparing.resume(tmp_path / "topk0", task=own_task(flip=True, name="cars"))
    with pytest.raises(ConfigError, match="was run on a task of your own; pass it again"):
        sparing.resume(tmp_path / "topk0")


@pytest.mark.parametrize(
    "other",
    [
        {"flip": True},
        {"held_out": [1]},
        {"loss": lambda output, y: torch.nn.functional.cross_entropy(output, y, reduction="none")},
        {"metric": "macro_f1"},
        {"metric": ["accuracy", "top5"]},
    ],
    ids=["labels", "held out", "loss", "metric", "metrics"],
)
def test_what_makes_another_fingerprint(other):
    assert task_fingerprint(own_task()) == task_fingerprint(own_task(name="other")), "the name is told beside it"
    assert task_fingerprint(own_task(**other)) != task_fingerprint(own_task())


def test_tasks_alike_but_for_the_metric_are_not_averaged(tmp_path):
    for seed, metric in enumerate(("accuracy", "macro_f1")):
        sparing.run(own_task(metric=metric), **QUICK, seed=seed, out=tmp_path / metric)
    rows, notes = compared(tmp_path)
    assert [row.seeds for row in rows.values()] == [[0], [1]]
    assert any("they differ in data, model, loss or metric, and are not averaged" in note for note in notes)


def test_large_data_count_by_rows_spread_over_all(monkeypatch):
    monkeypatch.setattr(fingerprint, "_WHOLE_BYTES", 64)
    assert task_fingerprint(own_task()) != task_fingerprint(own_task(flip=True))


def test_a_diverged_run_is_left_out_with_its_reason(tmp_path):
    sparing.run(own_task(name="cars"), **QUICK, out=tmp_path / "good")
    with pytest.raises(TrainingError):
        sparing.run(
            own_task(name="cars"), "int8", **(QUICK | {"local": {"lr": 1e30, "steps": 5}}), out=tmp_path / "bad"
        )
    rows, notes = compared(tmp_path)
    assert list(rows) == ["fedavg"]
    assert any(note.startswith(f"{tmp_path / 'bad'} failed and is left out: ") for note in notes)
    loss = {"loss": [1.0, math.inf, math.inf]}
    made_run(tmp_path / "wild", [0.1, 0.1, 0.1], "topk", columns=loss)
    made_run(tmp_path / "calm", [0.1, 0.2, 0.3], "sign", columns={"loss": [1.0, 0.9, 0.8]})
    rows, notes = compared(tmp_path / "wild", tmp_path / "calm")
    assert list(rows) == ["sign"]
    assert f"{tmp_path / 'wild'} failed and is left out: the loss is inf after round 3" in notes


def test_the_same_seed_twice_counts_once(runs):
    made_run(runs / "topk-0-again", [0.9] * 5, "topk", 0)
    rows, notes = compared(runs / "fedavg-0", runs / "topk-0", runs / "topk-0-again")
    assert rows["topk"].seeds == [0]
    assert rows["topk"].stats["final_accuracy"].mean == 0.82
    assert [("the same study and seed" in note, "one seed is one draw" in note) for note in notes] == [
        (True, False),
        (False, True),
    ]


def test_nothing_is_paired_across_tasks(runs):
    made_run(runs / "other", [0.5] * 5, "topk", 0, study={"task": {"data": "mnist"}})
    rows, notes = compared(runs / "fedavg-0", runs / "other")
    assert rows["topk on mnist"].gaps == {}
    assert rows["topk on mnist"].baseline, "its task has no other"
    assert any("these settings differ: task.data" in note for note in notes)
    assert any("ranked, and differences taken, within each task only" in note for note in notes)


def test_validation_samples_are_said_and_not_paired_with_test_samples(runs):
    for seed in (0, 1):
        for method in ("psfed", "int8"):
            made_run(runs / f"{method}-{seed}", [0.5] * 5, method, seed, study={"evaluate": {"set": "validation"}})
    _, notes = compared(runs / "psfed-*", runs / "int8-*")
    assert any(note.startswith("accuracy and loss are on validation samples") for note in notes)
    rows, notes = compared(runs)
    assert any(
        re.match(r"accuracy and loss of .*\(evaluate.set=validation\) are on validation", note) for note in notes
    )
    aside = [row for row in rows.values() if "validation" in row.task]
    assert [row.method for row in aside] == ["int8", "psfed"]
    assert all(row.baseline or set(row.gaps) for row in aside)
    assert not any("validation" in note for note in compared(runs / "fedavg-*", runs / "topk-*")[1])


def test_a_target_that_nobody_reaches_is_said(runs):
    assert "no run reaches 95 % accuracy; the highest is 90.00 %" in compared(runs, target=0.95)[1]
    assert compared(runs, target=0.9)[1] == []


def test_failed_runs_are_left_out_with_the_reason(runs):
    path = made_run(runs / "psfed-0", [0.1, 0.2], "psfed", 0, study={"rounds": 5}, finished=False)
    (path / "failed.txt").write_text("the loss became nan in round 3\n")
    rows, notes = compared(runs)
    assert list(rows) == ["fedavg", "topk"]
    assert notes == [f"{path} failed and is left out: the loss became nan in round 3"]
    with pytest.raises(ConfigError, match=r"every run here failed.*the loss became nan in round 3"):
        compared(path)
    made_run(runs / "int8-0", [0.1], "int8", 0)
    (runs / "int8-0" / "failed.txt").write_text("an earlier attempt\n")
    assert "int8" in compared(runs)[0], "it is finished"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("summary.json", "{", "is not as it was written"),
        ("summary.json", "[3]", "is not as it was written"),
        ("ledger.csv", None, "is missing"),
        ("ledger.csv", "", "is not as it was written"),
        ("ledger.csv", "round,client,direction,value\n1,0,up\n", "is not as it was written"),
        ("ledger.csv", "round,client,direction,value\n1,0,up,many\n", "is not as it was written"),
        ("ledger.csv", "round,client,direction,value\n0,0,up,5\n", "is not as it was written"),
        ("ledger.csv", "round,client,direction,value\n1,0,up,5,7\n", "is not as it was written"),
        ("metrics.csv", None, "is missing"),
        ("metrics.csv", "round,metric,value\n1,x\n", "is not as it was written"),
        ("rounds.csv", None, "is missing"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, text, said):
    path = made_run(tmp_path / "a", [0.1, 0.2])
    if text is None:
        (path / name).unlink()
    else:
        (path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"{name} {said}; restore it"):
        read_run_folder(path)


def test_a_run_among_runs_hides_none(runs):
    with pytest.raises(ConfigError, match="holds run folders such as fedavg-0"):
        made_run(runs, [0.1] * 5, "psfed")
    assert not (runs / "config.yaml").exists()
    made_run(runs.parent / "inner" / "deep", [0.1] * 5, "int8").parent.rename(runs / "inner")
    made_run(runs / "own", [0.1] * 5, "psfed")
    for path in (runs / "own").iterdir():
        path.rename(runs / "inner" / path.name)
    assert [path.name for path in find_run_folders([runs / "inner"])] == ["inner", "deep"]


def test_a_study_is_known_again_and_another_refused(tmp_path):
    path = made_run(tmp_path / "a", [0.1], "topk", 3, study={"plan": {"chunk": 2}})
    study = study_from({"method": "topk", "seed": 3, "rounds": 1})
    assert holds_study(study, path)
    assert not holds_study(study, tmp_path / "b")
    for other in ({"seed": 4}, {"rounds": 2}, {"method": ["int8"]}):
        with pytest.raises(ConfigError, match="holds a run of another study; look elsewhere"):
            holds_study(study.model_copy(update=other), path, "look elsewhere")


def test_a_study_whose_code_was_edited_is_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_file.py").write_text(OWN_FILE.format(cut=0.0))
    task = {"data": "my_file.py:load", "model": "my_file.py:net"}
    sparing.run(task, **QUICK, out=tmp_path / "run")
    study = study_from({"task": task, **QUICK})
    assert holds_study(study, tmp_path / "run")
    (tmp_path / "my_file.py").write_text(OWN_FILE.format(cut=1.0))
    with pytest.raises(
        ConfigError, match=r"holds a run with another my_file\.py, which was edited since; look elsewhere"
    ):
        holds_study(study, tmp_path / "run", "look elsewhere")
    (tmp_path / "my_file.py").write_text(OWN_FILE.format(cut=0.0))
    assert holds_study(study, tmp_path / "run"), "as it was"


def test_another_baseline(runs):
    rows, _ = compared(runs, baseline="topk")
    assert rows["fedavg"].ratios["compression"] == pytest.approx(0.15)
    assert "final_accuracy" in rows["fedavg"].gaps
    with pytest.raises(ConfigError, match="'topkk' is none of these; did you mean 'topk'"):
        compared(runs, baseline="topkk")


def test_sparse_evaluation_uses_what_was_measured(tmp_path):
    nan = math.nan
    made_run(tmp_path / "a", [nan, 0.3, nan, 0.5, nan, 0.6])
    row = compared(tmp_path, warmup=0)[0]["fedavg"]
    assert row.stats["final_accuracy"].mean == 0.6
    assert row.stats["jitter"].mean == pytest.approx(np.std([0.2, 0.1], ddof=1))
    assert row.stats["convergence_round"].mean == 6


def test_folders_patterns_and_folders_of_folders(runs, monkeypatch):
    assert len(find_run_folders([runs])) == 6
    assert [path.name for path in find_run_folders([f"{runs}/topk-*", runs / "topk-1"])] == [
        "topk-0",
        "topk-1",
        "topk-2",
    ]
    with pytest.raises(ConfigError, match="nowhere holds no run"):
        find_run_folders(["nowhere"])


def test_a_half_written_line_of_a_killed_run_is_not_read(tmp_path):
    path = made_run(tmp_path / "a", [0.1, 0.2], finished=False)
    for name in ("rounds.csv", "ledger.csv", "metrics.csv"):
        with open(path / name, "a") as file:
            file.write("3,0.")
    assert len(read_run_folder(path).table) == 2
    (path / "rounds.csv").write_text("round\n1\n")
    with pytest.raises(ConfigError, match=r"rounds.csv is not as it was written"):
        read_run_folder(path)


def test_real_folders_agree_with_their_summaries(tmp_path):
    task = {"data": "digits", "clients": 4, "model": "mlp"}
    for method in ("fedavg", "topk", "local"):
        sparing.run(task, method, rounds=2, out=tmp_path / method, plan={"threads": 1})
    rows, notes = compared(tmp_path, target=0.01)
    assert [note.split(":")[0] for note in notes] == ["one seed is one draw"]
    for method, row in rows.items():
        summary = json.loads((tmp_path / method / "summary.json").read_text())
        assert row.stats["final_accuracy"].mean == summary["accuracy"]
        assert row.stats["personal_accuracy"].mean == summary["personal_accuracy"]
        assert row.stats["up_mb"].mean == summary["up_bytes"] / 1e6
        assert row.stats["rounds_to_target"].mean == 1
    assert rows["topk"].ratios["compression_values"] > rows["topk"].ratios["compression"] > 5
    assert rows["local"].ratios["compression_values"] == math.inf


def ranked_by_mse(folder, curve, method="fedavg", seed=0, **more):
    metrics = [{"mse": value, "personal_mse": value / 2} for value in curve]
    summary = {"ranked_by": "mse", "higher_is_better": False}
    columns = {"metrics": metrics, "loss": curve} | more
    return made_run(folder, [math.nan] * len(curve), method, seed, columns=columns, summary=summary)


@pytest.fixture
def regression(tmp_path):
    for seed in range(3):
        ranked_by_mse(tmp_path / f"a{seed}", [4.0, 2.0 + 0.01 * seed], "fedavg", seed)
        ranked_by_mse(tmp_path / f"b{seed}", [4.0, 3.0 + 0.01 * seed], "int8", seed)
        ranked_by_mse(tmp_path / f"c{seed}", [4.0, 1.0 + 0.02 * seed], "topk", seed)
    return tmp_path


def test_the_lowest_error_is_the_best(regression):
    found = comparison_of(regression)
    assert [(row.method, row.best, row.star) for row in found.rows] == [
        ("fedavg", False, False),
        ("topk", True, True),
        ("int8", False, False),
    ]
    row = found.rows[1]
    assert row.stats["final_mse"].mean == row.stats["best_mse"].mean == pytest.approx(1.02)
    assert row.stats["personal_mse"].mean == pytest.approx(0.51)
    assert row.gaps["final_mse"].mean == pytest.approx(-0.99)
    (said,) = headlines(found)
    assert "topk has the lowest mse" in said
    assert "mse difference vs fedavg: −0.99" in said
    assert "more than noise" in said
    assert "accura" not in said


def test_tables_of_another_metric_have_its_name_and_no_column_of_nothing(regression):
    found = comparison_of(regression)
    first, second, *others = tables_of_comparison(found)
    assert first.title.startswith("mse")
    assert first.title.endswith("(lower is better)")
    assert first.line == ["method", "seeds", "mse", "", "best round", "personalized"]
    assert first.rows[1][:4] == ["topk", "3", "1.02 ± 0.02", "best *"]
    assert second.title == "mse difference vs fedavg [95 % confidence interval]"
    assert [one.title.split(",")[0] for one in others] == [
        "Bytes sent",
        "Convergence and stability of mse; std in its unit (change vs fedavg)",
    ]
    assert mark_legend(found).startswith("best: the lowest mean mse. * (Pareto): better than another method")
    latex = comparison_latex(found)
    assert r"Method & mse $\downarrow$ & Personalized mse $\downarrow$ & $\Delta$ mse vs.\ fedavg & Upload" in latex
    assert r"topk & \textbf{1.02} $\pm$ 0.02" in latex
    assert "nan" not in latex
    csv = comparison_csv(found)
    assert csv.startswith("method,task,seeds,rounds,final_mse,final_mse_std,personal_mse")
    assert ",ranked_by" in csv.splitlines()[0]
    assert comparison_json(found)["rows"][0]["ranked_by"] == "mse"


def test_runs_that_rank_by_different_metrics_follow_the_baseline(tmp_path):
    f1 = {"metrics": [{"macro_f1": 0.2}, {"macro_f1": 0.3}]}
    made_run(tmp_path / "a", [0.1, 0.5], "fedavg")
    made_run(tmp_path / "b", [0.1, 0.6], "topk", columns=f1, summary={"ranked_by": "macro_f1"})
    rows, notes = compared(tmp_path)
    said = (
        "runs rank by different metrics (fedavg: accuracy; topk: macro_f1): all are ranked by the baseline's, accuracy"
    )
    assert said in notes
    assert rows["topk"].best
    assert tables_of_comparison(comparison_of(tmp_path))[0].title.startswith("Accuracy")
    found = comparison_of(tmp_path, baseline="topk")
    assert not any(row.best for row in found.rows), "fedavg has no macro_f1"
    assert headlines(found)[0].startswith("No macro_f1 was measured for every method")


def test_a_regression_of_ones_own_is_compared_by_its_error(tmp_path):
    x = torch.randn(4, 30, 2, generator=torch.Generator().manual_seed(0))
    y = x.sum(-1, keepdim=True)
    clients = list(zip(x, y, strict=True))
    task = sparing.Task(lambda: torch.nn.Linear(2, 1), clients, test=(x[0], y[0]), metric="mse", name="sums")
    for method in ("fedavg", "sign"):
        sparing.run(task, method, **QUICK | {"local": {"lr": 0.05, "steps": 5}}, out=tmp_path / method)
    found = comparison_of(tmp_path)
    table = tables_of_comparison(found)[0]
    assert table.title == "mse on sums (lower is better)"
    assert not any("nan" in cell for row in table.rows for cell in row)
    means = {row.method: row.stats["final_mse"].mean for row in found.rows}
    assert [row.method for row in found.rows if row.best] == [min(means, key=lambda name: means[name])]


OWN_FILE = """
import torch
def load():
    x = torch.randn(4, 20, 2, generator=torch.Generator().manual_seed(0))
    return [(one, (one[:, 0] > {cut}).long()) for one in x]
def net(classes):
    return torch.nn.Linear(2, classes)
"""


def test_a_study_on_code_of_ones_own_is_another_task_after_an_edit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = {"data": "my_file.py:load", "model": "my_file.py:net"}
    for name, cut, seed in (("a", 0.0, 0), ("b", 0.0, 1), ("c", 1.0, 0), ("d", 1.0, 2)):
        (tmp_path / "my_file.py").write_text(OWN_FILE.format(cut=cut))
        sparing.run(task, **QUICK, seed=seed, out=tmp_path / "runs" / name)
    (tmp_path / "my_file.py").write_text("raise RuntimeError('this is never imported')")
    rows, notes = compared(tmp_path / "runs")
    assert sorted(row.seeds for row in rows.values()) == [[0, 1], [0, 2]]
    assert all(re.fullmatch(r"fedavg on my_file.py:load \(fingerprint=[0-9a-f]{8}\)", label) for label in rows)
    assert not any("the same study" in note for note in notes)
    assert any("2 different tasks are called 'my_file.py:load'" in note for note in notes)
    assert [row.task for row in comparison_of(tmp_path / "runs" / "a").rows] == ["my_file.py:load"]
