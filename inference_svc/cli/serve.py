"""`inference-svc serve`, and `inference-svc config`, which shows and checks its settings."""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from shared.config.lazy_commands import WholeHelp

config_app = typer.Typer(
    cls=WholeHelp, help="Look at the settings.", rich_markup_mode=None, no_args_is_help=True
)

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Settings file (TOML).", show_default=False)
]


def serve(
    config: ConfigOption = None,
    model: Annotated[str | None, typer.Option(help="Model directory, or GGUF file.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, or of several cuda:1.")] = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads; 0: torch's choice.")] = None,
    attention: Annotated[str | None, typer.Option(help="auto, torch, triton or cpp.")] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="unix:/path, host:port or auto; repeat for more addresses.",
        ),
    ] = None,
    openai: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="OpenAI's API for local programs: 127.0.0.1:PORT or unix:/path.",
        ),
    ] = None,
    state_dir: Annotated[str | None, typer.Option(help="Directory of transcripts.")] = None,
    mode: Annotated[str | None, typer.Option(help="cached, or recompute (never kvd).")] = None,
    load_policy: Annotated[str | None, typer.Option(help="auto, always or never.")] = None,
    residents: Annotated[
        bool | None, typer.Option(help="Keep sessions' KV in memory after their turns.")
    ] = None,
    saving: Annotated[str | None, typer.Option(help="async, sync or off.")] = None,
    kvd_runtime_dir: Annotated[str | None, typer.Option(help="Directory of kvd's sockets.")] = None,
    max_running: Annotated[
        int | None, typer.Option(help="Turns in a batch; 0: by the device.")
    ] = None,
    max_turns: Annotated[
        int | None, typer.Option(help="Turns in progress, waiting ones included.")
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
        "openai.listen": openai or None,
        "openai.local_clients": True if openai else None,
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
    _run(config, flags)


def _run(config: Path | None, flags: Mapping[str, object]) -> None:
    """Serve with a file's settings and flags; flags override the file, also at each reload."""
    from shared.process.memory import gc_paused

    # A SIGHUP during the start waits until it can reload, instead of ending the process.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))
    with gc_paused():
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
    """Check whether the service would accept the settings on this machine.

    What only the loaded model tells, the start says: whether scheduler.kv_tokens of its KV fit.
    """
    from inference_svc.config import load_inference_settings
    from inference_svc.runtime.model.model_directory import check_model
    from shared.terminal.settings import listing_problems

    with listing_problems("inference-svc"):
        path = load_inference_settings(config, {}).settings.model.path
        if path is not None:
            check_model(path)
