"""`inference-svc demo`."""

import asyncio
import json
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from inference_svc.demo.replay import replay, shipped_conversations
from inference_svc.demo.report import (
    LiveReport,
    Summary,
    TurnFacts,
    as_document,
    closing_words,
    summarise,
)
from inference_svc.demo.servers import MODEL_DIR, DemoServers, running_servers
from inference_svc.installation import require_engine
from shared.terminal import printing

EXIT_DIFFERS = 1


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
            f"inference-svc: the demo failed: {found}: read the logs in {directory}", err=True
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
            typer.echo(json.dumps(as_document(turns, MODEL_DIR.name), indent=2))
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
