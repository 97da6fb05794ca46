"""`sparing report`: the page holds what the runs hold, and opens in a browser without asking anybody for anything."""

import csv
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import sparing
from browser import CHROMIUM, browser
from sparing.cli.app import app
from sparing.reports import figure_files
from sparing.reports.comparison import compare_groups
from sparing.reports.figure import (
    Plot,
    Series,
    axis_ticks,
    distinct_labels,
    has_legend,
    log_ticks,
    one_legend,
    thinned_places,
)
from sparing.reports.html_page import _report_subtitle, _validation_caution, report_figures, report_page
from sparing.reports.method_figures import _dominates, _leader_sentence, pareto_figure
from sparing.reports.report_runs import GroupContents, RunContents, read_groups
from sparing.reports.run_folders import find_run_folders, group_runs, read_run_folder
from sparing.reports.svg import draw_svg, mark_shape, tint_classes
from sparing.runs.files.ledger import ALL_BYTE_KINDS

TASK = {"data": "digits", "clients": 5, "model": "cnn"}
OPTIONS = {"rounds": 3, "sample": 3, "local": {"steps": 2}, "plan": {"path": "loop", "chunk": 2, "threads": 1}}
METHODS = {
    "plain": ("fedavg", {"record": ["updates", "similarity"]}),
    "stein": ("stein", {"fleet": {"links": "4g"}}),
    "fedhm": ("fedhm", {}),
    "psfed": ("psfed+int8", {}),
    "alike": ([{"pfedsim": {"mode": "published", "warmup": 0.0}}], {}),
    "pruned": ([{"fedscr": {"adaptive": True}}], {}),
    "secret": ("dp", {}),
}
ALWAYS = {"accuracy-by-round", "accuracy-by-megabytes", "clients", "stability", "bytes", "split"}
EVERY = ALWAYS | {"pareto-front", "accuracy-by-time", "coverage", "sizes", "approximation", "similarity", "shrinkage"}
EVERY |= {"pruned", "thresholds", "updates", "epsilon"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A run of each kind, and a second seed of the first; not to be touched."""
    home = tmp_path_factory.mktemp("runs")
    for name, (method, more) in METHODS.items():
        sparing.run(TASK, method, **{**OPTIONS, **more}, out=home / name)
    sparing.run(TASK, "fedavg", **OPTIONS, seed=1, out=home / "plain-1")
    return home


@pytest.fixture(scope="module")
def groups(runs):
    return group_runs([read_run_folder(folder) for folder in find_run_folders([runs])])[0]


@pytest.fixture(scope="module")
def report(runs) -> Path:
    done = CliRunner().invoke(app, ["report", str(runs), "-o", str(runs / "report.html")])
    assert done.exit_code == 0, done.output
    return runs / "report.html"


def test_bytes_of_secure_sums_are_read_by_kind(tmp_path):
    result = sparing.run(TASK, **{**OPTIONS, "rounds": 1}, secure=True, out=tmp_path / "run")
    sent = read_groups(group_runs([read_run_folder(tmp_path / "run")])[0])[0].seen[0].sent
    assert (sum(sent["up"]), sum(sent["down"])) == (result.up_bytes, result.down_bytes)
    assert len(sent["up"]) == len(ALL_BYTE_KINDS)


def test_runs_with_secure_sums_stand_beside_others(tmp_path):
    for name, method, secure in (("off", "fedavg", False), ("on", "fedavg", True), ("noise", "dp", True)):
        sparing.run(TASK, method, **{**OPTIONS, "rounds": 1}, secure=secure, out=tmp_path / name)
    found = group_runs([read_run_folder(folder) for folder in find_run_folders([tmp_path])])[0]
    assert sorted(group.label for group in found) == ["dp", "fedavg", "fedavg (secure=true)"]
    done = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(tmp_path / "report.html")])
    assert done.exit_code == 0, done.output
    assert "That of dp holds for whoever sees every secure sum" in (tmp_path / "report.html").read_text()


class Reader(HTMLParser):
    """Every element, by the section it stands in, and all ids and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.inside, self.ids, self.links = "", {}, [], []

    def handle_starttag(self, tag, attrs) -> None:
        values = dict(attrs)
        if tag == "section":
            self.where = values["id"]
        self.inside.setdefault(self.where, []).append((tag, values))
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values[name] for name in ("href", "src", "data", "action", "srcset") if name in values]


def test_every_figure_is_there_with_its_numbers(report):
    reader = Reader()
    reader.feed(report.read_text())
    assert set(reader.inside) - {"", "results", "settings"} == EVERY
    for key in EVERY:
        tags = [tag for tag, _ in reader.inside[key]]
        assert tags.count("svg") >= 1
        assert tags.count("table") >= 1
        assert tags.count("details") == tags.count("h2") == 1
    assert len(reader.ids) == len(set(reader.ids))
    assert all(link.startswith("#") and link[1:] in reader.ids for link in reader.links)
    assert "url(" not in report.read_text()
    assert re.findall(r"https?://[^\"']+", report.read_text()) == len(
        re.findall(r"<svg viewBox|SVG = ", report.read_text())
    ) * ["http://www.w3.org/2000/svg"], "names of a language, not addresses"
    assert len(report.read_bytes()) < 1_000_000


def test_a_figure_appears_only_where_there_is_data(runs):
    groups, _ = group_runs([read_run_folder(runs / "plain-1")])
    assert {figure.key for _, figure in report_figures(groups)} == ALWAYS


def test_a_run_without_pictures_has_a_report_too(runs, tmp_path):
    for file in (runs / "plain-1").iterdir():
        if file.name != "pictures.jsonl":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    groups, _ = group_runs([read_run_folder(tmp_path)])
    assert {figure.key for _, figure in report_figures(groups)} == ALWAYS - {"split"}


def test_lines_are_means_and_bands_standard_deviations_over_seeds(runs, groups):
    made = {figure.key: figure for _, figure in report_figures(groups)}
    tables = [
        list(csv.DictReader((runs / name / "rounds.csv").read_text().splitlines())) for name in ("plain", "plain-1")
    ]
    accuracy = 100 * np.array([[float(row["accuracy"]) for row in table] for table in tables])
    (line,) = [one for one in made["accuracy-by-round"].plots[0].series if one.name == "fedavg"]
    np.testing.assert_allclose(line.y, accuracy.mean(0))
    assert line.spread is not None
    np.testing.assert_allclose(line.spread, accuracy.std(0, ddof=1))
    (steady,) = [one for one in made["stability"].plots[0].series if one.name == "fedavg"]
    np.testing.assert_allclose(steady.y, accuracy.std(0, ddof=1))
    sent = [[int(row["up_bytes"]) + int(row["down_bytes"]) for row in table] for table in tables]
    (line,) = [one for one in made["accuracy-by-megabytes"].plots[0].series if one.name == "fedavg"]
    np.testing.assert_allclose(line.x, np.cumsum(sent, axis=1).mean(0) / 1e6)
    single = [one for one in made["accuracy-by-round"].plots[0].series if one.name != "fedavg"]
    assert all(one.spread is None for one in single), "one seed has no spread"


def test_bars_add_up_to_the_ledger(runs, groups):
    (figure,) = [figure for _, figure in report_figures(groups) if figure.key == "bytes"]
    bars = {row: sum(one.y[i] for one in figure.plots[0].series) for i, row in enumerate(figure.plots[0].rows)}
    summary = json.loads((runs / "psfed/summary.json").read_text())
    assert bars["psfed+int8, up"] * 1e6 == pytest.approx(summary["up_bytes"])
    assert bars["psfed+int8, down"] * 1e6 == pytest.approx(summary["down_bytes"])
    shares = np.array([one.y for one in figure.plots[1].series]).sum(0)
    np.testing.assert_allclose(shares, 100)


def test_clients_are_those_of_the_last_evaluation(runs, groups):
    (figure,) = [figure for _, figure in report_figures(groups) if figure.key == "clients"]
    rows = list(csv.DictReader((runs / "stein/clients.csv").read_text().splitlines()))
    last = [100 * float(row["accuracy"]) for row in rows if row["round"] == "3" and row["who"] == "before"]
    (strip,) = [one for one in figure.plots[0].series if one.name.startswith("stein")]
    assert strip.y == pytest.approx(last)
    (plain,) = [one for one in figure.plots[0].series if one.name == "fedavg"]
    assert len(plain.y) == 2 * len(last), "both seeds"


def test_nobody_beats_what_is_on_the_front():
    def at(x: float, y: float) -> Series:
        return Series("", [y], [x])

    assert _dominates(at(1, 90), at(2, 90))
    assert _dominates(at(1, 91), at(1, 90))
    assert not _dominates(at(1, 90), at(1, 90))
    assert not _dominates(at(1, 89), at(2, 90))


@pytest.fixture
def ended(groups):
    """A method whose seeds end at these accuracies, having sent so many bytes a round."""

    def make(label: str, *ends: float, sent: int = 1000) -> GroupContents:
        run = groups[0].runs[0]
        tables = [[replace(record, accuracy=end, personal_accuracy=np.nan, up_bytes=sent, down_bytes=0)
                   for record in run.table] for end in ends]  # fmt: skip
        runs = [run._replace(seed=i, table=table) for i, table in enumerate(tables)]
        return GroupContents(label, [RunContents(run, [], {}, {}) for run in runs], 0)

    return make


def test_a_winner_is_named_only_beyond_chance(ended):
    def said(*found: GroupContents) -> str:
        return _leader_sentence(found, "accuracy")

    top, close, low = ended("a", 0.90, 0.92, 0.94), ended("b", 0.91, 0.90, 0.94), ended("c", 0.50, 0.52, 0.55)
    assert said(top) == "a ends at 92.0 %"
    assert said(low, top) == "a ends highest, at 92.0 %"
    assert said(low, close, top) == "no clear best, 2 of 3 methods are within noise of the highest, at 91.7 to 92.0 %"
    assert said(ended("d", 0.95), ended("e", 0.1)) == "too few seeds to name a best method, they end at 10.0 to 95.0 %"
    assert said(low, ended("d", 0.95)) == "too few seeds to name a best method, they end at 52.3 to 95.0 %"


def test_beaten_is_what_seeds_say_is_beaten(ended):
    top, close = ended("a", 0.90, 0.92, 0.94), ended("b", 0.91, 0.90, 0.94, sent=2000)
    low, same = ended("c", 0.50, 0.52, 0.55, sent=2000), ended("d", 0.90, 0.92, 0.94, sent=3000)
    figure = pareto_figure([top, close, low, same, ended("e", 0.2, sent=4000)])
    assert figure is not None
    (plot,) = figure.plots
    assert {one.name for one in plot.series if one.hollow} == {"c", "d"}
    assert len(plot.front) == 1
    places = {row[0]: row[-1] for row in figure.tables[0].rows}
    assert places == {"a": "yes *", "b": "within noise", "c": "beaten", "d": "beaten", "e": "within noise"}


def test_maps_of_one_measure_have_one_scale(groups):
    made = {figure.key: figure for _, figure in report_figures(groups)}
    cosines = [plot for plot in made["similarity"].plots if "cosine" in plot.title]
    values = [abs(x) for plot in cosines for row in plot.values for x in row if x is not None]
    assert len(cosines) == 2
    assert all(plot.signed and plot.scale == (-max(values), max(values)) for plot in cosines)
    heads = [plot for plot in made["similarity"].plots if "heads" in plot.title]
    assert len({plot.scale for plot in heads}) == 1
    assert not any(plot.signed for plot in heads)
    for layer in ("conv1.weight", "conv2.weight"):
        maps = [plot for plot in made["updates"].plots if plot.kind == "heat" and layer in plot.title]
        most = max(x for plot in maps for row in plot.values for x in row if x is not None)
        assert len(maps) > 1
        assert {plot.scale for plot in maps} == {(0.0, most)}
        assert [plot.fresh for plot in maps] == [True, *[False] * (len(maps) - 1)]
        assert all(plot.title.startswith("fedavg, seed 0: ") for plot in maps)
    assert re.search(r"within a filter -?\d\.\d\d in fedavg, shuffled -?\d", made["updates"].title)
    assert "-0.00" not in made["updates"].title
    drawn = draw_svg(Plot("heat", rows=["a"], columns=["c"], values=[[0.5]], scale=(-1.0, 1.0), signed=True))
    assert 'class="v7" d=' in drawn.svg


def lab(colour: str) -> np.ndarray:
    """CIELAB, in which distances are what an eye sees."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    rgb = np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb
    f = np.cbrt(xyz / [0.95047, 1.0, 1.08883])
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def points(count: int) -> Plot:
    """All of them in one place, where labels would collide."""
    series = [Series(f"method-{i}", [50.0], [1.0 + i / 100], tint=i) for i in range(count)]
    return Plot("points", "MB", "accuracy (%)", series=series, log=True)


def test_labels_of_points_do_not_collide():
    few, many = points(6), points(7)
    places = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" class="name"[^>]*>([^<]+)<', draw_svg(few).svg)
    boxes = [(float(x), float(x) + 8.4 * len(name), float(y)) for x, y, name in places]
    assert len(boxes) == 6
    assert not any(a[0] < b[1] and b[0] < a[1] and abs(a[2] - b[2]) < 12 for a, b in combinations(boxes, 2))
    assert not has_legend(few)
    assert has_legend(many)
    assert 'class="name"' not in draw_svg(many).svg


def test_a_figure_has_one_legend(groups, report):
    made = dict(report_figures(groups))
    figure = made["Accuracy by round"]
    assert len(figure.plots) == 2
    assert one_legend(figure.plots) is not None
    page = report.read_text()
    section = page[page.index('<section id="accuracy-by-round"') :]
    assert section[: section.index("</figure>")].count('class="legend"') == 1
    canvas = figure_files.draw_figure(figure)
    assert len(canvas.legends) == 1
    assert not any(ax.get_legend() for ax in canvas.axes)


def test_the_page_opens_with_accuracy_against_bytes_and_a_sentence(report):
    page = report.read_text()
    sections = re.findall(r'<section id="([\w-]+)"', page)
    assert sections[:2] == ["pareto-front", "results"]
    answers = re.findall(r'<p class="answer">([^<]+)</p>', page)
    assert len(answers) == 1
    assert re.search(r"is the most accurate on digits: [\d.]+ % accuracy with [\d.]+ MB sent in 3 rounds", answers[0])
    assert "accuracy difference vs fedavg" in answers[0]
    assert page.index('<section id="pareto-front"') < page.index("</figure>") < page.index(answers[0])


def test_plots_of_two_tasks_are_apart(runs, tmp_path):
    shutil.copytree(runs / "plain", tmp_path / "plain")
    sparing.run(TASK | {"clients": 4}, "fedavg", **OPTIONS, out=tmp_path / "other")
    groups, _ = group_runs([read_run_folder(folder) for folder in find_run_folders([tmp_path])])
    figure = dict(report_figures(groups))["Accuracy by round"]
    assert all(len(plot.series) == 1 for plot in figure.plots)
    assert {plot.title.split(":")[0] for plot in figure.plots} == {"digits (clients=4)", "digits (clients=5)"}
    assert figure.title.startswith("Accuracy by round; digits (clients=4): fedavg ends at ")
    assert {one.tint for plot in figure.plots for one in plot.series} == {0}, "a method has one colour everywhere"
    page = report_page(groups, compare_groups(groups), report_figures(groups))
    assert page.count('<p class="answer">') == 2


def test_many_methods_look_different():
    assert len({tint_classes(i) for i in range(32)}) == 32
    names = [f"fedavg (task.model=mlp, local.lr=0.0{i}, rounds=3)" for i in range(1, 10)]
    assert len(set(distinct_labels(names, 18))) == 9
    assert len(set(figure_files._SERIES_COLOURS)) == len(set(figure_files._SERIES_MARKERS)) == 12
    assert len(set(map(str, figure_files._SERIES_DASHES))) == len({mark_shape(i) for i in range(12)}) == 12
    css = files("sparing.reports").joinpath("page.css").read_text()
    tints = [re.search(rf"--t{i}: light-dark\((#\w+), (#\w+)\)", css).groups() for i in range(12)]
    assert tuple(light for light, _ in tints) == figure_files._SERIES_COLOURS
    for colours in zip(*tints, strict=True):
        apart = [np.linalg.norm(np.subtract(lab(a), lab(b))) for a, b in combinations(colours, 2)]
        assert min(apart) > 20, "ten times a difference that is just noticed"
    sizes = [f"{n},000 parameters" for n in (8, 4, 2, 1)]
    svg = draw_svg(Plot("heat", rows=["conv"], columns=sizes, values=[[1.0, 2.0, 3.0, 4.0]])).svg
    assert svg.count("rotate(-40") == 4, "every size has its name"


def test_changes_have_no_bands(groups):
    (figure,) = [figure for _, figure in report_figures(groups) if figure.key == "stability"]
    assert all(one.spread is None for one in figure.plots[-1].series)


def test_what_the_top_says(groups):
    (plain,) = [group for group in groups if group.label == "fedavg"]
    assert _report_subtitle([plain]) == "3 rounds, 2 seeds: fedavg."
    assert _report_subtitle([plain._replace(runs=plain.runs[:1])]) == "3 rounds, 1 seed: fedavg."
    assert _validation_caution([plain]) == ""
    held = [run._replace(settings=run.settings | {"evaluate.set": "validation"}) for run in plain.runs]
    aside = plain._replace(label="held", runs=held)
    assert "Accuracies and losses are on validation samples" in report_page(
        [aside], compare_groups([aside]), report_figures([aside])
    )
    assert "losses of held are on validation" in _validation_caution([plain, aside])
    (clients,) = [figure for _, figure in report_figures([aside]) if figure.key == "clients"]
    assert clients.plots[0].x == "accuracy on the client's own validation samples (%)"


def test_damaged_and_missing_files_are_named(runs, tmp_path):
    shutil.copytree(runs / "plain", tmp_path / "plain")
    (tmp_path / "plain/checkpoint.safetensors").unlink()  # it would vouch for what is written, and the rest be ignored
    (tmp_path / "plain/clients.csv").unlink()
    done = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(tmp_path / "a.html")])
    assert done.exit_code == 0, done.output
    assert "clients.csv is missing: the clients of this run are not shown" in (tmp_path / "a.html").read_text()
    for file, bad in (("pictures.jsonl", '{"kind": "spl'), ("pictures.jsonl", "[1]"), ("clients.csv", "1,2")):
        path = tmp_path / "plain" / file
        path.write_text((runs / "plain" / file).read_text() + bad + "\n")
        done = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(tmp_path / "b.html")])
        assert done.exit_code == 2
        assert f"{file} is not as it was written, see line {len(path.read_text().splitlines())}" in words(done.stderr)
        path.write_text((runs / "plain" / file).read_text())


def words(text: str) -> str:
    return " ".join(text.split())


def test_words_of_a_study_are_not_markup(groups):
    words = "<script>alert(1)</script> & </title>"
    odd = [groups[0]._replace(label=words, method=words)]
    text = report_page(odd, compare_groups(odd), report_figures(odd))
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    assert "</title> " not in text


def test_heat_maps_have_a_cell_for_each_value():
    drawn = draw_svg(Plot("heat", rows=["a", "b"], columns=["c", "d", "e"], values=[[0.0, 0.0, 1.0], [None, 0.5, 1.0]]))
    assert drawn.svg.count("M") == 4, "neighbours of one colour are one shape, and nothing has none"
    assert drawn.mode == "grid"


def test_long_lines_are_thinned_evenly():
    places = thinned_places(1000)
    assert len(places) <= 200
    assert (places[0], places[-1]) == (0, 999)
    assert max(np.diff(places)) <= 6
    assert thinned_places(3) == [0, 1, 2]


def test_axes_have_round_numbers():
    assert axis_ticks(1, 3, whole=True) == [1, 2, 3]
    assert axis_ticks(0.5, 0.5) == [0.5]
    assert log_ticks(2.5, 8.5) == [3, 4, 6, 8]


def test_figures_as_files_are_the_same_each_time(groups, tmp_path):
    some = [figure for _, figure in report_figures(groups) if figure.key in ("epsilon", "split")]
    first = figure_files.write_figures(some, tmp_path / "a", ["png", "svg", "pdf"])
    again = figure_files.write_figures(some, tmp_path / "b", ["png", "svg", "pdf"])
    starts = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    assert len(first) == 6
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()
        assert one.read_bytes().startswith(starts[one.suffix])


def test_what_the_command_refuses(runs, tmp_path):
    def refused(*words: str) -> str:
        done = CliRunner().invoke(app, ["report", *words])
        assert done.exit_code == 2
        return done.stderr

    assert "--format has 'bmp'; use png, svg, pdf" in refused(str(runs), "--format", "png,bmp")
    assert "holds no run" in refused(str(tmp_path))
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused(str(runs / "plain"), "-o", str(tmp_path / "file" / "report.html"))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_the_page_works_in_a_browser(report, tmp_path):
    with browser(tmp_path) as tab:
        tab.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
        tab.open(report)
        assert tab.run("[...document.querySelectorAll('.reach svg')].every(s => s.getBoundingClientRect().height > 60)")
        inside = """[...document.querySelectorAll('figure svg text')].filter(t => {
            const a = t.getBoundingClientRect(), b = t.ownerSVGElement.getBoundingClientRect();
            return a.left < b.left - 1 || a.right > b.right + 1 || a.bottom > b.bottom + 1; })
            .map(t => `${t.closest('section').id}: ${t.textContent}`)"""
        assert tab.run(inside) == [], "no words are cut off"
        assert tab.run("document.documentElement.scrollWidth <= innerWidth")

        where = "(e => [e.tagName, e.className || e.id, (e.closest('section') || {}).id])(document.activeElement)"
        seen = []
        while not seen or seen[-1][0] != "BODY":
            tab.press("Tab")
            seen.append(tab.run(where))
            assert len(seen) < 300
        assert ["BUTTON", "theme", None] in seen
        assert {section for _, name, section in seen if name == "scroll reach"} == EVERY

        tab.run("document.querySelector('#accuracy-by-round .reach').focus({focusVisible: true})")
        tab.press("End")
        assert "round 3" in tab.run("document.querySelector('#accuracy-by-round .tip').textContent")
        tab.press("ArrowLeft")
        assert "round 2" in tab.run("document.querySelector('#accuracy-by-round .tip').textContent")
        tab.run("document.querySelector('#split .reach').focus({focusVisible: true})")
        tab.press("End")
        tab.press("ArrowUp")
        cell = tab.run("[...document.querySelector('#split table').rows].at(-2).cells[5].textContent")
        assert tab.run("document.querySelector('#split .tip span').textContent") == (cell or "nothing")

        tab.run("document.querySelector('#accuracy-by-round .legend button').focus()")
        tab.press("Enter")
        assert tab.run("document.querySelector('#accuracy-by-round [data-series]').getBoundingClientRect().width") == 0

        paper = "getComputedStyle(document.body).backgroundColor"
        before = tab.run(paper)
        tab.run("document.getElementById('theme').click()")
        assert tab.run(paper) != before
        tab.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
        assert tab.run("document.documentElement.scrollWidth <= innerWidth"), "a narrow page does not scroll sideways"
        assert tab.run("document.getElementById('theme').getBoundingClientRect().right <= innerWidth")

        wrong = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        assert [event for event in tab.events if event.get("method") in wrong] == []
        asked = {e["params"]["request"]["url"] for e in tab.events if e.get("method") == "Network.requestWillBeSent"}
        assert asked == {report.resolve().as_uri()}
