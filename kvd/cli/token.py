"""The command `kvd token`: makes a token for a client."""

from pathlib import Path
from typing import Annotated

import typer

from kvd.cli.options import AsJson, print_json
from shared.access.tokens import make_token, token_text


def token(
    name: Annotated[str, typer.Argument(help="What the settings call the client.")] = "NAME",
    file: Annotated[
        Path | None, typer.Option(help="Write it to this new file, which only you can read.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token for a client, and say what the settings need of it.

    Nothing is kept but the file: the settings need only the digest. Put two digests into the list
    while one token is being replaced by another.
    """
    new_token = make_token(file)
    if as_json:
        print_json(dict(new_token))
    else:
        typer.echo(token_text(name, new_token))
