"""The kvd command: run the daemon, look at what it holds, change it. Here: version.

kvd/cli/commands.py lists all commands, their examples and the exit codes.
"""

import atexit
import gc
import sys
from typing import Any

import typer

from kvd.cli.commands import COMMANDS, add_examples, exit_codes_help
from kvd.client.connection import MOVABLE, connection_options
from kvd.errors import BrokenError
from shared.config.command_line import arranged
from shared.config.lazy_commands import lazy_group
from shared.types.errors import ReportedError
from shared.version import __version__

EXIT_BROKEN = 70  # EX_SOFTWARE

app = typer.Typer(
    name="kvd",
    cls=lazy_group(COMMANDS, add_examples),
    help="KV-cache daemon: keeps the keys and values of conversations in DRAM and on SSD.\n\n"
    "--runtime-dir, and --address with what belongs to it, stand before or after the command.",
    epilog=exit_codes_help(),
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def version() -> None:
    """Print the version."""
    typer.echo(__version__)


app.callback()(connection_options)


def root_command() -> Any:
    """Return the tree of all commands, as completion and man pages walk it."""
    return typer.main.get_command(app)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: errors become one line on stderr and their exit code.

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
        root = root_command()
        root(
            arranged(root, sys.argv[1:] if arguments is None else arguments, MOVABLE),
            prog_name="kvd",
        )
    except ReportedError as error:
        typer.echo(f"kvd: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenError as error:
        typer.echo(f"kvd: a bug stopped the daemon ({error}): see the log, and report it", err=True)
        sys.exit(EXIT_BROKEN)
