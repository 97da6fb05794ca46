"""What README, CONTRIBUTING and docs/ show really runs, and what they link to is there.

Python blocks run as they stand. Studies in YAML are loaded, and those on the embedded digits train for one round.
Commands run in a folder with a small study and two finished runs, on fewer clients and rounds than shown; those whose
data has to be downloaded are only read. What changes the machine (pip, make, source) is not run.
"""

import re
import runpy
import shlex
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from sparing.cli.app import app
from sparing.cli.pfllib_flags import study_from_flags
from sparing.cli.trackers import TRACKERS
from sparing.core.registry import REGISTRY, known_recipes
from sparing.data import registry as data_registry
from sparing.runs.cost import run_cost_trial
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.start import run, start_run
from sparing.runs.study import Study, load_study
from sparing.sweeps.spec import load_sweep

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = {"design": "its blocks list signatures"}
TINY = ["rounds=1", "sample=2", "task.clients=4", "task.model=mlp", "plan.threads=1"]
ONE_TRIAL = ["sweep.seeds=1", "sweep.final=1", "sweep.local.lr=[0.1]", "sweep.method.topk.ratio=[0.1]"]
CHANGES_THE_MACHINE = ("pip install", "pre-commit install", "source ")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def write_files(page: Path, home: Path) -> None:
    """Blocks that begin with the name of a file, as that file."""
    for code in blocks(page, "python"):
        if name := re.match(r"# (\w+\.py)\n", code):
            (home / name[1]).write_text(code)


def having(language: str) -> list:
    pages = [page for page in PAGES if page.parent != REFERENCE and blocks(page, language)]
    return [pytest.param(page, id=page.stem) for page in pages if page.stem not in NOT_RUN or language != "python"]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty folder to be in; parts and datasets that a page names are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(data_registry, "_DATASETS", data_registry.known_datasets())
    before = known_recipes()
    yield tmp_path
    for name in REGISTRY.keys() - before.keys():
        del REGISTRY[name]


@pytest.mark.parametrize("page", having("python"))
def test_python_runs(page, home, monkeypatch):
    monkeypatch.setattr("sparing.runs.cost.check_study", run_cost_trial)
    for code in blocks(page, "python"):
        space: dict = {"__name__": "page"}
        exec(code, space)
        for name, function in space.items():
            if name.startswith("test_"):
                function()


@pytest.mark.parametrize("page", having("yaml"))
def test_studies_are_studies(page, home):
    write_files(page, home)
    for text in blocks(page, "yaml"):
        (home / "study.yaml").write_text(text)
        if "sweep" in yaml.safe_load(text):
            assert load_sweep("study.yaml", []).seeds
            continue
        study = load_study("study.yaml")
        recipes_from_entries(study.method)
        if study.task.data == "digits" and not (study.fleet.trace or study.fleet.capacity):
            assert start_run(load_study("study.yaml", tiny(study))).rounds == 1


def tiny(study: Study) -> list[str]:
    sized = any("fedhm" in entry or "heterofl" in entry for entry in study.method)
    summed = ["sample=4"] if study.secure else []
    return [item for item in TINY if not (sized and "model" in item)] + summed


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two small runs that are over."""
    folder = tmp_path_factory.mktemp("finished")
    for method in ("fedavg", "topk"):
        task = {"data": "digits", "clients": 4, "model": "mlp"}
        run(task, method, rounds=2, sample=2, plan={"threads": 1}, out=folder / f"digits-{method}-0")
    return folder


@pytest.mark.parametrize("page", having("console"))
def test_commands_run(page, home, finished, monkeypatch):
    """`check` measures here, but for one page: a process of its own needs seconds to start."""
    if page.stem != "own":
        monkeypatch.setattr("sparing.runs.cost.check_study", run_cost_trial)
    shutil.copytree(finished, home / "runs")
    (home / "configs").symlink_to(ROOT / "configs")
    write_files(page, home)
    sweeps = [text for text in blocks(page, "yaml") if "sweep:" in text or "my_file.py" in text]
    (home / "study.yaml").write_text(sweeps[0] if sweeps else "task: {data: digits}\n")
    lines = [line[2:] for block in blocks(page, "console") for line in block.splitlines() if line.startswith("$ ")]
    for line in lines:
        for command in line.split(" && "):
            try_command(shlex.split(command, comments=True))


def try_command(words: list[str]) -> None:
    """Run it, smaller; or check as much of it as can be checked here."""
    line = " ".join(words)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file(), line
    elif words[0] == "torchrun":
        assert words[-1] == "my_script.py" or words[words.index("-m") + 2] in ("run", "resume", "sweep"), line
    elif words[0] != "sparing":
        assert line.startswith(CHANGES_THE_MACHINE), line
    elif words[1] == "pfllib" and "digits" not in words:
        study_from_flags(words[2:])
    elif words[1] == "run" and (data := downloaded(words)):
        assert recipes_from_entries(load_study(None, words[2:]).method), data
    else:
        result = CliRunner().invoke(app, smaller(words[1:]))
        assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception}"


def downloaded(words: list[str]) -> str | None:
    here = ("task.data=digits", "task.data=my_file.py:load")
    return next((word for word in words if word.startswith("task.data=") and word not in here), None)


def smaller(words: list[str]) -> list[str]:
    if ">" in words:
        words = words[: words.index(">")]
    if "--track" in words:
        assert {name for flag, name in pairwise(words) if flag == "--track"} <= TRACKERS.keys()
        words = words[: words.index("--track")]
    if words[0] == "demo":
        return [*words, "--rounds", "1"]
    if words[0] == "pfllib":
        return [*words, "-gr", "2", "-nc", "4", "task.model=mlp"]
    if words[0] == "sweep":
        shown = {word.split("=")[0] for word in words}
        return [*words, *TINY, *(item for item in ONE_TRIAL if item.split("=")[0] not in shown)]
    own = Path("study.yaml").is_file() and "my_file.py" in Path("study.yaml").read_text()
    tiny = [item for item in TINY if not (own and item.startswith("task."))]
    tiny += ["sample=4"] if any(word.startswith("secure") for word in words) else []
    return [*words, *tiny] if words[0] in ("run", "check", "bench") else words


def test_the_study_shown_is_the_one_in_configs(tmp_path):
    for name in ("README.md", "docs/start.md"):
        (tmp_path / "study.yaml").write_text(blocks(ROOT / name, "yaml")[0])
        assert load_study(tmp_path / "study.yaml") == load_study(ROOT / "configs" / "digits.yaml")


def test_only_methods_that_there_are_are_named():
    for name in ("README.md", "docs/concepts.md"):
        text = (ROOT / name).read_text()
        rows = [line for line in text.splitlines() if line.startswith("| ")]
        named = {word for row in rows for word in re.findall(r"`([a-z0-9-]+)`", row.split("|", 2)[2])}
        assert len(named) > 10
        assert named <= known_recipes().keys()


REFUSED = {
    "unknown method": "run method=topkk",
    "unknown key": "run local.epoch=3",
    "sample is": "run sample=1.5",
    "'int8' cannot": "run method=randk+tight+int8",
    "'stein' needs": "run method=stein+median",
    "mnist is not": "run task.data=mnist",
    "device is": "run device=cuda",
    "budget says": "explain budget",
    "nothing holds": "compare nothing",
    "5000 clients": "run task.clients=5000",
}


def test_errors_say_what_troubleshooting_says(home, monkeypatch):
    monkeypatch.setenv("SPARING_DATA", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    shown = re.findall(r"^\| `(.*?)` \|", text[text.index("## What it refuses") :], re.MULTILINE)
    assert len(shown) == len(REFUSED)
    for sentence in shown:
        command = next(command for start, command in REFUSED.items() if sentence.startswith(start))
        result = CliRunner().invoke(app, command.split(" "))
        assert result.exit_code == 2
        assert sentence.removesuffix(" ...") in result.output


def test_a_loss_that_is_nan_is_told_as_troubleshooting_says(home):
    result = CliRunner().invoke(app, ["run", "local.lr=1e25", "rounds=3"])
    sentence = re.search(r"`(the training loss became nan).*?`", (ROOT / "docs" / "troubleshooting.md").read_text())
    assert result.exit_code == 2
    assert sentence
    assert sentence[1] in result.output


def test_the_tables_of_the_design_are_up_to_date():
    made = runpy.run_path(str(ROOT / "docs" / "design_tables.py"))
    assert made["PAGE"].read_text() == made["page"](made["PAGE"].read_text()), "run: python docs/design_tables.py"


def test_the_reference_is_up_to_date():
    for name, made in runpy.run_path(str(REFERENCE / "write.py"))["PAGES"].items():
        assert (REFERENCE / name).read_text() == made(), f"{name} is old; run: python docs/reference/write.py"


def test_links_lead_somewhere():
    count = 0
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
            if not target.startswith("http"):
                path, _, anchor = target.partition("#")
                there = (page.parent / path).resolve() if path else page
                assert there.is_file(), f"{page.name}: {target}"
                assert not anchor or anchor in headings(there), f"{page.name}: {target}"
                count += 1
    assert count > 50


def headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_page_is_in_the_list_of_pages():
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in PAGES[2:]}
