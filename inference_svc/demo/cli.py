"""`inference-svc demo`: conversations whose turns are answered by both services in turn.

Sessions are interleaved (all first turns, then all second turns, …). Only one turn is under way at
a time, so that both services' times to first token are measured under the same conditions.
"""

import asyncio
import json
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from inference_svc.client import InferenceClient, TurnResult, turn_request
from inference_svc.demo.report import (
    LiveReport,
    Summary,
    TurnFacts,
    as_document,
    closing_words,
    summarise,
)
from inference_svc.demo.servers import DemoServers, running_servers
from inference_svc.installation import SHIPPED_MODEL, require_engine
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.terminal import printing

EXIT_DIFFERS = 1
DATA_DIR = Path(__file__).parent / "data"  # origin and licences: its README.md
OUTPUT_TOKENS = 32
NUM_TURNS_BEFORE_KILL = 4


def demo(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead.")] = False,
    keep_running: Annotated[
        bool, typer.Option("--keep-running", help="Leave both processes up until Ctrl-C.")
    ] = False,
) -> None:
    """Replay real conversations through kvd and the service, checked against recomputation.

    Exit code 0 only if every answer is identical, nine tenths of the history were loaded, before
    the kill of kvd and after it, and the first token came sooner than with recomputation.
    """
    require_engine()
    directory = Path(tempfile.mkdtemp(prefix="cachedattention-"))
    summary = asyncio.run(_run(directory, as_json=as_json, keep_running=keep_running))
    if not summary.passed:
        found = "; ".join(summary.shortfalls)
        typer.echo(
            f"inference-svc: the demo failed: {found}: the logs in {directory} may say why",
            err=True,
        )
        raise typer.Exit(EXIT_DIFFERS)
    shutil.rmtree(directory)  # an error leaves it: its message names a log in there


async def _run(directory: Path, *, as_json: bool, keep_running: bool) -> Summary:
    console = printing.console()
    turns: list[TurnFacts] = []
    if not as_json:
        console.print("Starting kvd, a service that reuses and one that recomputes …")
    async with running_servers(directory) as servers:
        with LiveReport(console, is_silent=as_json) as report:
            async for facts in replay(servers, shipped_conversations()):
                turns.append(facts)
                report.add(facts)
        if as_json:
            typer.echo(json.dumps(as_document(turns, SHIPPED_MODEL.name), indent=2))
        else:
            console.print(closing_words(summarise(turns)), highlight=False)
        if keep_running:
            await _keep_running(servers, Console(stderr=as_json))
    return summarise(turns)


async def _keep_running(servers: DemoServers, console: Console) -> None:
    console.print(
        f"\nStill running in {servers.kvd_dir.parent}; Ctrl-C ends it. Try, in another terminal:\n"
        f"  kvd ls --runtime-dir {servers.kvd_dir}\n"
        f"  inference-svc chat --address {servers.cached}",
        highlight=False,
        soft_wrap=True,
    )
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    waits = [asyncio.ensure_future(wait) for wait in (stopped.wait(), servers.wait_any())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)


@dataclass(frozen=True)
class Conversation:
    """The user's turns of one dialogue; the first one opens with a document.

    Attributes:
        session_id: the session it is replayed as.
        title: title of the document.
        turns: the user's texts, in order.
    """

    session_id: str
    title: str
    turns: tuple[str, ...]


def shipped_conversations() -> tuple[Conversation, ...]:
    """Read the conversations that come with the package."""
    rows = json.loads((DATA_DIR / "conversations.json").read_text(encoding="utf-8"))
    return tuple(Conversation(row["session"], row["title"], tuple(row["turns"])) for row in rows)


async def replay(
    servers: DemoServers, conversations: Sequence[Conversation]
) -> AsyncIterator[TurnFacts]:
    """Yield the facts of each turn; kvd is killed and restarted before the last turns."""
    async with InferenceClient(servers.cached) as cached, InferenceClient(servers.recompute) as re:
        await _warm_up(cached, re)
        stored_tokens: dict[str, int] = {}
        for turn in range(NUM_TURNS_BEFORE_KILL + 1):
            after_kill = turn == NUM_TURNS_BEFORE_KILL
            if after_kill:
                await servers.kill_and_restart_kvd(stored_tokens)
            for conversation in conversations:
                result = await _submit(cached, conversation, turn)
                again = await _submit(re, conversation, turn)
                stored_tokens[conversation.session_id] = _stored_tokens(result.usage)
                yield _facts(conversation.session_id, turn, result, again, after_kill=after_kill)


async def _submit(client: InferenceClient, conversation: Conversation, turn: int) -> TurnResult:
    message = pb.ChatMessage(role="user", content=conversation.turns[turn])
    # ignore_eos: answers of equal length, so that every history has the same share of them
    sampling = pb.Sampling(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    request = turn_request(
        [message], conversation.session_id, sampling=sampling, expected_turn=turn
    )
    return await client.submit(request)


def _stored_tokens(usage: pb.Usage) -> int:
    """Return the length of the session's KV: the last token of the answer has none yet."""
    return usage.history_tokens + usage.new_tokens + usage.output_tokens - 1


async def _warm_up(*clients: InferenceClient) -> None:
    """Run one turn that is not counted: the first forward of a process is slow."""
    for client in clients:
        sampling = pb.Sampling(max_tokens=2, ignore_eos=True)
        await client.submit(turn_request([1, 2, 3, 4], sampling=sampling, final=True))


def _facts(
    session_id: str, turn: int, result: TurnResult, again: TurnResult, *, after_kill: bool
) -> TurnFacts:
    usage = result.usage
    tiers = sorted(usage.tier_tokens, key=lambda tier: -usage.tier_tokens[tier])
    return TurnFacts(
        session_id=session_id,
        turn=turn,
        history_tokens=usage.history_tokens,
        reused_tokens=usage.reused_tokens,
        new_tokens=usage.new_tokens,
        output_tokens=usage.output_tokens,
        tiers=tuple(tiers),
        ttft_s=usage.ttft_s,
        recompute_ttft_s=again.usage.ttft_s,
        identical=result.token_ids == again.token_ids,
        after_kill=after_kill,
    )
