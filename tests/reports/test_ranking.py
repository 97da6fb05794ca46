"""Where a task counts something else than accuracy, targets, stability, figures and clients go by that, whichever way
is better."""

import csv
import math
import re

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import sparing
from made import made_run, record
from sparing.cli.app import app
from sparing.core.errors import ConfigError
from sparing.reports.comparison import compare_groups
from sparing.reports.comparison_tables import comparison_csv, tables_of_comparison
from sparing.reports.figure_files import write_figures
from sparing.reports.html_page import _validation_caution, report_figures
from sparing.reports.latex_table import comparison_latex
from sparing.reports.run_folders import find_run_folders, group_runs, read_run_folder
from sparing.reports.svg import draw_svg
from sparing.runs.files.run_folder import RunFolder
from sparing.runs.results import Target, bytes_to_target, rounds_to_target

ERRORS = {"fedavg": [4.0, 2.0, 2.1, 1.99], "topk": [4.0, 3.0, 1.0, 1.0], "int8": [4.0, 3.0, 3.0, 3.0]}


def read_groups_at(place):
    return group_runs([read_run_folder(folder) for folder in find_run_folders([place])])[0]


def made_by_mse(folder, curve, method, seed=0, **more):
    metrics = [{"mse": value, "personal_mse": value / 2, "clock": 10.0 * t} for t, value in enumerate(curve, 1)]
    summary = {"ranked_by": "mse", "higher_is_better": False}
    columns = {"metrics": metrics, "loss": [2 * value for value in curve]}
    return made_run(folder, [math.nan] * len(curve), method, seed, columns=columns, summary=summary, **more)


@pytest.fixture
def regression(tmp_path):
    for method, curve in ERRORS.items():
        for seed in range(3):
            made_by_mse(tmp_path / f"{method}-{seed}", [value + 0.01 * seed for value in curve], method, seed)
    return tmp_path


def test_a_low_target_is_reached_from_above():
    table = [record(t, up_bytes=5, down_bytes=5, metrics={"mse": value}) for t, value in enumerate([3.0, 1.5, 0.5], 1)]
    assert rounds_to_target(table, Target(1.5, "mse", higher_is_better=False)) == 2
    assert bytes_to_target(table, Target(1.5, "mse", higher_is_better=False)) == 20
    assert math.isnan(rounds_to_target(table, Target(0.1, "mse", higher_is_better=False)))
    assert math.isnan(rounds_to_target(table, Target(0.1)))


def test_targets_and_stability_are_those_of_the_metric(regression):
    found = compare_groups(read_groups_at(regression), target=2.05, warmup=0)
    rows = {row.method: row.stats for row in found.rows}
    assert rows["fedavg"]["rounds_to_target"].mean == pytest.approx(2)
    assert rows["fedavg"]["seconds_to_target"].mean == pytest.approx(20)
    assert rows["topk"]["rounds_to_target"].mean == pytest.approx(3)
    assert rows["int8"]["rounds_to_target"].seeds == 0
    assert rows["fedavg"]["convergence_round"].mean == pytest.approx(2), "2.0 is within 1 % of 1.99"
    assert rows["fedavg"]["seed_std"].mean == pytest.approx(0.01)
    assert rows["fedavg"]["jitter"].mean == pytest.approx(np.std(np.diff(ERRORS["fedavg"]), ddof=1))
    tables = {one.title: one for one in tables_of_comparison(found)}
    assert tables["Cost to reach mse 2.05"].rows[2] == ["int8", "0 of 3 seeds", "0 of 3 seeds", "-"]
    course = tables["Convergence and stability of mse; std in its unit (change vs fedavg)"]
    assert course.rows[0][3:] == ["2.0 ± 0.0", "0.01 (+0%)", "1.2 (+0%)"]
    assert r"Rounds to mse 2.05" in comparison_latex(found)


def test_a_target_that_nobody_reaches_is_told(regression):
    found = compare_groups(read_groups_at(regression), target=0.5)
    assert "no run reaches mse 0.5; the lowest is 1" in found.notes


def test_a_target_of_accuracy_is_a_share(tmp_path):
    made_run(tmp_path / "a", [0.5, 0.6])
    with pytest.raises(ConfigError, match=r"--target is 90, but an accuracy lies between 0 and 1; write 0.9 for 90 %"):
        compare_groups(read_groups_at(tmp_path), target=90)


def test_two_tasks_have_a_target_each(tmp_path):
    made_run(tmp_path / "a", [0.5, 0.6])
    made_by_mse(tmp_path / "b", [0.9, 0.4], "fedavg", study={"task": {"data": "mnist"}})
    found = compare_groups(read_groups_at(tmp_path), target=0.5)
    titles = [one.title for one in tables_of_comparison(found)]
    assert [title for title in titles if "Cost" in title] == ["Cost to reach 50 % accuracy", "Cost to reach mse 0.5"]
    assert [row.stats["rounds_to_target"].mean for row in found.rows] == [1, 2]


def test_figures_are_of_the_metric_with_its_direction(regression):
    made = report_figures(read_groups_at(regression))
    assert [word for word, _ in made][:4] == ["mse against bytes", "By megabytes", "mse by round", "By time"]
    figures = {figure.key: figure for _, figure in made}
    assert {"pareto-front", "mse-by-megabytes", "mse-by-round", "mse-by-time", "stability"} <= set(figures)
    said = str([(one.title, one.read, one.tables, [plot.y for plot in one.plots]) for one in figures.values()])
    assert "accura" not in said
    pareto = figures["pareto-front"]
    assert pareto.read.startswith("Down and to the left is better")
    assert pareto.plots[0].y == "mse (lower is better)"
    hollow = {one.name: one.hollow for one in pareto.plots[0].series}
    assert hollow == {"fedavg": True, "topk": False, "int8": True}, "all send as much, and topk has the least error"
    assert figures["mse-by-round"].title == "mse by round: topk ends lowest, at 1.01"
    assert figures["mse-by-round"].plots[0].series[0].y[0] == pytest.approx(4.01), "in its own unit"


def test_seeds_that_cannot_tell_name_no_best(tmp_path):
    for seed, (one, other) in enumerate([(1.0, 1.1), (1.3, 1.2), (1.1, 1.05)]):
        made_by_mse(tmp_path / f"a{seed}", [2.0, one], "fedavg", seed)
        made_by_mse(tmp_path / f"b{seed}", [2.0, other], "topk", seed)
    figures = {figure.key: figure for _, figure in report_figures(read_groups_at(tmp_path))}
    said = "no clear best, 2 of 2 methods are within noise of the lowest, at 1.117 to 1.133"
    assert figures["mse-by-round"].title == f"mse by round: {said}"


def test_an_error_that_falls_far_is_drawn_on_a_log_scale(tmp_path):
    for seed in (0, 1):
        made_by_mse(tmp_path / f"a{seed}", [40.0 + 39 * seed, 1.0, 0.02 + 0.001 * seed], "fedavg", seed)
    figure = next(one for _, one in report_figures(read_groups_at(tmp_path)) if one.key == "mse-by-round")
    plot = figure.plots[0]
    assert plot.log_y
    assert plot.y == "mse (lower is better, log scale)"
    drawn = draw_svg(plot)
    assert "nan" not in drawn.svg
    heights = [float(y) for y in re.findall(r'class="dot" cx="[\d.]+" cy="([\d.]+)"', drawn.svg)]
    assert heights[0] < heights[1] < heights[2], "down the page"
    assert heights[1] - heights[0] == pytest.approx(heights[2] - heights[1], rel=0.1), "40, 1 and 0.02 are as far apart"
    assert {">0.1<", ">1<", ">10<"} <= set(re.findall(r">[\d.]+<", drawn.svg))
    write_figures([figure], tmp_path / "figures", ["png"])


def test_small_errors_keep_their_digits(tmp_path):
    made_by_mse(tmp_path / "a", [4.0, 0.000012345], "fedavg")
    found = compare_groups(read_groups_at(tmp_path))
    (row,) = csv.DictReader(comparison_csv(found).splitlines())
    assert row["final_mse"] == "1.2345e-05"
    assert row["up_mb"] == "0.0002"
    course = tables_of_comparison(found)[-1]
    assert course.rows[0][1] == "2.469e-05"


def test_an_h5_file_of_a_regression_is_refused_in_its_words(regression):
    done = CliRunner().invoke(app, ["compare", str(regression), "--h5", str(regression / "h5")])
    assert "an H5 file holds accuracies, and these runs have none; write their tables with --csv" in done.output


def test_what_is_on_validation_samples_is_not_called_accuracy(tmp_path):
    study = {"evaluate": {"set": "validation"}, "task": {"validation": 0.2}}
    made_by_mse(tmp_path / "a", [2.0, 1.0], "fedavg", study=study)
    groups = read_groups_at(tmp_path)
    assert _validation_caution(groups).startswith("Results are on validation samples")
    assert any(note.startswith("mse and loss are on validation samples") for note in compare_groups(groups).notes)


def sums_task(metric="mse", spoilt=0.0, **more):
    """Two features are added; test samples are each client's own, and the first client's targets may be spoilt."""
    x = torch.randn(4, 30, 2, generator=torch.Generator().manual_seed(0))
    y = x.sum(-1, keepdim=True)
    y[0] += spoilt
    clients = list(zip(x, y, strict=True))
    return sparing.Task(lambda: torch.nn.Linear(2, 1), clients, clients, metric=metric, name="sums", **more)


QUICK = {"rounds": 3, "sample": 1.0, "local": {"lr": 0.05, "steps": 5}, "plan": {"threads": 1, "path": "loop"}}


@pytest.mark.parametrize("metric", ["mse", "loss", "r2"])
def test_every_client_has_its_value_of_what_is_ranked_by(tmp_path, metric):
    result = sparing.run(sums_task(metric), **QUICK, out=tmp_path / "run")
    rows = list(csv.DictReader((tmp_path / "run" / "clients.csv").read_text().splitlines()))
    last = [float(row[metric]) for row in rows if row["round"] == "3" and row["who"] == "before"]
    assert len(last) == 4
    assert np.mean(last) == pytest.approx(result.personal_score)
    assert list(rows[0]).count(metric) == 1


def test_a_run_that_goes_on_keeps_its_columns(tmp_path):
    sparing.run(sums_task(), **QUICK, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        sparing.run(sums_task(), **QUICK, out=tmp_path / "broken", loggers=[stop_after(2)])
    sparing.resume(tmp_path / "broken", task=sums_task())
    assert (tmp_path / "broken/clients.csv").read_text() == (tmp_path / "whole/clients.csv").read_text()


def stop_after(last):
    def stop(record):
        if record.round == last:
            raise KeyboardInterrupt

    return stop


def test_a_start_that_was_broken_off_is_no_run_yet(tmp_path):
    RunFolder.create(tmp_path / "run", "cpu", "mse").close()
    sparing.run(sums_task(), **QUICK, out=tmp_path / "run")


def test_the_clients_figure_is_of_the_metric(tmp_path):
    sparing.run(sums_task(spoilt=5.0), **QUICK, out=tmp_path / "run")
    figures = {figure.key: figure for _, figure in report_figures(read_groups_at(tmp_path))}
    clients = figures["clients"]
    assert clients.title == "How mse varies between clients after the last round"
    assert clients.plots[0].x == "mse on the client's own test samples (lower is better)"
    assert "the small tick is the 90th percentile" in clients.read
    assert max(clients.plots[0].series[0].y) > 5 * np.median(clients.plots[0].series[0].y)
    assert not clients.plots[0].low_is_worst


def test_the_page_of_a_regression_speaks_of_no_accuracy(regression):
    out = regression / "report.html"
    done = CliRunner().invoke(app, ["report", str(regression), "-o", str(out), "--target", "2.05"])
    assert done.exit_code == 0, done.output
    body = out.read_text().partition("<body>")[2].partition("<script>\n")[0]
    assert "accura" not in body.lower()


def test_the_page_has_a_real_minus(tmp_path):
    for method, ends in (("fedavg", (0.8, 0.9)), ("topk", (0.7, 0.6)), ("lg-fedavg", (0.5, 0.4))):
        for seed, end in enumerate(ends):
            made_run(tmp_path / f"{method}-{seed}", [0.1, 0.95, end], method, seed)
    page = sparing.report(tmp_path, out=tmp_path / "report.html").read_text()
    shown = re.findall(r"<t[dh][^>]*>([^<]*)<|<text[^>]*>([^<]*)<", page)
    words = [one or other for one, other in shown]
    assert not any(re.search(r"(^|[\s(\[])-\d", word) for word in words)
    assert any(word.startswith("−20.00") for word in words), "a difference"
    assert any(word == "−50" for word in words), "a tick"
    assert "lg-fedavg" in words, "a name keeps its hyphen"


def test_a_result_goes_by_its_metric_too():
    result = sparing.run(sums_task(), **QUICK)
    seen = result.metric("mse")
    assert result.rounds_to(seen[1]) == 2
    assert math.isnan(result.rounds_to(0.0))
