"""The `inference-svc` command: its commands, in the order of its help, and its entry point.

Errors are one line on stderr; the exit code is the error's.
"""

import atexit
import gc
import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from inference_svc.cli.connection import MOVABLE
from shared.config.command_line import arranged
from shared.config.lazy_commands import LazyCommand, lazy_group
from shared.types.errors import ReportedError
from shared.version import __version__

# Headings of its list of commands.
SERVING = "The service"
CLIENTS = "What goes on, and talking to it"
MEASURING = "Showing and measuring"
SETUP = "Setting up"

COMMANDS: Mapping[str, LazyCommand] = {
    "serve": LazyCommand(
        "inference_svc.cli.serve:serve", "Serve a model until SIGTERM", heading=SERVING
    ),
    "chat": LazyCommand(
        "inference_svc.cli.chat:chat",
        "Talk to a running service; each answer shows what was reused",
        heading=CLIENTS,
    ),
    "status": LazyCommand(
        "inference_svc.cli.status:status",
        "Say what a running service serves, and how it goes; exit code 69 if nobody answers",
        heading=CLIENTS,
    ),
    "top": LazyCommand(
        "inference_svc.cli.top:top",
        "Watch a running service: tokens a second, hit rate, first tokens, turns; live",
        heading=CLIENTS,
    ),
    "demo": LazyCommand(
        "inference_svc.demo.cli:demo",
        "Replay real conversations through kvd and the service, checked against recomputation",
        heading=MEASURING,
    ),
    "token": LazyCommand(
        "inference_svc.cli.connection:token",
        "Make a token for a client, and say what the settings need of it",
        heading=SETUP,
    ),
    "config": LazyCommand(
        "inference_svc.cli.serve:config_app", "Look at the settings", heading=SERVING
    ),
    "bench": LazyCommand(
        "inference_svc.bench.cli:bench_app",
        "Measure the engine in this process, with a kvd of the bench's own",
        heading=MEASURING,
    ),
    "eval": LazyCommand(
        "inference_svc.eval.cli:eval_app",
        "Measure what truncating a context costs in quality, by ways to truncate",
        heading=MEASURING,
    ),
    "version": LazyCommand("inference_svc.cli.main:version", "Print the version", heading=SETUP),
}

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
