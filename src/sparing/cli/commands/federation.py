"""`sparing serve`, `join`, `flower`: a federation on real machines."""

from pathlib import Path
from typing import Annotated

import typer

from sparing.cli.commands.shared import AsJson, StudyItems, Trust, complain, parse_shape
from sparing.core.errors import ConfigError


def serve_command(
    items: StudyItems = None,
    roster: Annotated[Path | None, typer.Option(help="CSV: client, key; samples and capacities may follow.")] = None,
    socket: Annotated[Path, typer.Option(help="Where the carrier's relay connects.")] = Path("server.sock"),
    test: Annotated[Path | None, typer.Option(help="The server's own test samples: npz with arrays x and y.")] = None,
    shape: Annotated[str | None, typer.Option(help="Shape of one sample, if there is no --test.")] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="Number of classes, if --test does not tell.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. [default: runs/TASK-METHOD-SEED]")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run instead of a new one.")] = None,
    keys: Annotated[Path | None, typer.Option(help="Everybody's public keys, from `sparing keys`.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent to whom, and stop.")] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Serve a federation: nodes train a study on their own machines, and only bytes pass.

    \b
    sparing serve study.yaml --roster roster.csv --test test.npz --socket run/server.sock
    sparing serve --resume runs/digits-fedavg-0 --test test.npz --socket run/server.sock
    sparing serve study.yaml --roster roster.csv --test test.npz --dry-run
    """
    from sparing.cli import federation_runs as runs
    from sparing.cli.study_files import free_run_folder, study_from_items

    sets = (test, None if shape is None else parse_shape(shape), classes)
    if resume is not None:
        if items or roster or out or keys:
            raise ConfigError(
                "--resume goes on with a run, its study and its roster; drop the study, --roster, --keys and --out"
            )
        if dry_run:
            raise ConfigError("--dry-run says what a new run would send; drop it, or --resume")
        runs.resume_served(resume, sets, socket, trust, as_json)
        return
    if roster is None:
        raise ConfigError("a federation needs a roster; give --roster roster.csv, with the columns client and key")
    study = study_from_items(items, trust)
    if dry_run:
        runs.print_server_plan(study, roster, sets, keys)
        return
    runs.serve_study(study, roster, sets, socket, out or free_run_folder(study), as_json, keys)


def join_command(
    data: Annotated[
        list[str] | None, typer.Option(help="This client's samples, or CLIENT=SAMPLES for each of several.")
    ] = None,
    state: Annotated[Path, typer.Option(help="Folder for what clients keep between rounds.")] = Path("state"),
    socket: Annotated[Path, typer.Option(help="Where letters come in.")] = Path("node.sock"),
    model: Annotated[
        str | None, typer.Option(help="This node's copy of the study's own model: my_file.py:Net.")
    ] = None,
    loss: Annotated[str | None, typer.Option(help="This node's copy of the study's own loss.")] = None,
    secure: Annotated[bool, typer.Option("--secure", help="Join only studies with secure aggregation.")] = False,
    keys: Annotated[Path | None, typer.Option(help="Everybody's public keys, as handed out; implies --secure.")] = None,
    fewest: Annotated[
        int, typer.Option(min=3, help="Honest clients that must be in every sum, whatever the study says.")
    ] = 3,
    colluding: Annotated[
        int, typer.Option(min=0, help="Clients that may collude with the server, whatever the study says.")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would leave this machine, and stop.")] = False,
) -> None:
    """Join a federation: train on this machine's samples, and answer the server's letters.

    \b
    sparing join --data client-0.npz --state state --socket node.sock
    sparing join --data 0=a.npz --data 1=b.npz          several clients on one machine
    sparing join --data my_file.py:load --model my_file.py:Net
    sparing join --data client-0.npz --keys keys.txt    the server must see sums alone
    """
    from sparing.cli import federation_runs as runs

    if dry_run:
        runs.print_node_plan(data or [], state)
        return
    rules = runs.typed_sum_rules(secure, keys, fewest, colluding)
    runs.join_federation(data or [], state, socket, model, loss, complain, rules)


def keys_command(
    client: Annotated[int, typer.Argument(min=0, help="The client's number in the roster.")],
    state: Annotated[Path, typer.Option(help="The --state folder of its `sparing join`.")] = Path("state"),
) -> None:
    """Print a client's public keys, for the file of everybody's; its private ones are made at the first call.

    \b
    sparing keys 3 --state state >> keys.txt
    """
    from sparing.cli import federation_runs as runs

    runs.print_public_keys(client, state, complain)


flower_commands = typer.Typer(no_args_is_help=True, help="Flower as the carrier of letters; see docs/network.md.")


@flower_commands.command("app")
def flower_app_command(
    folder: Annotated[Path, typer.Argument(help="Folder to create.")],
    socket: Annotated[Path, typer.Option(help="The socket of `sparing serve`.")] = Path("server.sock"),
    simulation: Annotated[
        str | None, typer.Option(help="For Flower's own simulation: sockets of `sparing join`, such as node{}.sock.")
    ] = None,
) -> None:
    """Write a Flower app that carries letters between `sparing serve` and `sparing join`.

    \b
    sparing flower app carrier --socket run/server.sock && flwr run carrier
    """
    from sparing.cli.new_study import write_federation_study
    from sparing.net.flower import write_app

    written = write_app(folder, socket.resolve(), node_sockets=simulation)
    typer.echo(f"wrote {written}; submit it with: flwr run {folder}")
    if path := write_federation_study(folder):
        typer.echo(f"wrote {path}, a study to start from: sparing serve {path} --roster roster.csv --test server.npz")


@flower_commands.command("node")
def flower_node_command(
    folder: Annotated[Path, typer.Argument(help="Folder to create.")],
    flower: Annotated[Path, typer.Option(help="Folder of Flower's own commands, such as .venv-flower/bin.")],
) -> None:
    """Write commands for a SuperNode's PATH that let it answer sparing's letters and run no other app.

    \b
    sparing flower node shim --flower /opt/flower/bin && PATH=$PWD/shim:$PATH flower-supernode ...
    """
    from sparing.net.flower import write_node_commands

    typer.echo(f"wrote {write_node_commands(folder, flower)}; put it first in the SuperNode's PATH")
