"""The command line, put together from `sparing.ui.commands`.

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
from sparing.core.errors import SparingError
from sparing.ui.commands import report, results, sweeping, telling, training
from sparing.ui.commands.common import complain
from sparing.ui.interrupt import INTERRUPT


class Polite(TyperGroup):
    """Turns what the library refuses into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SparingError as error:
            complain(" ".join(str(error).splitlines()))
            raise typer.Exit(2) from None
        except OSError as error:
            complain(f"{error.filename or 'a file'} cannot be read or written ({error.strerror or error}); check it")
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            raise INTERRUPT.stopped() from None


app = typer.Typer(
    cls=Polite,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    sparing new first                            a folder with a study to start from
    sparing check rounds=30                      what a study will cost
    sparing run method=psfed+int8 rounds=30      train
    sparing sweep study.yaml                     try settings, judged on validation samples
    sparing compare runs                         what the runs came to, side by side
    sparing report runs                          the same and more, as one HTML file with figures
    """


COMMANDS = (
    training.demo,
    telling.methods,
    telling.explain,
    telling.data,
    training.new,
    telling.check,
    training.run,
    training.resume,
    training.forget,
    sweeping.sweep,
    results.compare,
    report.report,
    sweeping.bench,
    telling.wire,
)
for command in COMMANDS:
    app.command()(command)
app.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})(training.pfllib)


def warn(message: Warning | str, category: type[Warning], filename: str, *rest: Any) -> None:
    """What the library warns of, in its own voice; other people's warnings as Python shows them."""
    if Path(filename).is_relative_to(Path(sparing.__file__).parent):
        complain(f"note: {message}")
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, rest[0]))


def main() -> None:
    warnings.showwarning = warn
    INTERRUPT.listen()
    app()
