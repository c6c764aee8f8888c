"""A service without network APIs over a real engine: turns are submitted, answered and recorded."""

import asyncio
import hashlib
import threading
import time
from contextlib import asynccontextmanager
from itertools import count

import pytest

from inference_svc.core.answers import SamplingParams
from inference_svc.core.edits import EditPolicy
from inference_svc.core.session_turns import SessionTurns
from inference_svc.core.submission import Submission, TokenInput
from inference_svc.core.tenant_limits import TenantBounds, TenantLimits
from inference_svc.core.truncation import OverflowPolicy
from inference_svc.core.turn_histograms import TurnHistograms
from inference_svc.core.turn_record import Tokens
from inference_svc.runtime.compute.grammars import Grammars
from inference_svc.runtime.turns.chat_text import TurnText
from inference_svc.runtime.turns.kept_edits import EditKeeper
from inference_svc.runtime.turns.misses import MissExplainer
from inference_svc.runtime.turns.shared_histories import SharedHistories
from inference_svc.runtime.turns.shared_transcripts import SharedTranscripts
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.runtime.turns.turn_prompt import PromptMaker, TurnLimits
from inference_svc.runtime.turns.turn_report import TurnReport
from inference_svc.runtime.turns.turn_runner import TurnRunner
from inference_svc.runtime.turns.turns import Turns
from inference_svc.runtime.worker_thread import WorkerThread
from shared.types.errors import ReportedError
from shared.types.session_key import SessionKey
from tests.memory_engine import running_engine

KEY = SessionKey("default", "m", "s")
LIMITS = TurnLimits(200, 512, frozenset(), reserve_tokens=8, compress_tokens=30)
NO_SINKS = OverflowPolicy(sink_tokens=0)


class Service:
    """A service without network APIs: turns, their runner, an engine, and their metrics."""

    def __init__(self, engine, model, directory, limits, calls=None):
        self.engine, self.counters = engine, engine.counters
        shared = (SharedTranscripts(calls), SharedHistories(calls)) if calls else ()
        self.store = TranscriptStore(directory, *shared)
        self.histograms = TurnHistograms()
        self.thread = WorkerThread("text")
        tokenizer, report = model[0].tokenizer, TurnReport(self.histograms)
        self.text = text = TurnText(tokenizer, limits.eos_ids)
        grammars = Grammars(tokenizer, limits.vocab_size, limits.eos_ids)
        self.prompts = prompts = PromptMaker(text, self.thread, limits, has_tokenizer=True)
        numbers = count(1)
        self.edits = EditKeeper(
            *(engine.loop.graft, engine.store, self.store, self.thread, numbers),
            pays=lambda _start, _end: True,
            policy=EditPolicy(),
            least_tokens=1,
        )
        runner = TurnRunner(
            *(engine.loop, self.store, prompts, grammars, tokenizer, limits),
            *(self.counters, report, numbers),
            MissExplainer(self.store, text, self.thread),
            self.edits,
        )
        self.turns = Turns(
            *(
                runner.answer,
                self.store,
                engine.loop,
                SessionTurns(9, 9, lambda: 1.0, lambda turn: turn.is_cancelled),
            ),
            *(TenantLimits(TenantBounds(), {}), self.counters, report),
        )

    async def run(self, token_ids, max_tokens=8, **fields):
        """Run one turn to its end; return its events."""
        turn = await self.turns.submit(make_turn(token_ids, max_tokens, **fields))
        return [event async for event in turn.follow()]

    async def transcript(self):
        return (await self.turns.sessions.get(KEY))[0]

    async def counts(self, *names):
        """Return some counts, once no turn is active."""
        await self.turns.idle.wait()
        snapshot = self.counters.snapshot()
        return tuple(snapshot[name] for name in names)


def make_turn(token_ids, max_tokens=8, request_id="", **fields):
    """Make a turn of these tokens whose answer is as long as possible."""
    token_ids = tuple(token_ids)
    given = {
        "key": KEY,
        "input": TokenInput(token_ids),
        "sampling": SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        "has_max_tokens": True,
        "request_id": request_id or f"of {token_ids} {fields}",
        "digest": hashlib.sha256(repr(token_ids).encode()).hexdigest(),
        "expected_turn": None,
        "waits": True,
        "is_final": False,
        "arrived_ns": 1,
        "overflow": NO_SINKS,
    }
    return Submission(**{**given, **fields})


@asynccontextmanager
async def serving(model, directory, limits=LIMITS, calls=None, **engine_limits):
    """Run a service; with shared transcripts if a store's calls are given."""
    async with running_engine(model, **engine_limits) as engine:
        service = Service(engine, model, directory, limits, calls)
        running = asyncio.create_task(service.turns.run())
        await asyncio.sleep(0)
        yield service
        await service.turns.idle.wait()
        await engine.all_released()
        assert not running.done()
        running.cancel()
        await asyncio.wait([running])
        service.thread.close()


@asynccontextmanager
async def block_thread(thread):
    """Keep a worker thread busy inside the block."""
    may_go_on = threading.Event()
    blocking = asyncio.create_task(thread.run(may_go_on.wait))
    await asyncio.sleep(0)
    try:
        yield
    finally:
        may_go_on.set()
        await blocking


def token_ids_of(events):
    return [token.token_id for e in events if isinstance(e, Tokens) for token in e.tokens]


async def failure_of(turn):
    """Return the error in a stream's last event."""
    with pytest.raises(ReportedError) as caught:
        _ = [event async for event in turn.follow()]
    return caught.value


async def first_token(turn):
    """Return the events up to the first token, and the rest of the stream."""
    events = turn.follow()
    async for event in events:
        if isinstance(event, Tokens):
            return events
    raise AssertionError("it has no token")


async def until(is_so):
    """Poll for a condition that has no event; the event loop runs meanwhile."""
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.to_thread(time.sleep, 0.001)
