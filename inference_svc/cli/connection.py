"""Options of the commands that call a service, and the command that makes clients' tokens."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inference_svc.installation import SOCKET, default_listen
from shared.access.addresses import UNIX
from shared.types.errors import InvalidInputError

# Imported where they are used, so that --help does not wait for gRPC and settings.
if TYPE_CHECKING:
    from inference_svc.client import InferenceClient

# Options that may stand before or after the command's name.
MOVABLE = ("--address", "--token-file", "--tls-ca", "--tls-cert", "--tls-key")
SYSTEM_DIRECTORIES = "inference-svc*"  # runtime directories of systemd's units, one a service
_RUN = Path("/run")


def default_address(run: Path = _RUN) -> str:
    """Return the socket of this user's own service, else that of the system's only service.

    Raises:
        InvalidInputError: the user has no service, and several system services run.
    """
    own = default_listen()
    if Path(own.removeprefix(UNIX)).exists():
        return own
    found = [f"{UNIX}{directory / SOCKET}" for directory in sorted(run.glob(SYSTEM_DIRECTORIES))]
    if len(found) > 1:
        raise InvalidInputError(
            f"{len(found)} inference services run here",
            f"choose one with --address {' or '.join(found)}",
        )
    return found[0] if found else own


Address = Annotated[
    str,
    typer.Option(
        envvar="INFERENCE_ADDRESS",
        help="Where the service listens: unix:/path or host:port.",
        default_factory=default_address,
        show_default="of your own service, or the only one of the system",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(envvar="INFERENCE_TOKEN_FILE", help="File with the token to send."),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        envvar="INFERENCE_TLS_CA_FILE", help="PEM: authority of the service's certificate."
    ),
]
TlsCert = Annotated[
    Path | None, typer.Option(envvar="INFERENCE_TLS_CERT_FILE", help="PEM: own certificate.")
]
TlsKey = Annotated[
    Path | None, typer.Option(envvar="INFERENCE_TLS_KEY_FILE", help="PEM: key of the certificate.")
]


def client_of(
    address: str,
    token_file: Path | None,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
) -> "InferenceClient":
    """Return a client with the address and credentials of a command line.

    Raises:
        InvalidInputError: the address is invalid, or a file cannot be read.
    """
    from inference_svc.client import InferenceClient
    from shared.access.channels import read_credentials

    is_named = any((token_file, tls_ca, tls_cert, tls_key))
    credentials = read_credentials(token_file, tls_ca, tls_cert, tls_key) if is_named else None
    return InferenceClient(address, credentials)


def token(
    name: Annotated[str, typer.Argument(help="Name of the client in the settings.")] = "NAME",
    file: Annotated[
        Path | None, typer.Option(help="Write it to this new file, readable only by you.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Make a token for a client, and print its digest for the settings.

    Only the file contains the token; the settings need only the digest.
    """
    import json

    from shared.access.tokens import make_token, token_text

    token = make_token(file)
    typer.echo(json.dumps(token, indent=2) if as_json else token_text(name, token))
