"""`inference-svc why`: the cause of a turn's cache miss, with the texts that differ."""

import asyncio
import json
from collections.abc import Iterator
from typing import Annotated

import typer

from inference_svc.cli.connection import Address, TlsCa, TlsCert, TlsKey, TokenFile, client_of
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.terminal import printing
from shared.terminal.printing import hanging, plain
from shared.types.units import format_duration

_INDENT = 10


def why(
    session: Annotated[str, typer.Argument(help="Session id, as in usage and log.")],
    address: Address,
    turn: Annotated[
        int | None, typer.Option(min=0, help="Index of the turn; default: the last that missed.")
    ] = None,
    tenant: Annotated[str, typer.Option(help="The session's tenant; default: your first.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Explain why a turn was not found in the cache, and show what differs.

    Shows the texts around the first difference, to callers who may read the session.
    """

    async def explain() -> pb.ExplainMissResponse:
        async with client_of(address, token_file, tls_ca, tls_cert, tls_key) as client:
            return await client.explain_miss(session, turn, tenant)

    explained = asyncio.run(explain())
    if as_json:
        typer.echo(json.dumps(plain(explained), indent=2, ensure_ascii=False))
        return
    width = printing.console().width
    for label, text in explanation_rows(explained):
        typer.echo(hanging(label, text, width, _INDENT))


def explanation_rows(explained: pb.ExplainMissResponse) -> Iterator[tuple[str, str]]:
    """Yield the rows of an explanation, as labels and texts."""
    miss = explained.miss
    yield "turn", str(explained.turn)
    yield "cause", f"{miss.cause}: {explained.told}"
    yield "cost", f"{miss.lost_tokens:,} tokens computed, {format_duration(miss.lost_s)}"
    if not miss.session_id:
        return
    where = f"message {miss.message_index}, " if miss.HasField("message_index") else ""
    yield "where", f"{where}token {miss.token_index:,}, unlike session {miss.session_id}"
    if explained.was or explained.now:
        yield "both", json.dumps(explained.common, ensure_ascii=False)
        yield "was", json.dumps(explained.was, ensure_ascii=False) if explained.was else "gone"
        yield "now", json.dumps(explained.now, ensure_ascii=False)
