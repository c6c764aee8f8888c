"""More turns than the service can run: all of them end, or get a time to retry at.

Long turns ("blockers") occupy every place while a test prepares; they end when their stream is
closed. No result depends on speed.
"""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from inference_svc.client import InferenceClient, TurnResult, turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import DeadlineError, ReportedError
from shared.types.units import MIB
from tests.inference_processes import InferenceProcess
from tests.models import WINDOW_TOKENS

pytestmark = pytest.mark.asyncio(loop_scope="module")

MANY_TURNS = 1000
FIRST_TURNS = 50
SMALL_TURNS = 32
PATIENT_TURNS = 40  # more turns than places, so that hints are followed again and again
MAX_RUNNING = 8
ANSWER_TOKENS = 8
SHORT = pb.Sampling(max_tokens=ANSWER_TOKENS, ignore_eos=True)
BLOCKING = pb.Sampling(max_tokens=WINDOW_TOKENS - 64, ignore_eos=True)
# Every running turn may be a blocker, with as many tokens left for others.
KV_TOKENS = 2 * MAX_RUNNING * WINDOW_TOKENS
# Memory that the service may keep per open turn: messages of its stream, events, record, token ids.
TURN_BYTES = 48 * 1024
SPARE_BYTES = 32 * MIB  # buffers of torch and of gRPC, arenas of malloc


@asynccontextmanager
async def serving(model: Path, max_turns: int, max_running: int) -> AsyncIterator[InferenceProcess]:
    """Run a service without kvd that gives every turn room for its whole answer at once."""
    directory = Path(tempfile.mkdtemp(prefix="ca-"))
    settings = directory / "settings.toml"
    settings.write_text(
        f"[scheduler]\nmax_turns = {max_turns}\nmax_running = {max_running}\n"
        f"kv_tokens = {KV_TOKENS}\nanswer_tokens = {WINDOW_TOKENS}\n"
    )
    async with InferenceProcess(model, directory, flags=("--config", str(settings))) as service:
        yield service
    shutil.rmtree(directory)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def roomy(tiny_model):
    """Run a service with a place for every turn."""
    async with serving(tiny_model, MANY_TURNS + 24, MAX_RUNNING) as service:
        yield service


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small(tiny_model):
    """Run a service with a place for few turns."""
    async with serving(tiny_model, SMALL_TURNS, MAX_RUNNING) as service:
        yield service


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def single(tiny_model):
    """Run a service that runs one turn at a time."""
    async with serving(tiny_model, SMALL_TURNS, 1) as service:
        yield service


def short_turn(session_id: str, **fields: object) -> pb.SubmitTurnRequest:
    """Make a turn of a few tokens, with a different text for each session."""
    return turn_request(f"{session_id} says ", session_id, sampling=SHORT, **fields)


def slow(prefix: str) -> list[str]:
    """Return names of blockers that, one after the other, take longer than any deadline here."""
    return [f"{prefix}-{number}" for number in range(8)]


@asynccontextmanager
async def blockers(
    client: InferenceClient, names: Sequence[str], until: str
) -> AsyncIterator[None]:
    """Run long turns, each followed up to its first event `until`; end them at the exit."""
    async with AsyncExitStack() as streams:
        for name in names:
            request = turn_request("Go ", name, sampling=BLOCKING)
            events = await streams.enter_async_context(aclosing(client.stream_turn(request)))
            async for event in events:
                if event.WhichOneof("event") == until:
                    break
        yield


async def submit_all(
    client: InferenceClient, requests: Sequence[pb.SubmitTurnRequest], on_event=lambda _: None
) -> list[TurnResult]:
    """Run turns at once, all to their ends."""
    return await asyncio.gather(*(client.submit(r, on_event=on_event) for r in requests))


def assert_whole(results: Sequence[TurnResult]) -> None:
    """Check that every turn has its full answer, in its own session."""
    assert {result.finished.finish_reason for result in results} == {"length"}
    assert {len(result.token_ids) for result in results} == {ANSWER_TOKENS}
    assert len({result.accepted.session_id for result in results}) == len(results)


@pytest.mark.parametrize("num_turns", [60, pytest.param(MANY_TURNS, marks=pytest.mark.long)])
async def test_very_many_open_turns_all_end_and_memory_is_bounded(roomy, num_turns):
    """No turn is lost or stuck; memory grows by the working KV and a little for each turn."""
    sizes = []

    async def open_all(client, requests):
        accepted = asyncio.Semaphore(0)

        def on_event(event):
            kind = event.WhichOneof("event")
            if kind == "accepted":
                accepted.release()
            elif kind == "finished":
                sizes.append(roomy.rss_bytes())

        names = [f"blocker-{number}" for number in range(MAX_RUNNING)]
        async with blockers(client, names, until="tokens"):
            turns = asyncio.create_task(submit_all(client, requests, on_event))
            for _ in requests:
                await accepted.acquire()
            model = await client.get_model()
            assert model.running_turns + model.waiting_turns >= num_turns
        return await turns

    async with roomy.client() as client:
        begun = (await client.get_model()).counters["turns_finished"]
        names = [f"first-{n}-of-{num_turns}" for n in range(FIRST_TURNS)]
        first = await submit_all(client, [short_turn(name) for name in names])
        before = roomy.rss_bytes()
        names = [f"open-{n}-of-{num_turns}" for n in range(num_turns)]
        results = await open_all(client, [short_turn(name) for name in names])
        model = await client.get_model()
    assert_whole(first)
    assert_whole(results)
    assert (model.running_turns, model.waiting_turns) == (0, 0)
    assert model.counters["turns_finished"] == begun + FIRST_TURNS + num_turns
    assert model.counters["turns_failed"] == model.counters["turns_refused"] == 0
    bound = KV_TOKENS * model.kv_bytes_per_token + num_turns * TURN_BYTES + SPARE_BYTES
    assert max(sizes) - before <= bound


async def test_a_full_service_gives_a_time_to_retry_at(small):
    """Every refusal has the queue's length and a hint; clients that follow the hints are served."""
    refusals, refused = [], asyncio.Semaphore(0)

    def on_refused(error):
        refusals.append(error)
        refused.release()

    requests = [short_turn(f"patient-{number}") for number in range(PATIENT_TURNS)]
    async with small.client() as client:
        await submit_all(client, [short_turn(f"early-{n}") for n in range(MAX_RUNNING)])
        async with blockers(client, [f"blocker-{n}" for n in range(SMALL_TURNS)], "accepted"):
            turns = asyncio.gather(
                *(client.submit_patiently(request, on_refused=on_refused) for request in requests)
            )
            for _ in requests:  # each at least once, because there is no place
                await refused.acquire()
            model = await client.get_model()
        assert_whole(await turns)
    assert model.counters["turns_refused"] >= PATIENT_TURNS
    for refusal in refusals:
        assert refusal.reason == "queue_full"
        assert refusal.details == {"queue_length": str(SMALL_TURNS)}
        assert refusal.retry_after_s > 0
        assert refusal.remedy


async def test_a_higher_priority_is_served_first(single):
    """It preempts running turns and overtakes waiting ones; equal priorities keep their order."""
    names = [f"low-{number}" for number in range(3)]
    async with single.client() as client:
        turns = []
        async with blockers(client, slow("ahead"), until="accepted"):
            for name in names:
                accepted = asyncio.Event()
                turn = client.submit(
                    short_turn(name), on_event=lambda _, event=accepted: event.set()
                )
                turns.append(asyncio.create_task(turn))
                await accepted.wait()
            high = await client.submit(short_turn("high", priority=10))
            model = await client.get_model()
            assert not any(turn.done() for turn in turns)
        assert_whole([high, *await asyncio.gather(*turns)])
        sessions = [await client.get_session(name, with_turns=True) for name in names]
    assert model.counters["preempted"] >= 1
    recorded = [session.turn_records[0].created_unix_s for session in sessions]
    assert recorded == sorted(recorded)


async def late(client: InferenceClient, request: pb.SubmitTurnRequest, **options) -> ReportedError:
    """Check that the turn ends with its deadline; return the error."""
    with pytest.raises(DeadlineError) as caught:
        await client.submit(request, **options)
    assert caught.value.retryable
    assert caught.value.remedy
    return caught.value


async def test_a_turn_whose_deadline_passes_in_the_queue_does_not_change_its_session(single):
    """It ends with DEADLINE_EXCEEDED, wherever it waits, and the session continues afterwards."""
    async with single.client() as client:
        await client.submit(short_turn("hurried"))
        before = await client.get_session("hurried", with_turns=True)
        expired_before = (await client.get_model()).counters["expired"]
        async with blockers(client, slow("slow"), until="accepted"):
            error = await late(client, short_turn("hurried", deadline_s=0.2))
            assert error.reason == "deadline_exceeded"
            error = await late(client, short_turn("slow-7", deadline_s=0.2, wait=True))
            assert "waited for its session" in error.message
            model = await client.get_model()
            await late(client, short_turn("hurried"), timeout_s=0.2)  # the RPC's own deadline
        assert model.counters["expired"] - expired_before == 2
        after = await client.get_session("hurried", with_turns=True)
        assert after.turn_records == before.turn_records
        result = await client.submit(short_turn("hurried", wait=True, deadline_s=60.0))
    assert result.accepted.turn == 1


async def test_a_repeat_with_a_later_deadline_extends_the_turn(single):
    """The turn's deadline is the latest of the clients that follow it."""
    async with single.client() as client:
        async with blockers(client, slow("before"), until="accepted"):
            turns = []
            for deadline_s in (1.0, 60.0):
                request = short_turn("shared", request_id="once", deadline_s=deadline_s)
                accepted = asyncio.Event()
                turn = client.submit(request, on_event=lambda _, event=accepted: event.set())
                turns.append(asyncio.create_task(turn))
                await accepted.wait()
            # the first client's deadline has passed
            error = await late(client, short_turn("other", deadline_s=1.2))
            assert error.reason == "deadline_exceeded"
        one, other = await asyncio.gather(*turns)
    assert one.token_ids == other.token_ids
    assert len(one.token_ids) == ANSWER_TOKENS
