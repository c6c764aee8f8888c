"""`inference-svc chat`: a conversation with a service on a terminal, or a filter in a pipe.

On a terminal, answers are wrapped between words while they stream, and each shows its reuse.
"""

import asyncio
import json
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Annotated

import typer
from rich.cells import cell_len
from rich.console import Console

from inference_svc.cli.connection import Address, TlsCa, TlsCert, TlsKey, TokenFile, client_of
from inference_svc.client import InferenceClient, turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.terminal import printing
from shared.types.errors import InvalidInputError, ReportedError
from shared.types.units import format_duration

_PIECE = re.compile(r"\n|[^\S\n]+|\S+")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # control characters, which are dropped


class WordWrap:
    """Wraps a streamed text for a terminal; a word is held back until its end has arrived.

    A word wider than the terminal is passed on unchanged: the terminal breaks it itself.

    Args:
        width: columns of the terminal.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._blanks = ""  # blanks before the held-back word
        self._word = ""

    def feed(self, text: str) -> str:
        """Add text, and return the text to show now."""
        shown = []
        for piece in _PIECE.findall(_CONTROL.sub("", text)):
            if piece.isspace():
                shown.append(self._finish_word())
                if piece == "\n":
                    self._column, self._blanks = 0, ""
                    shown.append(piece)
                else:
                    self._blanks += piece.replace("\t", " ")
            else:
                self._word += piece
                if cell_len(self._word) >= self._width:  # a text may have no blanks at all
                    shown.append(self._finish_word())
        return "".join(shown)

    def end(self) -> str:
        """Return the text that was held back."""
        return self._finish_word()

    def _finish_word(self) -> str:
        if not self._word:
            return ""
        size, space = cell_len(self._word), cell_len(self._blanks)
        breaks = self._column and self._column + space + size > self._width
        shown = ("\n" if breaks else self._blanks) + self._word
        self._column = (0 if breaks else self._column + space) + size
        if self._column > self._width:
            self._column %= self._width
        self._blanks = self._word = ""
        return shown


HELP = "an empty line or Ctrl-D leaves; the session stays and can be continued with --session"

RequestOf = Callable[[str, str], pb.SubmitTurnRequest]


def chat(
    address: Address,
    session: Annotated[str, typer.Option(help="Continue this session.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 0.0,
    template: Annotated[
        list[str] | None,
        typer.Option(
            "--template-argument",
            metavar="NAME=JSON",
            help="Of the chat template, such as enable_thinking=false; may be repeated.",
        ),
    ] = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Talk to a running service; each answer shows what was reused.

    In a pipe it is a filter: each line of stdin is a question, and only answers come out.
    """
    arguments = template_arguments(template or [])
    sampling = pb.Sampling(max_tokens=max_tokens, temperature=temperature)

    async def connect_and_talk() -> None:
        client = client_of(address, token_file, tls_ca, tls_cert, tls_key)
        await talk(client, session, sampling, arguments)

    asyncio.run(connect_and_talk())


def template_arguments(pairs: Sequence[str]) -> str:
    """Return NAME=JSON pairs as one JSON object, "" if there are none.

    A value that is not JSON is taken as a text.

    Raises:
        InvalidInputError: a pair has no name, or no "=".
    """
    arguments = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise InvalidInputError(
                f"--template-argument {pair!r} has no value", "write it as NAME=JSON"
            )
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return json.dumps(arguments) if arguments else ""


async def talk(
    client: InferenceClient, session_id: str, sampling: pb.Sampling, arguments: str = ""
) -> None:
    """Hold a conversation until the user leaves, then close the client.

    Without a terminal at both ends it is a filter: each line is a question, and only the answers
    are written. A filter ends at the first error; at a terminal the conversation continues.

    Args:
        client: the service's client.
        session_id: the session to continue; "" begins one.
        sampling: the sampling of each answer.
        arguments: arguments of the chat template, as a JSON object; "" for none.

    Raises:
        ReportedError: the service cannot be reached, or cannot use the arguments; in a filter
            also: a turn failed.
    """
    async with client:
        model = await client.get_model()
        if arguments and not model.has_chat_template:
            raise InvalidInputError(
                "the model has no chat template", "leave --template-argument out"
            )

        def request_of(line: str, session_id: str) -> pb.SubmitTurnRequest:
            message = (
                [pb.ChatMessage(role="user", content=line)] if model.has_chat_template else line
            )
            request = turn_request(message, session_id, sampling=sampling, wait=True)
            if arguments:
                request.chat.template_arguments = arguments
            return request

        if sys.stdin.isatty() and sys.stdout.isatty():
            await _converse(client, model, request_of, session_id)
        else:
            await _filter(client, request_of, session_id)


async def _converse(
    client: InferenceClient, model: pb.Model, request_of: RequestOf, session_id: str
) -> None:
    """Prompt the user for lines and answer them, until a line is empty."""
    console = printing.console()
    console.print(f"[bold]{model.name}[/] {model.mode}, kvd {model.kvd_state} — {HELP}")
    while line := await _ask(console):
        try:
            session_id = await _answer(console, client, request_of(line, session_id))
        except ReportedError as error:
            console.print(str(error), style="red", markup=False)
    if session_id:
        console.print(f"[dim]session {session_id}[/]")


async def _filter(client: InferenceClient, request_of: RequestOf, session_id: str) -> None:
    """Answer the lines of stdin, except blank ones."""
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        question = line.decode(errors="replace").strip()
        if not question:
            continue
        async with aclosing(client.stream_turn(request_of(question, session_id))) as events:
            async for event in events:
                if event.HasField("accepted"):
                    session_id = event.accepted.session_id
                elif event.HasField("tokens"):
                    _write("".join(token.text for token in event.tokens.tokens))
        _write("\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


async def _ask(console: Console) -> str:
    """Read one line of the user; "" at the end of the input."""
    try:
        return (await asyncio.to_thread(console.input, "[bold cyan]you>[/] ")).strip()
    except EOFError:
        return ""


async def _answer(console: Console, client: InferenceClient, request: pb.SubmitTurnRequest) -> str:
    """Show the answer as it streams, then its usage; return the session's id."""
    session_id = request.session_id
    wrap = WordWrap(console.width)
    async with aclosing(client.stream_turn(request)) as events:
        async for event in events:
            kind = event.WhichOneof("event")
            if kind == "accepted":
                session_id = event.accepted.session_id
            elif kind == "tokens":
                _write(wrap.feed("".join(token.text for token in event.tokens.tokens)))
            elif kind == "finished":
                _write(wrap.end() + "\n")
                console.print(describe(event.finished.usage), style="dim", markup=False)
    return session_id


def describe(usage: pb.Usage) -> str:
    """Return one line about the reuse and the times of a turn."""
    tiers = ", ".join(f"{tokens} from {tier}" for tier, tokens in sorted(usage.tier_tokens.items()))
    parts = [
        f"history {usage.history_tokens}",
        f"reused {usage.reused_tokens}" + (f" ({tiers})" if tiers else ""),
        f"recomputed {usage.recomputed_tokens}"
        + (f" ({usage.recompute_reason})" if usage.recompute_reason else ""),
        f"new {usage.new_tokens}",
        f"first token after {format_duration(usage.ttft_s)}",
        f"{format_duration(usage.tpot_s)} a token",
    ]
    if usage.accepted_tokens:
        parts.append(f"{usage.accepted_tokens} of {usage.drafted_tokens} drafted were right")
    if usage.stall_s:
        parts.append(f"waited {format_duration(usage.stall_s)} for layers")
    if usage.dropped_tokens:
        parts.append(f"window full, dropped {usage.dropped_tokens}")
    if usage.compressed_tokens:
        parts.append(f"compressed away {usage.compressed_tokens}")
    if usage.preemptions:
        parts.append(f"interrupted {usage.preemptions} times")
    return " · ".join(parts)
