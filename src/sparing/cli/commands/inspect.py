"""`sparing methods`, `explain`, `data`, `check`, `wire`: what tells, and trains nothing."""

from pathlib import Path
from typing import Annotated

import typer

from sparing.cli import completion
from sparing.cli.commands.shared import AsJson, StudyItems, Trust, parse_shape, print_json
from sparing.core.errors import ConfigError


def methods_command(as_json: AsJson = False) -> None:
    """List all methods: what each does, its options and its paper."""
    from rich.console import Console

    from sparing.cli.wording import print_methods
    from sparing.runs.known_names import known_names

    names = known_names()
    if as_json:
        print_json([one._asdict() for one in names.methods.values()])
    else:
        print_methods(names, Console())


def explain_command(
    method: Annotated[
        str,
        typer.Argument(
            metavar="METHOD",
            help="A method, as in a study: psfed+int8, or a YAML list.",
            autocompletion=completion.complete_methods,
        ),
    ],
    model: Annotated[str, typer.Option(help="A model, as in a study's task.model.")] = "cnn",
    shape: Annotated[str, typer.Option(help="Shape of one sample.")] = "3x32x32",
    classes: Annotated[int, typer.Option(min=1, help="Number of classes, or vocabulary size.")] = 10,
    secure: Annotated[bool, typer.Option("--secure", help="With secure aggregation, and its price.")] = False,
    sample: Annotated[int, typer.Option(min=1, help="Clients a round, for --secure.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Show what a method uploads, downloads, stores and costs, before anything runs.

    \b
    sparing explain psfed+int8
    sparing explain '[{int8: {common: true}}]' --secure --sample 50
    sparing explain fedhm --model resnet34 --classes 100
    sparing explain '[{psfed: {fraction: 0.1}}]' --model resnet50 --shape 3x224x224 --classes 1000 --json
    """
    from sparing.cli.study_files import load_known_study

    named = method.removeprefix("method=")  # as `run` takes it
    study, sides = load_known_study(None, [f"method={named}", f"task.model={model}"]), parse_shape(shape)
    assert study.task.model is not None
    if study.task.code():
        raise ConfigError(f"--model is {model!r}, and explain runs no code but sparing's; `sparing check` does")
    from rich.console import Console

    from sparing.cli.explanation_text import print_explanation
    from sparing.runs.explanation import explain_method

    found = explain_method(study.method, study.task.model, sides, classes, secure, sample)
    if as_json:
        sizes = [size._replace(down=size.down._asdict(), up=size.up._asdict())._asdict() for size in found.sizes]
        print_json({**found._asdict(), "sizes": sizes, "secure": found.secure and found.secure._asdict()})
    else:
        print_explanation(found, Console())


def data_command(
    name: Annotated[
        str | None,
        typer.Argument(help="A dataset; if omitted, all are listed.", autocompletion=completion.complete_datasets),
    ] = None,
    items: Annotated[
        list[str] | None, typer.Argument(metavar="split=NAME clients=N ...", help="Keys of a study's task section.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the split.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Figure to write. [default: NAME-SPLIT.png]")] = None,
    nodes: Annotated[
        Path | None, typer.Option(help="Also write each client's samples to this folder, for `sparing join`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Describe a dataset, and plot how it is split over clients.

    \b
    sparing data                                 list all datasets
    sparing data digits split.dirichlet=0.1 clients=10
    sparing data cifar100 split=superclass
    sparing data digits clients=4 --nodes nodes  client-0.npz, ... and server.npz, to try a federation
    """
    from sparing.cli.study_files import load_known_study
    from sparing.runs.known_names import known_names

    if name is None:
        datasets = {one["usage"]: one["about"] for one in known_names().datasets.values()}
        print_json(datasets) if as_json else _print_datasets(datasets)
        return
    task = load_known_study(None, [f"task.data={name}", *(f"task.{item}" for item in items or [])]).task
    if task.code():
        raise ConfigError(f"{name} is code, and data runs no code but sparing's; `sparing check` does")
    from rich.console import Console

    from sparing.cli.data_and_cost import show_split, split_json, write_nodes

    if nodes is not None:
        for path in write_nodes(task, seed, nodes):
            typer.echo(f"wrote {path}", err=as_json)
    if as_json:
        print_json(split_json(task, seed))
        return
    law = task.split if isinstance(task.split, str) else next(iter(task.split or {}), "iid")
    picture = out or Path(f"{name.replace(':', '-').replace('/', '-')}-{law}.png")
    show_split(task, seed, picture, Console())


def _print_datasets(datasets: dict[str, str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "description", box=box.SIMPLE_HEAD)
    for usage, about in datasets.items():
        table.add_row(usage, about)
    Console().print(table)


def check_command(
    items: StudyItems = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Validate a study, and estimate its memory, bytes and time before it runs.

    \b
    sparing check study.yaml sample=100
    """
    from sparing.cli.study_files import study_from_items

    study = study_from_items(items, trust, without_sweep=True)
    from rich.console import Console

    from sparing.cli.data_and_cost import show_cost
    from sparing.runs.cost import check_study, cost_values

    cost = check_study(study)
    if as_json:
        print_json(cost_values(cost))
    else:
        show_cost(cost, study.rounds, -(-study.rounds // study.evaluate.every), Console())


def wire_command(
    file: Annotated[Path, typer.Argument(help="A parcel, kept by a run with plan.parcels=kept.")],
    as_json: AsJson = False,
) -> None:
    """Inspect one encoded upload or download (a parcel), tensor by tensor: entries sent, type, bytes.

    sparing run engine=debug plan.parcels=kept method=topk+int8+tight rounds=2 keeps every parcel of the run, and
    sparing wire RUN/parcels/round-0001/client-00003-up.spar shows one.
    """
    from rich.console import Console

    from sparing.cli.parcel_view import describe_parcels, print_parcels
    from sparing.runs.files.kept_parcels import load_parcel

    said = describe_parcels(*load_parcel(file))
    if as_json:
        print_json(said)
    else:
        print_parcels(said, Console())
