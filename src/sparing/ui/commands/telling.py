"""`sparing methods`, `explain`, `data`, `check`, `wire`: what tells, and trains nothing."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sparing.core.errors import ConfigError
from sparing.core.registry import known
from sparing.run.check import check as measure
from sparing.run.config import load_study
from sparing.run.explain import explain as explain_method
from sparing.run.parcels import load as load_parcel
from sparing.ui import completion
from sparing.ui.commands.common import AsJson, StudyItems, print_json
from sparing.ui.explain import print_explanation
from sparing.ui.folders import split_items
from sparing.ui.tasks import list_data, named_data, show_cost, show_split, split_json
from sparing.ui.text import options, print_methods
from sparing.ui.wire import described
from sparing.ui.wire import show as show_parcel


def methods(as_json: AsJson = False) -> None:
    """List every method: what it does, its options, its paper."""
    entries = list(known().values())
    if as_json:
        print_json([{"name": e.name, "about": e.about, "options": options(e), "paper": e.paper} for e in entries])
    else:
        print_methods(entries, Console())


def explain(
    method: Annotated[
        str,
        typer.Argument(
            metavar="METHOD",
            help="As in a study: psfed+int8, or a YAML list.",
            autocompletion=completion.methods,
        ),
    ],
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


def data(
    name: Annotated[
        str | None,
        typer.Argument(help="A dataset; without it, all of them are listed.", autocompletion=completion.datasets),
    ] = None,
    items: Annotated[
        list[str] | None, typer.Argument(metavar="split=LAW clients=N ...", help="As in a study's task section.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the split.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The picture. [default: NAME-SPLIT.png]")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a dataset is and draw who holds what.

    \b
    sparing data                                 what there is
    sparing data digits split.dirichlet=0.1 clients=10
    sparing data cifar100 split=superclass
    """
    if name is None and as_json:
        print_json(named_data())
        return
    if name is None:
        list_data(Console())
        return
    task = load_study(None, [f"task.data={name}", *(f"task.{item}" for item in items or [])]).task
    if as_json:
        print_json(split_json(task, seed))
        return
    law = task.split if isinstance(task.split, str) else next(iter(task.split or {}), "iid")
    picture = out or Path(f"{name.replace(':', '-').replace('/', '-')}-{law}.png")
    show_split(task, seed, picture, Console())


def check(
    items: StudyItems = None,
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
