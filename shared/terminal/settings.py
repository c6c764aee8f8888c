"""How both commands show settings, and what is wrong with them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import typer

from shared.config.settings import InvalidSettingsError
from shared.terminal import printing
from shared.terminal.tables import Column, fitted

_COLUMNS = (
    Column("setting"),
    Column("value", may_be_cut=True, least=16),
    Column("from", rank=2),
    Column("reload", rank=1),
)


def print_settings(
    rows: Sequence[tuple[str, str, str, bool]], values: Mapping[str, object], *, as_json: bool
) -> None:
    """Print every setting, where it comes from, and whether a reload changes it.

    Args:
        rows: key, value for people, source, whether it is live.
        values: by key, for programs.
        as_json: print one JSON document.
    """
    if as_json:
        shown = {
            key: {"value": values[key], "source": source, "live": live}
            for key, _, source, live in rows
        }
        typer.echo(json.dumps(shown, indent=2))
        return
    console = printing.console()
    cells = [(key, value, source, "live" if live else "") for key, value, source, live in rows]
    console.print(fitted(_COLUMNS, cells, console.width))


@contextmanager
def listing_problems(program: str) -> Iterator[None]:
    """Load settings in here: a line on stderr for each problem, else that there is none.

    Raises:
        typer.Exit: with the exit code of settings that cannot be used.
    """
    try:
        yield
    except InvalidSettingsError as error:
        for problem in error.problems:
            typer.echo(f"{program}: {problem}", err=True)
        raise typer.Exit(error.exit_code) from error
    typer.echo("the settings are fine")
