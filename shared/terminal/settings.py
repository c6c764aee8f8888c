"""Printing of settings and their problems, for the commands of both processes."""

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
    """Print every setting, its source, and whether a reload may change it.

    Args:
        rows: key, value as text, source, and whether a reload may change it.
        values: values by key, for JSON.
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
    """Print the problems of settings that are loaded inside the block, or that there are none.

    Raises:
        typer.Exit: the settings are invalid.
    """
    try:
        yield
    except InvalidSettingsError as error:
        for problem in error.problems:
            typer.echo(f"{program}: {problem}", err=True)
        raise typer.Exit(error.exit_code) from error
    typer.echo("the settings are fine")
