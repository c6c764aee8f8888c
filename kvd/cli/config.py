"""The commands `kvd config show`, `check` and `reload`."""

import json
from collections.abc import Iterable
from typing import Annotated

import typer

from kvd import config
from kvd.cli.options import AsJson, Config, RuntimeDir, print_json
from kvd.client.connection import open_client
from shared.config.lazy_commands import WholeHelp
from shared.terminal.settings import listing_problems, print_settings

config_app = typer.Typer(
    cls=WholeHelp,
    help="Show, check or reload the settings.",
    rich_markup_mode=None,
    no_args_is_help=True,
)

Running = Annotated[
    bool, typer.Option("--running", help="Print the running kvd's settings, not the file's.")
]


@config_app.command("show")
def config_show(
    config_file: Config = None,
    running: Running = False,
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Print every setting, its source, and whether a reload changes it.

    In JSON sizes are bytes and durations seconds.
    """
    if running:
        with open_client(runtime_dir) as client:
            answer = client.settings()
        rows = [(row.key, row.value, row.source, row.live) for row in answer.settings]
        values = {  # an older kvd sends no JSON, only text for people
            row.key: json.loads(row.json) if row.json else row.value for row in answer.settings
        }
    else:
        loaded = config.load(config_file, {})
        rows = [(*row, config.is_live(row[0])) for row in loaded.rows()]
        values = loaded.values()
    print_settings(rows, values, as_json=as_json)


@config_app.command("check")
def config_check(config_file: Config = None) -> None:
    """Exit 0 if the settings are valid, otherwise list every problem."""
    with listing_problems("kvd"):
        config.load(config_file, {})


@config_app.command("reload")
def config_reload(runtime_dir: RuntimeDir = None, as_json: AsJson = False) -> None:
    """Have the running kvd read its settings again; invalid ones change nothing."""
    with open_client(runtime_dir) as client:
        answer = client.reload_settings()
    if as_json:
        print_json({"applied": list(answer.applied), "needs_restart": list(answer.needs_restart)})
        return
    typer.echo(_sentence("changed", answer.applied) or "nothing has changed")
    if answer.needs_restart:
        typer.echo(_sentence("these wait for the next start", answer.needs_restart))


def _sentence(what: str, keys: Iterable[str]) -> str:
    names = ", ".join(keys)
    return f"{what}: {names}" if names else ""
