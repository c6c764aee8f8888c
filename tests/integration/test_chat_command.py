"""`inference-svc chat` and `status` against the real service."""

import asyncio
import json
import sys

import pytest
import pytest_asyncio

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from tests.inference_processes import InferenceProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")
QUESTIONS = ("What is a cache?", "And what is in it?")
COMMAND_S = 120.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tiny_model, tmp_path_factory):
    async with InferenceProcess(tiny_model, tmp_path_factory.mktemp("service")) as process:
        yield process


async def run_piped(*arguments: str, given: str = "") -> tuple[int, bytes, str]:
    """Run `inference-svc` between two pipes."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "inference_svc.cli.main", *arguments),
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
    )
    async with asyncio.timeout(COMMAND_S):
        out, err = await process.communicate(given.encode())
    assert process.returncode is not None
    return process.returncode, out, err.decode()


async def test_chat_is_a_filter(service):
    """Each line is a question of one conversation; the output has the answers only."""
    sampling = pb.Sampling(max_tokens=8)
    answers = []
    async with service.client() as client:
        for question in QUESTIONS:
            given = [pb.ChatMessage(role="user", content=question)]
            turn = await client.submit(turn_request(given, "as-a-client", sampling=sampling))
            answers.append(turn.text)
    content = f"{QUESTIONS[0]}\n\n{QUESTIONS[1]}\n"
    options = ("--max-tokens", "8", "--session", "in-a-pipe", "--address", service.address)
    code, out, err = await run_piped("chat", *options, given=content)
    assert (code, err) == (0, "")
    assert out.decode() == "".join(f"{answer}\n" for answer in answers)
    async with service.client() as client:
        session = await client.get_session("in-a-pipe")
    assert session.turns == len(QUESTIONS)


async def test_a_filter_ends_with_an_error(service):
    """As with other commands there is one line and an exit code."""
    at = ("--session", "not/a session", "--address", service.address)
    code, out, err = await run_piped("chat", *at, given=f"{QUESTIONS[0]}\n")
    assert code == 2
    assert out == b""
    assert err.startswith("inference-svc: ")
    assert err.count("\n") == 1


async def test_status_shows_numbers(service):
    """JSON has numbers, also large ones.

    The screen shows them with their units and measurements.
    """
    async with service.client() as client:
        await client.submit(turn_request("Once", sampling=pb.Sampling(max_tokens=4)))
    code, out, err = await run_piped("status", "--json", "--address", service.address)
    assert code == 0, err
    content = json.loads(out)
    assert content["counters"]["turns_finished"] >= 1
    assert content["kv_bytes_per_token"] > 0
    assert 0 < content["gauges"]["ttft_p50_s"] <= content["gauges"]["ttft_p95_s"]
    code, out, err = await run_piped("--address", service.address, "status")
    assert code == 0, err
    shown = out.decode()
    for words in ("first token  after", "tokens/s while it computes", "hit rate"):
        assert words in shown
    assert len(shown.splitlines()) < 24
