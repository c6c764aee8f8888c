"""The `inference-svc` command. Errors are one line on stderr; the exit code is the error's.

inference_svc/cli/commands.py lists all commands; here is `version`.
"""

import atexit
import gc
import sys
from typing import Annotated

import typer

from inference_svc.cli.commands import COMMANDS
from inference_svc.cli.connection import MOVABLE
from shared.config.command_line import arranged
from shared.config.lazy_commands import lazy_group
from shared.types.errors import ReportedError
from shared.version import __version__

app = typer.Typer(
    cls=lazy_group(COMMANDS),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _say_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_say_version, help="Print the version."),
    ] = False,
) -> None:
    """Serve a model over multi-turn sessions, reusing the KV that kvd keeps.

    --address, with what belongs to it, stands before or after the command.
    """


def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: run the command, turn errors into one line and an exit code.

    Args:
        arguments: of the command; None: those of the process.

    Raises:
        SystemExit: always.
    """
    if arguments is None:
        atexit.register(
            gc.freeze
        )  # as a process ends, looking for cycles takes it a while for nothing
    try:
        root = typer.main.get_command(app)
        root(
            arranged(root, sys.argv[1:] if arguments is None else arguments, MOVABLE),
            prog_name="inference-svc",
        )
    except ReportedError as error:
        print(f"inference-svc: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
