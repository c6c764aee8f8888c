"""The `inference-svc` command. Errors are one line on stderr; the exit code is the error's."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inference_svc.cli.commands import COMMANDS
from inference_svc.cli.connection import (
    MOVABLE,
    Address,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    client_of,
)
from shared.config.command_line import arranged
from shared.config.lazy_commands import WholeHelp, lazy_group
from shared.types.errors import InvalidInputError, ReportedError
from shared.version import __version__

# Imported where they are used: --help does without gRPC and settings.
if TYPE_CHECKING:
    from shared.pb.inference.v1 import inference_pb2 as pb

app = typer.Typer(
    cls=lazy_group(COMMANDS),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(
    cls=WholeHelp, help="Look at the settings.", rich_markup_mode=None, no_args_is_help=True
)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document.")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Settings file (TOML).", show_default=False)
]


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


def serve(
    config: ConfigOption = None,
    model: Annotated[str | None, typer.Option(help="Model directory, or GGUF file.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, or of several cuda:1.")] = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads; 0: torch's choice.")] = None,
    attention: Annotated[str | None, typer.Option(help="auto or torch.")] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="unix:/path, host:port or auto; as often as there are addresses.",
        ),
    ] = None,
    state_dir: Annotated[str | None, typer.Option(help="Where transcripts are kept.")] = None,
    mode: Annotated[str | None, typer.Option(help="cached, or recompute (never kvd).")] = None,
    load_policy: Annotated[str | None, typer.Option(help="auto, always or never.")] = None,
    residents: Annotated[
        bool | None, typer.Option(help="Keep sessions' KV in memory after their turns.")
    ] = None,
    saving: Annotated[str | None, typer.Option(help="async, sync or off.")] = None,
    kvd_runtime_dir: Annotated[str | None, typer.Option(help="Where kvd's sockets are.")] = None,
    max_running: Annotated[int | None, typer.Option(help="Turns in a batch.")] = None,
    max_turns: Annotated[
        int | None, typer.Option(help="Turns under way, waiting included.")
    ] = None,
    kv_tokens: Annotated[int | None, typer.Option(help="KV in memory; 0: by free memory.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning, error.")] = None,
    log_format: Annotated[
        str | None, typer.Option(help="auto (text on a terminal), json or text.")
    ] = None,
) -> None:
    """Serve a model until SIGTERM."""
    flags = {
        "model.path": model,
        "model.dtype": dtype,
        "model.device": device,
        "model.threads": threads,
        "model.attention": attention,
        "server.listen": listen or None,
        "server.state_dir": state_dir,
        "cache.mode": mode,
        "cache.load_policy": load_policy,
        "cache.residents": residents,
        "cache.saving": saving,
        "cache.kvd_runtime_dir": kvd_runtime_dir,
        "scheduler.max_running": max_running,
        "scheduler.max_turns": max_turns,
        "scheduler.kv_tokens": kv_tokens,
        "log.level": log_level,
        "log.format": log_format,
    }
    from inference_svc.config import load_inference_settings
    from inference_svc.installation import require_engine
    from shared.config.settings import warn_of_overridden
    from shared.process.log import configure_logging

    loaded = load_inference_settings(config, flags)
    require_engine()
    configure_logging(loaded.settings.log.level, json=loaded.settings.log.json_lines)
    warn_of_overridden(loaded)
    from inference_svc import server

    server.run(loaded, lambda: load_inference_settings(config, flags))


def chat(
    address: Address,
    session: Annotated[str, typer.Option(help="Continue this session.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 0.0,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Talk to a running service; each answer shows what was reused.

    In a pipe it is a filter: each line of stdin is a question, and only answers come out.
    """
    import asyncio

    from inference_svc.cli.chat import chat as talk

    async def connected() -> None:
        client = client_of(address, token_file, tls_ca, tls_cert, tls_key)
        await talk(client, session, max_tokens, temperature)

    asyncio.run(connected())


def status(
    address: Address,
    everything: Annotated[
        bool, typer.Option("--all", help="Every gauge and count, with its meaning.")
    ] = False,
    as_json: AsJson = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Say what a running service serves, and how it goes; exit code 69 if nobody answers."""
    import asyncio
    import json

    from inference_svc.cli.status_view import status_lines, status_tables
    from shared.terminal import printing

    async def get_model() -> "pb.Model":
        async with client_of(address, token_file, tls_ca, tls_cert, tls_key) as client:
            return await client.get_model()

    model = asyncio.run(get_model())
    if as_json:
        typer.echo(json.dumps(printing.plain(model), indent=2))
        return
    console = printing.console()
    if everything:
        console.print(*status_tables(model), sep="")
        return
    for line in status_lines(model, console.width):
        typer.echo(line)


def top(
    address: Address,
    interval: Annotated[
        str, typer.Option("--interval", metavar="TIME", help="Time between two looks.")
    ] = "2s",
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Watch a running service: tokens a second, hit rate, first tokens, turns; live.

    Sessions and tenants are not in it: a service tells every client the same. Which sessions are
    busiest says kvd top, to operators; tenants are in the metrics.
    """
    import asyncio

    from inference_svc.cli.top import LEAST_INTERVAL_S
    from inference_svc.cli.top import top as watch
    from shared.types.units import parse_duration_s

    try:
        every_s = parse_duration_s(interval)
    except ValueError as error:
        raise InvalidInputError(f"--interval: {error}", 'as in "2s"') from error
    if every_s < LEAST_INTERVAL_S:
        raise InvalidInputError(
            f"--interval {interval} is too short", f"give {LEAST_INTERVAL_S} s or more"
        )

    async def watched() -> None:
        await watch(client_of(address, token_file, tls_ca, tls_cert, tls_key), every_s)

    asyncio.run(watched())


def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@config_app.command("show")
def config_show(
    config: ConfigOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Print every setting, where it comes from, and whether a reload (SIGHUP) changes it.

    In JSON sizes are bytes and durations seconds.
    """
    from inference_svc.config import LIVE_KEYS, load_inference_settings
    from shared.config.reload import is_live
    from shared.terminal.settings import print_settings

    loaded = load_inference_settings(config, {})
    rows = [(*row, is_live(row[0], LIVE_KEYS)) for row in loaded.rows()]
    print_settings(rows, loaded.values(), as_json=as_json)


@config_app.command("check")
def config_check(config: ConfigOption = None) -> None:
    """Say whether the service would accept the settings on this machine; a line each problem.

    What only the loaded model tells, the start says: whether scheduler.kv_tokens of its KV fit.
    """
    from inference_svc.config import load_inference_settings
    from inference_svc.runtime.model.model_directory import check_model
    from shared.terminal.settings import listing_problems

    with listing_problems("inference-svc"):
        path = load_inference_settings(config, {}).settings.model.path
        if path is not None:
            check_model(path)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: run the command, turn errors into one line and an exit code.

    Args:
        arguments: of the command; None: those of the process.

    Raises:
        SystemExit: always.
    """
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
