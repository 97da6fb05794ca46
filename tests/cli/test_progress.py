"""What is shown while a run goes on."""

import io
import math
from dataclasses import replace

from rich.console import Console

from sparing.cli.progress import RunProgress, _sparkline, log_plain_lines, watch_progress
from sparing.runs.results import ROUND_COLUMNS, Record

NOTHING = Record(**dict.fromkeys(ROUND_COLUMNS, math.nan))  # pyright: ignore


def record(t, accuracy=math.nan, seconds=0.0, worst=math.nan):
    about = {"accuracy": accuracy, "worst_decile": worst, "up_bytes": 1_000_000, "down_bytes": 2_500_000}
    return replace(NOTHING, round=t, seconds=seconds or 0.5 * t, **about)


def drawn(progress, **how):
    console = Console(file=io.StringIO(), width=80, **how)
    console.print(progress)
    return console.file.getvalue()


def test_everything_is_there():
    progress = RunProgress("topk", 10)
    for t, accuracy in enumerate((0.1, 0.5, 0.9), 1):
        progress(record(t, accuracy, worst=accuracy / 2))
    text = drawn(progress)
    for word in ("topk", "3/10", "2.0 rounds/s", "0:04 left", "accuracy 90.0 %", "worst decile 45.0 %"):
        assert word in text
    assert "up 3.00 MB  down 7.50 MB" in text
    assert "▁▅█" in text
    assert len(text.splitlines()) == 2


def test_a_round_that_was_not_evaluated_keeps_the_last_numbers():
    progress = RunProgress("topk", 10)
    progress(record(1, 0.5, worst=0.25))
    progress(record(2))
    assert "accuracy 50.0 %  worst decile 25.0 %" in str(progress)
    assert progress.course == [0.5]


def test_another_metric_takes_the_place_of_accuracy():
    progress = RunProgress("topk", 10, metrics=["MSE", "mae"])
    for t, error in enumerate((2.0, 1.0, 0.0123), 1):
        progress(replace(record(t), metrics={"mse": error, "mae": 7.0}))
    progress(record(4))
    assert "mse 0.0123  up 4.00 MB" in drawn(progress)
    assert "█▄▁" in drawn(progress)
    assert "accuracy" not in str(progress)
    values = RunProgress("topk", 10)
    values(replace(record(1), loss=0.5))
    assert "loss 0.5  up" in str(values), "as tasks of values are ranked where nothing is asked for"


def test_pace_is_of_this_process_alone():
    progress = RunProgress("topk", 10, [record(1, 0.1, 100.0), record(2, 0.2, 200.0)])
    assert progress.pace == ""
    assert "up 2.00 MB" in str(progress), "the bytes are of the whole run"
    progress(record(3, 0.3, 201.0))
    assert progress.pace == "1.0 rounds/s  0:07 left"
    progress(record(4, 0.3, 210.0))
    assert progress.pace == "5.0 s/round  0:30 left"


def test_before_the_first_round_there_is_nothing_to_show_but_the_name():
    assert "topk" in drawn(RunProgress("topk", 10))
    assert "accuracy -" in drawn(RunProgress("topk", 10))


def test_it_stays_within_two_lines_of_a_terminal():
    progress = RunProgress("psfed+topk+int8+memory", 1000)
    for t in range(1, 200):
        progress(record(t, t / 200, 7.0 * t, 0.1))
    assert all(len(line) <= 80 for line in drawn(progress).splitlines())
    assert len(drawn(progress).splitlines()) == 2


def test_a_terminal_without_unicode_gets_no_sparkline():
    progress = RunProgress("topk", 10)
    progress(record(1, 0.5))
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=80)
    with console.capture() as capture:
        console.print(progress)
    assert capture.get().isascii()


def test_a_flat_line_is_flat():
    assert _sparkline([0.5] * 4) == "▁▁▁▁"
    assert _sparkline([0.5, 0.501, 0.502]) == "▁▁▁"
    assert _sparkline([3, 2, 1, 0]) == "█▆▃▁"


def test_plain_lines_come_ten_times(capsys):
    log = log_plain_lines(RunProgress("topk", 100))
    for t in range(1, 101):
        log(record(t, t / 100))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == [f"{t}/100" for t in range(10, 101, 10)]


def test_a_terminal_is_left_clean():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    progress = RunProgress("topk", 2)
    with watch_progress(progress, console) as log:
        assert log is progress
        log(record(1, 0.5))
    assert "\x1b[2K" in console.file.getvalue(), "what was drawn is wiped in the end"
