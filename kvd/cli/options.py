"""Options and output that the commands of `kvd` share: session names, JSON, confirmations."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvd.errors import NotConfirmedError

if TYPE_CHECKING:
    from shared.pb.kvd.v1 import kvd_pb2

RuntimeDir = Annotated[
    Path | None,
    typer.Option(
        "--runtime-dir",
        envvar="KVD_RUNTIME_DIR",
        help="Directory of kvd's sockets.",
        readable=False,  # kvd's users may enter it but not list it
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", envvar="KVD_CONFIG", help="TOML file, see systemd/kvd.toml."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
MOST_WANTED = (1 << 32) - 1  # sessions or events that one request can ask for
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
SessionId = Annotated[
    str, typer.Argument(metavar="SESSION", help="Session id, or a unique beginning of one.")
]
Tenant = Annotated[str, typer.Option(help='Tenant of the session. Default: "default", else any.')]
Model = Annotated[str, typer.Option(help="Model fingerprint, if several have this session.")]
OfModel = Annotated[
    str | None, typer.Option("--model", help="Only models whose fingerprint starts with this.")
]


def key_of(session: str, tenant: str, model: str) -> "kvd_pb2.SessionKey":
    """Return the session that a command line names."""
    from shared.pb.kvd.v1 import kvd_pb2

    return kvd_pb2.SessionKey(tenant=tenant, model=model, session_id=session)


def print_json(document: dict[str, Any]) -> None:
    """Print the single document of --json."""
    typer.echo(json.dumps(document, indent=2))


def print_json_line(document: dict[str, Any]) -> None:
    """Print one of several documents, on its own line, unbuffered."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def require_terminal() -> None:
    """Check that there is a terminal to ask on.

    Raises:
        NotConfirmedError: there is none.
    """
    if not sys.stdin.isatty():
        raise NotConfirmedError(
            "this needs a confirmation, but there is no terminal to ask on", "add --yes"
        )


def confirm(question: str) -> None:
    """Ask for a confirmation on the terminal.

    Raises:
        NotConfirmedError: the answer is no, or there is no terminal.
    """
    require_terminal()
    if not typer.confirm(question):
        raise NotConfirmedError(
            "nothing was changed, because the answer was not y", "answer y, or add --yes"
        )


def warn_of_unavailable(num_layouts: int, what: str) -> None:
    """Warn on stderr that a command did not reach the sessions of some layouts."""
    if num_layouts:
        typer.echo(
            f"kvd: {num_layouts} layouts are unavailable, so their sessions were not {what}: see "
            "kvd stats",
            err=True,
        )
