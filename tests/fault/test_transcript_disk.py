"""The transcripts' disk is full: which calls are refused, what is left, and how it recovers."""

import json

import httpx2
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import ExhaustedError
from tests.fault.test_disk import small_disk
from tests.inference_processes import InferenceProcess

DISK_BYTES = 2 << 20
SHORT = pb.Sampling(max_tokens=2, ignore_eos=True)
# Its record is longer than the free rest of the last block of any file.
LONG = [5] * 1800


@pytest_asyncio.fixture
async def service(tiny_model, short_dir):
    """Run a service whose state is on its own small file system."""
    settings = short_dir / "settings.toml"
    settings.write_text(
        f'[openai]\nlisten = "unix:{short_dir}/openai.sock"\n'
        f'[metrics]\nlisten = "unix:{short_dir}/metrics.sock"\n'
    )
    process = InferenceProcess(tiny_model, short_dir, flags=["--config", str(settings)])
    with small_disk(short_dir / "state", DISK_BYTES):
        async with process:
            yield process


def fill(path):
    """Fill every free block; tmpfs has whole pages only."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def events(service, name):
    lines = service.log_path.read_text().splitlines()
    return [json.loads(line) for line in lines if f'"event": "{name}"' in line]


async def metric(directory, name):
    transport = httpx2.AsyncHTTPTransport(uds=str(directory / "metrics.sock"))
    async with httpx2.AsyncClient(transport=transport) as client:
        text = (await client.get("http://localhost/metrics")).text
    return {line for line in text.splitlines() if line.startswith(name)}


async def test_a_disk_that_fills_up_and_is_emptied(service, short_dir, outcome):
    """New sessions are refused before they cost anything, old ones continue while a record fits."""
    sessions, ballast = short_dir / "state" / "sessions", short_dir / "state" / "ballast"
    transport = httpx2.AsyncHTTPTransport(uds=str(short_dir / "openai.sock"))
    http = httpx2.AsyncClient(transport=transport)
    hello = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    async with (
        service.client() as client,
        AsyncOpenAI(
            api_key="any", base_url="http://localhost/v1", http_client=http, max_retries=0
        ) as chats,
    ):
        await client.submit(turn_request("Hi", "old", sampling=SHORT))
        first = await chats.chat.completions.create(**hello)
        fill(ballast)
        for given, name in ((LONG, "old"), ("Hi", "new"), ("Hi", "newer")):
            with pytest.raises(ExhaustedError) as refused:
                await client.submit(turn_request(given, name, sampling=SHORT))
            assert refused.value.reason == "transcript_disk_full"
            assert refused.value.retry_after_s == 30
        steps = (await client.get_model()).counters["steps"]
        with pytest.raises(openai.APIStatusError) as answered:
            await chats.chat.completions.create(**hello)
        assert (answered.value.status_code, answered.value.code) == (503, "transcript_disk_full")
        assert answered.value.response.headers["retry-after"] == "30"
        assert (await client.get_model()).counters["steps"] == steps  # no token was computed for it
        went_on = await client.submit(turn_request("Hi", "old", sampling=SHORT))
        assert went_on.finished.turns == 2
        follow_up = [
            *hello["messages"],
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "So?"},
        ]
        second = await chats.chat.completions.create(**{**hello, "messages": follow_up})
        assert second.model_extra["session_id"] == first.model_extra["session_id"]
        assert all(path.stat().st_size for path in sessions.glob("*.jsonl"))
        assert len(list(sessions.glob("*.jsonl"))) == 2
        warned = events(service, "transcript_disk_full")
        assert 1 <= len(warned) <= 5
        assert {(line["level"], line["remedy"]) for line in warned} == {
            ("warning", "free some space there")
        }
        assert all(line["path"].startswith(str(sessions)) for line in warned)
        (found,) = await metric(short_dir, "inference_transcript_errors_total{")
        assert found.startswith('inference_transcript_errors_total{error="full"} ')
        ballast.unlink()
        await client.submit(turn_request(LONG, "old", sampling=SHORT))
        await client.submit(turn_request("Hi", "new", sampling=SHORT))
        assert len(events(service, "transcript_disk_has_room")) == 1
    await service.kill()
    await service.start()
    async with service.client() as client:
        assert (await client.get_session("old")).turns == 3
        assert (await client.get_session("new")).turns == 1
    outcome("refused with a time to come back, old sessions went on, all recorded turns are there")
