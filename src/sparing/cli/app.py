"""The command line, put together from `sparing.cli.commands`.

A mistake of the user's ends in one line on stderr and exit code 2; Ctrl-C says how to go on (exit code 130); a bug
shows its traceback.
"""

import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import sparing
from sparing.cli.commands import compare, export, federation, inspect, report, sweep, train
from sparing.cli.commands.shared import complain
from sparing.cli.interrupt import INTERRUPT
from sparing.cli.rank_processes import end_rank, leave_ranks, meet_other_ranks
from sparing.core.errors import SparingError


class _PoliteGroup(TyperGroup):
    """Turns what the library refuses into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SparingError as error:
            end_rank(" ".join(str(error).splitlines()))
            raise typer.Exit(2) from None
        except OSError as error:
            complain(f"{error.filename or 'a file'} cannot be read or written ({error.strerror or error}); check it")
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            raise INTERRUPT.stopped() from None


app = typer.Typer(
    cls=_PoliteGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sparing {sparing.__version__}")
        raise typer.Exit


@app.callback()
def _top_level(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Federated learning that sends only what matters.

    \b
    sparing demo                                 FedAvg and seven ways to send less, in under a minute
    sparing methods                              list all methods and their options
    sparing explain psfed+int8                   what a method uploads, downloads, stores and costs
    sparing data digits split.dirichlet=0.1      how a dataset is split over clients
    sparing new first                            create a folder with a study to start from
    sparing check rounds=30                      estimate memory, bytes and time of a study
    sparing run method=psfed+int8 rounds=30      train
    sparing sweep study.yaml                     search hyperparameters on validation samples
    sparing compare runs                         compare runs in tables
    sparing report runs                          compare runs in one HTML file with figures
    sparing export RUN --peft adapter            write trained adapters as peft loads them
    sparing serve study.yaml --roster r.csv      train across real machines; `sparing join` on each of them
    """


_COMMANDS = (
    train.demo_command,
    inspect.methods_command,
    inspect.explain_command,
    inspect.data_command,
    train.new_command,
    inspect.check_command,
    train.run_command,
    train.resume_command,
    train.forget_command,
    export.export_command,
    sweep.sweep_command,
    compare.compare_command,
    report.report_command,
    sweep.bench_command,
    inspect.wire_command,
    federation.serve_command,
    federation.join_command,
    federation.keys_command,
)
for command in _COMMANDS:
    app.command(command.__name__.removesuffix("_command"))(command)
app.add_typer(federation.flower_commands, name="flower")
app.command("pfllib", context_settings={"ignore_unknown_options": True, "help_option_names": []})(train.pfllib_command)


def _show_warning(message: Warning | str, category: type[Warning], filename: str, *rest: Any) -> None:
    """What the library warns of, in its own voice; other people's warnings as Python shows them."""
    if Path(filename).is_relative_to(Path(sparing.__file__).parent):
        complain(f"note: {message}")
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, rest[0]))


def main() -> None:
    warnings.showwarning = _show_warning
    INTERRUPT.listen()
    meet_other_ranks()
    try:
        app()
    finally:
        leave_ranks()
