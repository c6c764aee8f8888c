"""The `inference-svc` command: the table of its commands, and its entry point.

The tables have the commands in the order of the help, with their modules, examples and exit codes.
Help, man pages, docs and completion are generated from them. An error is one line on stderr, and
the exit code is the error's.
"""

import atexit
import gc
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from inference_svc.cli.connection import MOVABLE
from shared.config.command_line import arrange_options
from shared.config.lazy_commands import LazyCommand, examples_adder, exit_codes_help, lazy_group
from shared.types.errors import ReportedError
from shared.version import __version__

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "up": (
        "inference-svc up",
        "inference-svc up --model smollm2 --openai 127.0.0.1:8080 --dram 8GB",
    ),
    "serve": (
        "inference-svc serve --model /var/lib/models/smollm2",
        "inference-svc serve --config /etc/kvd/inference-svc.toml --device cuda:1",
    ),
    "chat": (
        "inference-svc chat --session conversation-17",
        "inference-svc chat < questions.txt > answers.txt",
    ),
    "status": ("inference-svc status", "inference-svc status --all", "inference-svc status --json"),
    "why": (
        "inference-svc why s-0c1f",
        "inference-svc why s-0c1f --turn 3 --json",
    ),
    "top": ("inference-svc top", "inference-svc top --interval 2s"),
    "demo": ("inference-svc demo", "inference-svc demo --keep-running"),
    "token": (
        "inference-svc token shop --file shop.token",
        "inference-svc token shop --json",
    ),
    "bench turns": ("inference-svc bench turns --random 8x512 --threads 1",),
    "bench sharing": ("inference-svc bench sharing --random 8x512 --threads 1",),
    "bench overflow": ("inference-svc bench overflow --random 8x512 --threads 1",),
    "eval perplexity": (
        "inference-svc eval perplexity --model /var/lib/models/smollm2 --text wikitext.txt",
    ),
    "eval edits": (
        "inference-svc eval edits --model /var/lib/models/smollm2 --modes keep,heal:16",
    ),
    "config show": ("inference-svc config show --config /etc/kvd/inference-svc.toml",),
    "config check": ("inference-svc config check --config /etc/kvd/inference-svc.toml",),
    "completion": ("source <(inference-svc completion bash)",),
}

EXIT_CODES: Mapping[int, str] = {
    0: "done",
    1: "the demo failed, a process of `up` has ended, or the command failed",
    2: "bad usage or value",
    3: "unknown session or turn",
    4: "in use: another turn of the session is running, or this one was cancelled",
    5: "not possible in the current state",
    6: "a limit is reached: of the queue, the tenant, or the disk; try again later",
    7: "not allowed: missing or wrong token or certificate, role or tenant",
    8: "deadline exceeded",
    69: "no service answers, or it is stopping",
    70: "the model failed during a turn",
    78: "the settings or the model are invalid, or the start was refused",
    130: "interrupted with Ctrl-C",
}

# Headings in the help's list of commands.
SERVING = "The service"
CLIENTS = "What goes on, and talking to it"
MEASURING = "Showing and measuring"
SETUP = "Setting up"

COMMANDS: Mapping[str, LazyCommand] = {
    "up": LazyCommand(
        "inference_svc.cli.up:up",
        "Start kvd and a service for programs on this machine; Ctrl-C ends both",
        heading=SERVING,
    ),
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
        "Show a running service's model, state and load; exit code 69 if none answers",
        heading=CLIENTS,
    ),
    "why": LazyCommand(
        "inference_svc.cli.why:why",
        "Explain why a turn was not found in the cache, and show what differs",
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
        "Make a token for a client, and print its digest for the settings",
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
        "Measure what truncating, compressing or editing a context costs in quality",
        heading=MEASURING,
    ),
    "completion": LazyCommand(
        "inference_svc.cli.completion:completion",
        "Print a completion script: Tab then completes commands, options and values",
        heading=SETUP,
    ),
    "complete": LazyCommand(
        "inference_svc.cli.completion:complete",
        "Print what the last word may become: a line each, with what it means behind a tab",
        hidden=True,
    ),
    "version": LazyCommand("inference_svc.cli.main:version", "Print the version", heading=SETUP),
}

app = typer.Typer(
    name="inference-svc",
    cls=lazy_group(COMMANDS, examples_adder(EXAMPLES)),
    epilog=exit_codes_help(EXIT_CODES),
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Serve a model over multi-turn sessions, reusing the KV that kvd keeps.

    --address, with what belongs to it, stands before or after the command.
    """


def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def root_command() -> Any:
    """Return the tree of all commands, as completion and man pages walk it."""
    return typer.main.get_command(app)


def main(arguments: list[str] | None = None) -> None:
    """Run the command; convert errors to one line on stderr and an exit code.

    Args:
        arguments: the command's arguments; None: those of the process.

    Raises:
        SystemExit: always.
    """
    if arguments is None:
        atexit.register(gc.freeze)  # saves the last garbage collection, which takes a while
    try:
        root = root_command()
        root(
            arrange_options(root, sys.argv[1:] if arguments is None else arguments, MOVABLE),
            prog_name="inference-svc",
        )
    except ReportedError as error:
        print(f"inference-svc: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
