"""What the README, CONTRIBUTING, configs/ and examples/ show, really runs."""

import re
import runpy
from pathlib import Path

import pytest

from sparing.core.registry import REGISTRY, known
from sparing.run.config import load_study
from sparing.run.methods import recipes

ROOT = Path(__file__).parents[2]


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def test_the_readme_example_runs(capsys):
    (code,) = blocks("README.md", "python")
    exec(code, {})
    accuracy, up, _ = capsys.readouterr().out.split()
    assert float(accuracy) > 0.4
    assert int(up) > 0


def test_the_readme_study_is_the_one_in_configs(tmp_path):
    (study,) = blocks("README.md", "yaml")
    (tmp_path / "study.yaml").write_text(study)
    assert load_study(tmp_path / "study.yaml") == load_study(ROOT / "configs" / "digits.yaml")


def test_the_readme_names_only_methods_there_are():
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| what it decides") : text.index("Shares intersect")]
    assert set(re.findall(r"`(\w+)`", table)) <= set(known())


def test_the_part_in_contributing_works_and_its_tests_pass():
    known()
    part, tests = blocks("CONTRIBUTING.md", "python")
    try:
        exec(part, {"__name__": "above"})
        space: dict = {}
        exec(tests, space)
        ran = [function() for name, function in space.items() if name.startswith("test_")]
        assert len(ran) == 2
    finally:
        REGISTRY.pop("above", None)


def test_the_example_runs(capsys):
    runpy.run_path(str(ROOT / "examples" / "own_task.py"), run_name="__main__")
    fedavg, sparse = capsys.readouterr().out.splitlines()
    assert fedavg.startswith("fedavg")
    assert "kB up" in sparse


PAGES = sorted(p.relative_to(ROOT) for name in ("methods", "kin") for p in (ROOT / "docs" / name).glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_methods_page_shows_runs(page, tmp_path, capsys):
    shown = blocks(str(page), "python") + blocks(str(page), "yaml")
    assert shown, "a page has an example"
    for code in blocks(str(page), "python"):
        exec(code, {})
    for number, study in enumerate(blocks(str(page), "yaml")):
        (tmp_path / f"{number}.yaml").write_text(study)
        recipes(load_study(tmp_path / f"{number}.yaml").method)
