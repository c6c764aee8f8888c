"""The command `kvd token`: makes a token for a client."""

from pathlib import Path
from typing import Annotated

import typer

from kvd.cli.options import AsJson, print_json
from shared.access.tokens import make_token, token_text


def token(
    name: Annotated[str, typer.Argument(help="Name of the client in the settings.")] = "NAME",
    file: Annotated[
        Path | None, typer.Option(help="Write it to this new file, readable only by you.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token for a client, and print its digest for the settings.

    Only the file contains the token; the settings need only the digest. Put two digests into the
    list while one token is being replaced by another.
    """
    new_token = make_token(file)
    if as_json:
        print_json(dict(new_token))
    else:
        typer.echo(token_text(name, new_token))
