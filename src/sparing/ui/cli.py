"""The command line: `sparing run`, `resume`, `check`, `explain`, `methods`, `wire`, `data`, `demo`.

A mistake of the user's ends in one line on stderr and exit code 2; Ctrl-C says how to go on; a bug shows its traceback.
"""

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import sparing
from sparing.core.errors import ConfigError, SparingError
from sparing.core.registry import known
from sparing.run.check import check as measure
from sparing.run.config import load_study
from sparing.run.explain import explain as explain_method
from sparing.run.loop import Logger
from sparing.run.parcels import load as load_parcel
from sparing.run.results import Result
from sparing.run.start import resume as continue_run
from sparing.run.start import start
from sparing.ui import demo as demonstration
from sparing.ui.explain import print_explanation
from sparing.ui.folders import earlier_rounds, free_folder, split_items, study_of, where_it_stands
from sparing.ui.live import Progress, watching
from sparing.ui.tasks import list_data, show_cost, show_split
from sparing.ui.text import method_name, options, print_methods, print_result
from sparing.ui.wire import described
from sparing.ui.wire import show as show_parcel


class Polite(TyperGroup):
    """Turns what the library refuses into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SparingError as error:
            complain(" ".join(str(error).splitlines()))
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            complain("stopped")
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Polite,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sparing {sparing.__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Federated learning that sends only what matters.

    \b
    sparing demo                                 see what sending less costs, in under a minute
    sparing methods                              what there is to combine
    sparing explain psfed+int8                   what a combination sends, keeps and costs
    sparing data digits split.dirichlet=0.1      who holds what
    sparing check rounds=30                      what a study will cost
    sparing run method=psfed+int8 rounds=30      train
    """


@app.command()
def run(
    items: Annotated[
        list[str] | None, typer.Argument(metavar="STUDY.yaml|key=value", help="A study file, and changes to it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. [default: runs/TASK-METHOD-SEED]")] = None,
    as_json: AsJson = False,
) -> None:
    """Train, and write a run folder.

    \b
    sparing run                                  every key has a default
    sparing run study.yaml rounds=50 local.lr=0.1 --out runs/first
    sparing run 'method=[psfed, {topk: {ratio: 0.05}}, int8]' sample=5
    """
    path, overrides = split_items(items or [])
    study = load_study(path, overrides)
    folder = out or free_folder(study)
    progress = Progress(method_name(study.method), study.rounds)
    finish(folder, progress, as_json, lambda loggers: start(study, out=folder, loggers=loggers))


@app.command()
def resume(folder: Annotated[Path, typer.Argument(help="A run folder.")], as_json: AsJson = False) -> None:
    """Continue the run in a folder from its last checkpoint.

    \b
    sparing resume runs/digits-fedavg-0
    """
    study = study_of(folder)
    progress = Progress(method_name(study.method), study.rounds, earlier_rounds(folder))
    finish(folder, progress, as_json, lambda loggers: continue_run(folder, loggers=loggers))


@app.command()
def methods(as_json: AsJson = False) -> None:
    """List every method: what it does, its options, its paper."""
    entries = list(known().values())
    if as_json:
        print_json([{"name": e.name, "about": e.about, "options": options(e), "paper": e.paper} for e in entries])
    else:
        print_methods(entries, Console())


@app.command()
def explain(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="As in a study: psfed+int8, or a YAML list.")],
    model: Annotated[str, typer.Option(help="A network, as in a study's task.model.")] = "cnn",
    shape: Annotated[str, typer.Option(help="Of one sample.")] = "3x32x32",
    classes: Annotated[int, typer.Option(min=1, help="Classes, or words of the vocabulary.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Say what a method sends, keeps and remembers, and what it costs, before anything runs.

    \b
    sparing explain psfed+int8
    sparing explain fedhm --model resnet34 --classes 100
    sparing explain '[{psfed: {fraction: 0.1}}]' --model resnet50 --shape 3x224x224 --classes 1000 --json
    """
    study = load_study(None, [f"method={method}", f"task.model={model}"])
    assert study.task.model is not None
    found = explain_method(study.method, study.task.model, shape_of(shape), classes)
    if as_json:
        sizes = [size._replace(down=size.down._asdict(), up=size.up._asdict())._asdict() for size in found.sizes]
        print_json({**found._asdict(), "sizes": sizes})
    else:
        print_explanation(found, Console())


def shape_of(text: str) -> tuple[int, ...]:
    sides = text.lower().replace(",", "x").split("x")
    if not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise ConfigError(f"--shape is {text!r}; write it as 3x32x32")
    return tuple(int(side) for side in sides)


@app.command()
def wire(
    file: Annotated[Path, typer.Argument(help="A parcel, as a run with plan.parcels=kept keeps them.")],
    as_json: AsJson = False,
) -> None:
    """Show what a parcel holds, tensor by tensor: how much is sent, as what, in how many bytes.

    sparing run engine=debug plan.parcels=kept method=topk+int8+tight rounds=2 keeps every parcel of the run, and
    sparing wire RUN/parcels/round-0001/client-00003-up.spar looks into one.
    """
    said = described(*load_parcel(file))
    if as_json:
        print_json(said)
    else:
        show_parcel(said, Console())


@app.command()
def data(
    name: Annotated[str | None, typer.Argument(help="A dataset; without it, all of them are listed.")] = None,
    items: Annotated[
        list[str] | None, typer.Argument(metavar="split=LAW clients=N ...", help="As in a study's task section.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the split.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The picture. [default: NAME-SPLIT.png]")] = None,
) -> None:
    """Say what a dataset is and draw who holds what.

    \b
    sparing data                                 what there is
    sparing data digits split.dirichlet=0.1 clients=10
    sparing data cifar100 split=superclass
    """
    if name is None:
        list_data(Console())
        return
    task = load_study(None, [f"task.data={name}", *(f"task.{item}" for item in items or [])]).task
    law = task.split if isinstance(task.split, str) else next(iter(task.split or {}), "iid")
    picture = out or Path(f"{name.replace(':', '-').replace('/', '-')}-{law}.png")
    show_split(task, seed, picture, Console())


@app.command()
def check(
    items: Annotated[
        list[str] | None, typer.Argument(metavar="STUDY.yaml|key=value", help="A study file, and changes to it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Validate a study, and say what it will cost before anything runs.

    \b
    sparing check study.yaml sample=100
    """
    path, overrides = split_items(items or [])
    study = load_study(path, overrides)
    cost = measure(study)
    if as_json:
        print_json(cost._asdict())
    else:
        show_cost(cost, study.rounds, -(-study.rounds // study.evaluate.every), Console())


@app.command()
def demo(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each method.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Of the split, the model and every draw.")] = 0,
    as_json: AsJson = False,
) -> None:
    """FedAvg against seven ways to send less, on handwritten digits."""
    if as_json:
        print_json(demonstration.as_json(demonstration.silent(rounds, seed)))
        return
    console = Console()
    demonstration.demo(rounds, seed, console)
    demonstration.print_footer(rounds, console)


def finish(folder: Path, progress: Progress, as_json: bool, go: Callable[[Sequence[Logger]], Result]) -> None:
    """Run to the end under the eyes of the user, then say what came of it."""
    console = Console()
    try:
        if as_json:
            result = go(())
        else:
            with watching(progress, console) as logger:
                result = go((logger,))
    except KeyboardInterrupt:
        complain(f"stopped; {where_it_stands(folder, progress.rounds)}")
        raise typer.Exit(130) from None
    if as_json:
        print_json({**result.summary, "folder": str(folder)})
    else:
        print_result(result, str(folder), console)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def complain(text: str) -> None:
    typer.echo(f"sparing: {text}", err=True)


def warn(message: Warning | str, category: type[Warning], filename: str, *rest: Any) -> None:
    """What the library warns of, in its own voice; other people's warnings as Python shows them."""
    if Path(filename).is_relative_to(Path(sparing.__file__).parent):
        complain(f"note: {message}")
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, rest[0]))


def main() -> None:
    warnings.showwarning = warn
    app()
