"""The commands `kvd export` and `kvd import`: a session as a file, for a backup or another kvd."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from kvd.cli.filters import Named, name_of
from kvd.cli.options import AsJson, Model, RuntimeDir, SessionId, Tenant, print_json
from kvd.client.connection import open_client
from kvd.client.operator_client import OperatorClient
from kvd.errors import UnusableFileError
from kvd.session_files.file_format import SessionFileError
from kvd.session_files.file_reader import FileReader
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.errors import ConflictError
from shared.types.units import format_bytes

PIECE_BYTES = 1 << 20
TRIES = 3  # to export a session that changes meanwhile

Prefix = Annotated[
    bool,
    typer.Option("--prefix", help="If kvd does not know its discards, export what precedes them."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
Target = Annotated[Path, typer.Argument(metavar="FILE", help="File to write; it has mode 0600.")]
Source = Annotated[Path, typer.Argument(metavar="FILE", help="File written by kvd export.")]
AsSession = Annotated[str, typer.Option("--session", help="Session id; default: the file's.")]
AsTenant = Annotated[str, typer.Option("--tenant", help="Tenant; default: the file's.")]
Replace = Annotated[bool, typer.Option("--replace", help="Replace an existing session.")]
NewLayout = Annotated[
    bool, typer.Option("--new-layout", help="Accept a layout that no engine has used here.")
]


def export_session(
    session: SessionId,
    file: Target,
    tenant: Tenant = "",
    model: Model = "",
    prefix: Prefix = False,
    force: Force = False,
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Write a session's tokens and KV to a file for kvd import."""
    if file.exists() and not force:
        raise UnusableFileError(
            f"the file {file} already exists", "give another file, or add --force to overwrite it"
        )
    named = Named(session, tenant, model)
    with open_client(runtime_dir) as client:

        def export(key: kvd_pb2.SessionKey) -> tuple[int, int]:
            request = kvd_pb2.ExportSessionRequest(session=key, prefix=prefix)
            return _export(client, request, file)

        key, (num_tokens, num_bytes) = named.call(client, export)
    if as_json:
        print_json({"file": str(file), "num_tokens": num_tokens, "num_bytes": num_bytes})
        return
    size = f"{num_tokens} tokens, {format_bytes(num_bytes)}"
    typer.echo(f"exported {name_of(key)} to {file} ({size})")


def import_session(
    file: Source,
    session: AsSession = "",
    tenant: AsTenant = "",
    replace: Replace = False,
    new_layout: NewLayout = False,
    runtime_dir: RuntimeDir = None,
    as_json: AsJson = False,
) -> None:
    """Store a session from a file of kvd export; damaged files are refused."""
    with _open(file) as source:
        for piece in _verified_pieces(
            file, source
        ):  # read the whole file before kvd changes anything
            del piece
        source.seek(0)
        target = kvd_pb2.ImportTarget(
            tenant=tenant, session_id=session, replace=replace, new_layout=new_layout
        )
        with open_client(runtime_dir) as client:
            answer = client.import_session(target, _verified_pieces(file, source))
    key = answer.session
    if as_json:
        print_json(
            {
                "tenant": key.tenant,
                "model": key.model,
                "session": key.session_id,
                "num_tokens": answer.num_tokens,
            }
        )
        return
    typer.echo(f"imported {answer.num_tokens} tokens as {key.tenant}/{key.session_id}")


def _export(
    client: OperatorClient, request: kvd_pb2.ExportSessionRequest, file: Path
) -> tuple[int, int]:
    """Export a session; try again if it changes meanwhile."""
    for _ in range(TRIES - 1):
        try:
            return _write(file, client.export_session(request))
        except ConflictError as error:
            if not error.retryable:
                raise
    return _write(file, client.export_session(request))


def _write(file: Path, pieces: Iterator[bytes | bytearray]) -> tuple[int, int]:
    """Write a file, completely or not at all; return its tokens and bytes."""
    reader = FileReader()
    part = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as target:
            for piece in pieces:
                for frame in reader.feed(piece):
                    del frame  # reading it has verified it
                target.write(piece)
            reader.close()
            target.flush()
            os.fsync(target.fileno())
            num_bytes = target.tell()
        part.replace(file)
    except OSError as error:
        raise UnusableFileError(
            f"cannot write {file} ({error.strerror})",
            "give a file in a directory with room that this user may write to",
        ) from error
    finally:
        part.unlink(missing_ok=True)
    return reader.num_tokens, num_bytes


def _open(file: Path) -> BinaryIO:
    try:
        source = file.open("rb")
    except OSError as error:
        raise UnusableFileError(
            f"cannot read {file} ({error.strerror})", "give a file that kvd export has written"
        ) from error
    if not source.seekable():
        source.close()
        raise UnusableFileError(
            f"{file} is a pipe, but the file has to be read twice", "save it to a disk first"
        )
    return source


def _verified_pieces(file: Path, source: BinaryIO) -> Iterator[bytes]:
    """Yield the pieces of a file; raise an error before a damaged one."""
    reader = FileReader()
    try:
        while piece := source.read(PIECE_BYTES):
            for frame in reader.feed(piece):
                del frame
            yield piece
        reader.close()
    except SessionFileError as error:
        raise SessionFileError(f"{file}: {error.message}", error.remedy) from error
    except OSError as error:
        raise UnusableFileError(
            f"cannot read {file} ({error.strerror})", "copy it to another disk"
        ) from error
