"""`sparing sweep` and `sparing bench`: many runs, and how fast one is."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from sparing.cli.commands.shared import AsJson, StudyItems, Trust, print_json
from sparing.cli.interrupt import INTERRUPT
from sparing.cli.rank_processes import meeting_for_sweep
from sparing.core.errors import ConfigError


def sweep_command(
    items: StudyItems = None,
    out: Annotated[Path | None, typer.Option(help="Sweep folder. [default: sweeps/STUDY]")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs in parallel. [default: cores; 1 on a GPU]")] = None,
    final: Annotated[
        bool, typer.Option("--final", help="Then train the best trial and evaluate it on test samples.")
    ] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Search hyperparameters, judged on validation samples; call it again to continue.

    The study's sweep section lists the values to try: as a grid, or proposed by Optuna.

    \b
    sparing sweep study.yaml 'sweep.local.lr=[0.01, 0.1]' task.validation=0.2
    sparing sweep study.yaml --jobs 4 --final
    sparing sweep study.yaml sweep.trials=60 --json
    """
    from sparing.cli.study_files import admit_code, split_items
    from sparing.sweeps.spec import load_sweep, trial_study

    path, overrides = split_items(items or [])
    if path is None:
        raise ConfigError("a sweep needs a study file; write one with `sparing new first`")
    plan = load_sweep(path, overrides)
    admit_code(trial_study(plan, {}, plan.seeds[0]), trust, overrides)
    if (ranks := meeting_for_sweep(jobs)) is not None and ranks.place.rank:
        from sparing.sweeps.rank_workers import work_for_first

        work_for_first(ranks)
        return
    from rich.console import Console

    from sparing.cli import sweep_view as shown
    from sparing.sweeps.execute import run_sweep, train_winner
    from sparing.sweeps.processes import default_jobs
    from sparing.sweeps.rank_workers import dismiss_workers, run_on_ranks

    folder = out or Path("sweeps") / Path(path).stem
    at_once = jobs or default_jobs([trial_study(plan, {}, plan.seeds[0])])
    run_all = run_on_ranks(ranks) if ranks else None
    console, winner = Console(), None
    said = {"--out": out, "--jobs": jobs}
    words = [word for name, value in said.items() if value is not None for word in (name, str(value))]
    words = ["sparing", "sweep", *(items or []), *words, *(["--final"] if final else [])]
    advice = f"finished work is kept, continue with: {shlex.join(words)}"
    with INTERRUPT.advising(lambda: advice), shown.watch_sweep(console, as_json) as tell:
        trials = run_sweep(plan, folder, at_once, tell, run_all)
        if final:
            winner = train_winner(plan, folder, trials, at_once, tell, run_all)
    if ranks:
        dismiss_workers(ranks)
    if as_json:
        print_json(shown.sweep_json(plan, trials, winner, str(folder)))
    else:
        shown.print_sweep(plan, trials, winner, console)
        console.print(f"The runs are in {folder}", highlight=False, markup=False, soft_wrap=True)


def bench_command(
    items: StudyItems = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to time, after one warm-up round.")] = 5,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Time a few rounds of a study on this machine, and of FedAvg on the same task.

    \b
    sparing bench study.yaml
    sparing bench method=psfed+topk+int8 task.model=resnet18 --rounds 3
    """
    from sparing.cli.study_files import study_from_items

    study = study_from_items(items, trust, without_sweep=True)
    from rich.console import Console

    from sparing.cli.speed_table import show_speeds
    from sparing.runs.speed import measure_speed
    from sparing.runs.study import PersonalizationSection

    plain = study.model_copy(update={"method": ["fedavg"], "personalization": PersonalizationSection()})
    speeds = [measure_speed(one, rounds) for one in ([plain] if study.method == ["fedavg"] else [plain, study])]
    if as_json:
        print_json([{**speed._asdict(), "clients_per_second": speed.clients_per_second} for speed in speeds])
    else:
        show_speeds(speeds, Console())
