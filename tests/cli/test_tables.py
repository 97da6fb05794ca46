"""`sparing compare` as it is printed: for a terminal, a spreadsheet, a page, a paper, a program."""

import csv
import io
import json
import math
import re
from pathlib import Path

import h5py
import pytest
from typer.testing import CliRunner

from made import made_run
from sparing.cli.app import app

CURVES = {"fedavg": [[0.5, 0.8], [0.6, 0.9]], "topk": [[0.4, 0.7], [0.5, 0.81]]}


def call(*args: object):
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, [str(arg) for arg in args])


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for method, seeds in CURVES.items():
        for seed, curve in enumerate(seeds):
            more = {"up_bytes": [10**6] * 2 if method == "fedavg" else [2 * 10**5] * 2, "loss": [1.0, 0.5]}
            made_run(tmp_path / f"{method}{seed}", curve, method, seed, columns=more | {"train_loss": [1.0, 0.4]})
    return tmp_path


def test_a_terminal_of_eighty_columns(runs):
    text = call("compare", runs, "--target", 0.75).stdout
    assert max(map(len, text.splitlines())) <= 80
    rows = [line for line in text.splitlines() if line.startswith("topk")]
    assert [re.sub(" +", " ", row).strip() for row in rows] == [
        "topk 2 75.50 ± 7.78 75.50 ± 7.78",
        "topk -9.50 [-15.85, -3.15]",
        "topk 2 0.4 0.0002 5.00x 1.00x",
        "topk 1 of 2 seeds 1 of 2 seeds",
        "topk 0.500 ± 0.000 0.500 ± 0.000 2.0 ± 0.0 7.42 (+5%)",
    ]
    first = next(line for line in text.splitlines() if line.startswith("fedavg"))
    assert first.split("±")[1].split()[1:4] == ["baseline", "best", "*"]
    for title in ("Accuracy on digits (%)",
                  "Accuracy difference vs fedavg (percentage points) [95 % confidence interval]",
                  "Bytes sent, and upload compression vs fedavg (wire / values only)", "Cost to reach 75 % accuracy",
                  "Convergence and stability; std in percentage points (change vs fedavg)"):  # fmt: skip
        assert title in text


LONG = [{"psfed": {"fraction": 0.3, "selector": "gradient"}}, {"topk": {"ratio": 0.25, "mode": "quantile"}}]


def test_no_name_breaks_and_numbers_stay_whole(runs):
    middle = [{"topk": {"ratio": 0.25}}, "int8", "memory"]
    for seed in (0, 1):
        last = {"personal_accuracy": 0.61 + seed / 5, "worst_decile": 0.2 + seed / 2, "loss": 0.5 + seed}
        more = {name: [0.3, value] for name, value in last.items()}
        made_run(runs / f"middle{seed}", [0.3, 0.9 - seed / 2], middle, seed, columns=more)
    text = call("compare", runs, "--warmup", 0).stdout
    assert max(len(line) for line in text.splitlines() if not line.startswith("note: ")) <= 80
    rows = [line for line in text.splitlines() if line.startswith("topk+int8+memory")]
    assert len(rows) > 4, "tables that are too wide became several"
    assert all(row.startswith("topk+int8+memory (topk.ratio=0.25) ") for row in rows)
    for number in ("65.00 ± 35.36", "71.00 ± 14.14", "45.00 ± 35.36", "75.50 ± 7.78"):
        assert number in text


def test_a_name_as_wide_as_the_terminal_becomes_a_number(runs):
    for seed in (0, 1):
        made_run(runs / f"long{seed}", [0.3, 0.4], LONG, seed)
    text = call("compare", runs).stdout
    assert (
        "\n3: psfed+topk (psfed.fraction=0.3, psfed.selector=gradient, topk.ratio=0.25, topk.mode=quantile)\n" in text
    )
    tables = text[text.index("Accuracy on") :]
    assert max(len(line) for line in tables.splitlines()) <= 80
    assert len([line for line in tables.splitlines() if re.match(r"3 +", line)]) == 4


def test_several_tasks_have_a_column_and_are_ranked_apart(runs):
    for seed in (0, 1):
        made_run(runs / f"other{seed}", [0.1, 0.2], "topk", seed, study={"task": {"data": "mnist"}})
    text = call("compare", runs).stdout
    rows = [re.sub(" +", " ", line).split(" ± ")[0] for line in text.splitlines() if line.startswith("topk")]
    assert rows[:2] == ["topk digits 2 75.50", "topk mnist 2 20.00"]
    assert "\\multicolumn" in call("compare", runs, "--latex").stdout


def test_csv_has_four_decimals(runs):
    rows = list(csv.DictReader(io.StringIO(call("compare", runs, "--csv").stdout)))
    assert [row["method"] for row in rows] == ["fedavg", "topk"]
    topk = rows[1]
    assert {"final_accuracy", "best_accuracy", "final_loss", "best_loss", "convergence_round"} <= set(topk)
    assert topk["final_accuracy"] == "0.7550"
    assert topk["final_accuracy_std"] == "0.0778"
    assert topk["final_train_loss"] == "0.4000"
    assert topk["convergence_round"] == "2.0000"
    assert topk["compression"] == "5.0000"
    assert topk["personal_accuracy"] == "", "not measured"
    assert rows[0]["final_accuracy_gap"] == ""
    for name, cell in topk.items():
        assert name in ("method", "task", "seeds", "rounds") or re.fullmatch(r"-?\d+\.\d{4}|", cell), (name, cell)


def test_markdown_holds_the_same_rows(runs):
    made_run(runs / "odd", [0.5, 0.6], [{"topk": {"memory": True}}])
    page = call("compare", runs, "--markdown").stdout
    assert "| topk | 2 | 75.50 ± 7.78 |" in page
    assert "| topk (memory=true) | 1 | 60.00 |" in page
    heads = [line.count("|") for line in page.splitlines() if line.startswith("|")]
    assert len(set(heads[:5])) == 1
    assert "- seeds differ" in page
    assert "- best: the highest mean accuracy." in page


def test_latex_is_one_table_for_a_paper(runs):
    made_run(runs / "odd", [0.5, 0.6], [{"topk": {"memory": True}}])
    paper = call("compare", runs, "--latex").stdout
    assert r"topk & 75.50 $\pm$ 7.78 & $-$9.50 [$-$15.85, $-$3.15] & 0.4 & 0.0002 & 5.0$\times$ \\" in paper
    assert r"fedavg & \textbf{85.00} $\pm$ 7.07 & -- & 2.00 & 0.0002 & 1.0$\times$ \\" in paper
    for word in (
        r"\begin{table}",
        r"\begin{tabular}",
        r"\toprule",
        r"\midrule",
        r"\bottomrule",
        r"\caption{",
        r"\label{tab:digits}",
    ):
        assert paper.count(word) == 1
    assert r"mean $\pm$ standard deviation ($n-1$) over 1 or 2 seeds" in paper
    rows = [line for line in paper.splitlines() if line.endswith(r"\\")]
    assert len({line.count("&") for line in rows}) == 1
    for line in paper.splitlines():
        assert line.startswith("%") or not re.search(r"(?<!\\)[%_#]", line)
        assert line.startswith("%") or not re.search(r"(?<![$\w])-\d", line), "a minus is a minus"


def test_json_is_what_a_program_reads(runs):
    found = json.loads(call("compare", runs, "--json", "--target", 0.75).stdout)
    row = found["rows"][1]
    assert (found["baseline"], found["target"], found["notes"]) == ("fedavg", 0.75, [])
    assert row["stats"]["final_accuracy"] == {
        "mean": pytest.approx(0.755),
        "std": pytest.approx(0.0778, abs=1e-4),
        "seeds": 2,
    }
    assert row["stats"]["rounds_to_target"] == {"mean": None, "std": None, "seeds": 1}
    assert row["gaps"]["final_accuracy"]["mean"] == pytest.approx(-0.095)
    assert "NaN" not in json.dumps(found)


def test_notes_stand_under_the_tables(runs):
    made_run(runs / "psfed9", [0.5, 0.6, 0.7], "psfed", 9)
    text = call("compare", runs).stdout
    assert "note: seeds differ (fedavg: 0, 1; topk: 0, 1; psfed: 9)" in text
    assert "note: runs have different numbers of rounds (fedavg: 2; psfed: 3; topk: 2)" in text


def test_notes_go_to_stderr_where_the_table_is_csv(runs):
    made_run(runs / "psfed9", [0.5, 0.6, 0.7], "psfed", 9)
    result = call("compare", runs, "--csv", "--target", 0.99)
    assert len(list(csv.DictReader(io.StringIO(result.stdout)))) == result.stdout.count("\n") - 1 == 3
    said = [line.split(" (")[0] for line in result.stderr.splitlines()]
    assert said[:2] == ["sparing: note: runs have different numbers of rounds", "sparing: note: seeds differ"]
    assert said[-1] == "sparing: note: no run reaches 99 % accuracy; the highest is 90.00 %"
    for form, mark in (("--markdown", "- "), ("--latex", "% ")):
        result = call("compare", runs, form)
        assert f"\n{mark}seeds differ" in result.stdout
        assert result.stderr == ""


def test_a_target_that_nobody_reaches_keeps_its_table(runs):
    text = call("compare", runs, "--target", 0.99).stdout
    table = text[text.index("Cost to reach 99 % accuracy") :].splitlines()
    assert table[3].split() == ["fedavg", *["0", "of", "2", "seeds"] * 2]
    assert "Cost to reach" not in call("compare", runs).stdout


def test_one_seed_has_no_confidence_in_its_heading(runs):
    text = call("compare", runs / "fedavg0", runs / "topk0").stdout
    assert "Accuracy difference vs fedavg (percentage points)\n" in text
    assert "note: one seed is one draw" in text
    assert (
        "Accuracy difference vs fedavg (percentage points) [95 % confidence interval]\n" in call("compare", runs).stdout
    )


def test_bad_input_is_refused_in_one_line(runs):
    made_run(runs / "cut", [0.5], "psfed", study={"rounds": 2}, finished=False)
    for args, word in [
        (["nowhere"], "holds no run"),
        ([runs / "cut"], "--allow-incomplete"),
        ([runs / "topk0", "--csv", "--json"], "choose one"),
        ([runs / "topk0", "--baseline", "x"], "none of these"),
    ]:
        result = call("compare", *args)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1
        assert word in result.stderr
    assert "cut (psfed) is not finished: 1 of 2 rounds, so it is left out" in call("compare", runs).stdout
    assert "all of them are compared after round 1" in call("compare", runs, "--allow-incomplete").stdout


def test_h5_files_of_what_is_compared(runs):
    result = call("compare", runs, "--h5", "results", "--goal", "mine")
    assert result.exit_code == 0
    names = sorted(path.name for path in Path("results").iterdir())
    assert names == [f"digits_{m}_mine_{r}.h5" for m in ("fedavg", "topk") for r in (0, 1, "all")]
    told = [f"wrote results/{name}" for name in names]
    assert result.stdout.splitlines()[-6:] == told
    result = call("compare", runs, "--h5", "results", "--goal", "mine", "--csv")
    assert (result.stdout.count("\n"), result.stderr.splitlines()) == (3, told)
    result = call("compare", runs, "--h5", "results", "--goal", "mine", "--json")
    assert json.loads(result.stdout)["files"] == [f"results/{name}" for name in names]
    with h5py.File("results/digits_topk_mine_all.h5") as file:
        assert file["test_acc"][()].tolist() == CURVES["topk"]
        assert math.isclose(file["train_loss_mean"][1], 0.4)
