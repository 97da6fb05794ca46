"""The runs that PFLlib's flags came to, and their H5 result files."""

from pathlib import Path

import typer
import yaml
from rich.console import Console

from sparing.cli.commands.shared import complain, print_json
from sparing.cli.pfllib_flags import PfllibStudy
from sparing.cli.study_files import admit_code
from sparing.cli.watched_runs import begin_run, take_up_run, watch_run
from sparing.cli.wording import print_result
from sparing.reports.h5_files import write_h5
from sparing.reports.run_folders import holds_study

_RESULTS_FOLDER = Path("results")


def run_pfllib(said: PfllibStudy) -> None:
    """Say what the study is, run it as often as was asked, and write what came of it."""
    if not said.as_json:
        plain = said.study.model_dump(exclude_unset=True)
        typer.echo(f"{said.algorithm} on {said.dataset}, as a study:\n\n{yaml.safe_dump(plain, sort_keys=False)}")
        for note in said.notes:
            complain(f"note: {note}")
    admit_code(said.study, False)
    results, names = [], (said.dataset, said.algorithm, said.goal)
    paths: list[Path] = []
    for i in range(said.times):
        folder, study = said.folder(i), said.of_run(i)
        there = holds_study(study, folder, "name this one differently with -go")
        if not (said.as_json or Console().is_terminal):
            typer.echo(
                f"run {i + 1} of {said.times}: {study.rounds} rounds, to {folder}; a line follows every tenth of them"
            )
        going = take_up_run(folder) if there else begin_run(study, folder)
        results.append(watch_run(going, said.as_json))
        if not said.as_json:
            print_result(results[-1], str(folder), Console())
        paths.append(write_h5(_RESULTS_FOLDER, *names, i, [results[-1].table]))
    paths.append(write_h5(_RESULTS_FOLDER, *names, "all", [result.table for result in results]))
    if said.as_json:
        runs = [{**result.summary, "folder": str(said.folder(i))} for i, result in enumerate(results)]
        print_json({"study": said.study.model_dump(), "runs": runs, "files": [str(path) for path in paths]})
    else:
        for path in paths:
            typer.echo(f"wrote {path}")
