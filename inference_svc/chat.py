"""`inference-svc chat`: a terminal chat against a running service, showing reuse per turn."""

import asyncio
from contextlib import aclosing

from rich.console import Console

from inference_svc.client import InferenceClient, turn_request
from shared.errors import ReportedError
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.units import format_duration

HELP = "an empty line or Ctrl-D leaves; the session stays and can be continued with --session"


async def chat(
    client: InferenceClient, session_id: str, max_tokens: int, temperature: float
) -> None:
    """Talk until the user leaves, and close the client.

    Raises:
        ReportedError: the service cannot be reached.
    """
    console = Console(highlight=False)
    sampling = pb.Sampling(max_tokens=max_tokens, temperature=temperature)
    async with client:
        model = await client.get_model()
        console.print(f"[bold]{model.name}[/] {model.mode}, kvd {model.kvd_state} — {HELP}")
        while line := await _ask(console):
            given = [pb.ChatMessage(role="user", content=line)] if model.has_chat_template else line
            request = turn_request(given, session_id, sampling=sampling, wait=True)
            try:
                session_id = await _answer(console, client, request)
            except ReportedError as error:
                console.print(str(error), style="red", markup=False)
        if session_id:
            console.print(f"[dim]session {session_id}[/]")


async def _ask(console: Console) -> str:
    """One line of the user, "" at the end of input."""
    try:
        return (await asyncio.to_thread(console.input, "[bold cyan]you>[/] ")).strip()
    except EOFError:
        return ""


async def _answer(console: Console, client: InferenceClient, request: pb.SubmitTurnRequest) -> str:
    """Show the answer as it comes, then what it cost; return the session's id."""
    session_id = request.session_id
    async with aclosing(client.stream_turn(request)) as events:
        async for event in events:
            kind = event.WhichOneof("event")
            if kind == "accepted":
                session_id = event.accepted.session_id
            elif kind == "tokens":
                text = "".join(token.text for token in event.tokens.tokens)
                console.print(text, end="", markup=False)
            elif kind == "finished":
                console.print()
                console.print(describe(event.finished.usage), style="dim", markup=False)
    return session_id


def describe(usage: pb.Usage) -> str:
    """One line about where the prompt's tokens came from."""
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
    if usage.stall_s:
        parts.append(f"waited {format_duration(usage.stall_s)} for layers")
    if usage.dropped_tokens:
        parts.append(f"window full, dropped {usage.dropped_tokens}")
    if usage.compressed_tokens:
        parts.append(f"compressed away {usage.compressed_tokens}")
    if usage.preemptions:
        parts.append(f"interrupted {usage.preemptions} times")
    return " · ".join(parts)
