"""Hostile clients of the inference service learn nothing, cost little, and disturb no others.

One service at a port for all tests; an honest client submits turns all the time, and its
answers do not change.
"""

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inference_svc.cli.main import app
from inference_svc.client import InferenceClient, TurnResult, turn_request
from shared.access.channels import ClientCredentials, aio_channel_of
from shared.access.tokens import token_digest
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.process.runtime_dir import MAX_MESSAGE_BYTES, channel_options
from shared.types.errors import DeniedError, NotFoundError, ReportedError, UnauthenticatedError
from tests.fuzz.hostile import (
    PREFACE,
    SETTINGS,
    open_unfinished_calls,
    others_are_served,
    silent_connections,
    throw_garbage,
)
from tests.inference_processes import InferenceProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = {name: f"kvt_{name}-very-secret" for name in ("acme", "other", "watch")}
SERVICE = pb.DESCRIPTOR.services_by_name["Inference"]
SUBMIT = f"/{SERVICE.full_name}/SubmitTurn"
SHORT = pb.Sampling(max_tokens=4)
LONG = pb.Sampling(max_tokens=400)


@dataclass
class Attacked:
    """The service, and an honest client of it."""

    service: InferenceProcess
    honest: InferenceClient
    answers: set[tuple[int, ...]] = field(default_factory=set)

    def channel(self, name: str) -> grpc.aio.Channel:
        """Open a connection as a client of this name; "": without a token."""
        credentials = ClientCredentials(TOKENS.get(name, name)) if name else None
        return aio_channel_of(self.service.address, credentials, channel_options())

    def client(self, name: str) -> InferenceClient:
        """Return a client of this name, or one with an unknown token."""
        return InferenceClient(
            self.service.address, ClientCredentials(TOKENS.get(name, name)) if name else None
        )

    async def honest_work(self) -> None:
        """Run a turn, whose answer is always the same, and a look by a new connection."""
        result: TurnResult = await self.honest.submit(turn_request("Hello", sampling=SHORT))
        self.answers.add(tuple(result.token_ids))
        async with self.client("acme") as newcomer:
            await newcomer.get_model()
        assert len(self.answers) == 1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def attacked(tiny_model, tmp_path_factory) -> AsyncIterator[Attacked]:
    """Run one service for all tests; it logs no token and no unexpected error."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    environ = {}
    for name, token in TOKENS.items():
        environ[f"INFERENCE_CLIENTS__{name.upper()}__TOKEN_SHA256"] = token_digest(token)
        environ[f"INFERENCE_CLIENTS__{name.upper()}__TENANTS"] = name
    environ["INFERENCE_CLIENTS__WATCH__ROLES"] = "reader"
    directory = tmp_path_factory.mktemp("h")
    service = InferenceProcess(
        tiny_model,
        directory,
        environ=environ,
        address=address,
        credentials=ClientCredentials(TOKENS["acme"]),
    )
    async with service, service.client() as honest:
        found = Attacked(service, honest)
        await found.honest_work()
        yield found
    log = service.log_path.read_text()
    for secret in (*TOKENS.values(), *map(token_digest, TOKENS.values()), "Traceback"):
        assert secret not in log


async def test_every_call_needs_a_token(attacked):
    """A missing and a wrong one are refused with the same words by every method; health is open."""
    messages = set()
    for name in ("", "kvt_guess"):
        async with attacked.channel(name) as channel:
            for method in SERVICE.methods:
                path = f"/{SERVICE.full_name}/{method.name}"
                call = channel.unary_stream(path)(b"", timeout=60)
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
                messages.add(await call.details())
            asked = health_pb2.HealthCheckRequest(service=SERVICE.full_name)
            status = await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=60)
            assert status.status == health_pb2.HealthCheckResponse.SERVING
    assert len(messages) == 1


async def test_a_role_allows_its_own_calls_only(attacked):
    """A client that may read metrics cannot submit a turn."""
    async with attacked.client("watch") as client:
        with pytest.raises(DeniedError) as denied:
            await client.submit(turn_request("Hello", sampling=SHORT))
    assert denied.value.reason == "role_denied"


async def test_sessions_of_other_tenants_cannot_be_seen(attacked):
    """They are unknown to other tenants, whose names are refused whether they exist or not."""
    await attacked.honest.submit(turn_request("Hello", "secret-talk", sampling=SHORT))

    async def refused(call) -> ReportedError:
        with pytest.raises(ReportedError) as caught:
            await call
        return caught.value

    async with attacked.client("other") as client:
        for missing in (client.get_session("secret-talk"), client.delete_session("secret-talk")):
            assert isinstance(await refused(missing), NotFoundError)
        messages = set()
        for tenant in ("acme", "nobody"):
            for call in (
                client.get_session("secret-talk", tenant=tenant),
                client.delete_session("secret-talk", tenant=tenant),
                client.end_session("secret-talk", tenant=tenant),
                client.expect_session("secret-talk", ["bash"], tenant=tenant),
                client.fork_session("secret-talk", tenant=tenant),
                client.cancel("secret-talk", tenant=tenant),
                client.discard("secret-talk", [(0, 1)], tenant=tenant),
                client.submit(turn_request("Hi", "secret-talk", tenant=tenant, sampling=SHORT)),
            ):
                error = await refused(call)
                assert error.reason == "tenant_denied"
                messages.add(str(error).replace(tenant, "T"))
        assert len(messages) == 1
        own = await client.submit(turn_request("Hello", "secret-talk", sampling=SHORT))
        assert own.usage.history_tokens == 0
    assert (await attacked.honest.get_session("secret-talk")).turns == 1


async def test_connections_and_calls_that_are_never_finished(attacked):
    """Hundreds send nothing, noise, or calls without their message: turns continue."""
    address = attacked.service.address
    async with (
        others_are_served(attacked.honest_work),
        attacked.channel("other") as known,
        attacked.channel("") as strangers,
    ):
        with (
            silent_connections(address, 200),
            silent_connections(address, 100, PREFACE + SETTINGS),
            open_unfinished_calls(known, SUBMIT, 300),
        ):
            await throw_garbage(address, 1)
            with open_unfinished_calls(strangers, SUBMIT, 200) as calls:
                for call in calls:
                    assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            await attacked.honest_work()


async def test_malformed_and_too_large_messages_are_refused(attacked):
    """It is the caller's error; messages of strangers are not even read."""
    body = bytes(MAX_MESSAGE_BYTES + 1)
    options = (("grpc.max_send_message_length", -1),)
    async with (
        others_are_served(attacked.honest_work),
        attacked.channel("other") as known,
        aio_channel_of(attacked.service.address, None, options) as strangers,
        aio_channel_of(
            attacked.service.address, ClientCredentials(TOKENS["other"]), options
        ) as large,
    ):
        for method in SERVICE.methods:
            path = f"/{SERVICE.full_name}/{method.name}"
            call = known.unary_stream(path)(b"\xff" * 50, timeout=60)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        for _ in range(3):
            call = large.unary_stream(SUBMIT)(body, timeout=60)
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            call = strangers.unary_stream(SUBMIT)(body, timeout=60)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_clients_who_do_not_read_their_answers(attacked):
    """Dozens of long answers are not read: other clients get theirs, and the memory comes back."""
    async with (
        others_are_served(attacked.honest_work),
        attacked.channel("other") as channel,
    ):
        requests = [turn_request("Hello", sampling=LONG) for _ in range(40)]
        submit = channel.unary_stream(SUBMIT, pb.SubmitTurnRequest.SerializeToString)
        calls = [submit(request, timeout=60) for request in requests]
        for call in calls:
            await call.wait_for_connection()
        for _ in range(2):
            await attacked.honest_work()
        for call in calls:
            call.cancel()
    async with attacked.client("other") as client:
        await client.submit(turn_request("Hello", sampling=SHORT))


async def test_unknown_tokens_are_hardly_logged(attacked):
    """A flood of guesses writes a few lines, not one per guess."""
    async with attacked.client("kvt_guess") as client:

        async def guess() -> None:
            with pytest.raises(UnauthenticatedError):
                await client.get_model()

        async with others_are_served(attacked.honest_work):
            await asyncio.gather(*(guess() for _ in range(100)))
    log = attacked.service.log_path.read_text()
    assert 0 < log.count("access_refused") < 100


async def test_the_status_command_uses_a_token(attacked, tmp_path):
    """`inference-svc status` reaches a port with the token in a file, and is refused without it."""
    (tmp_path / "token").write_text(TOKENS["acme"])
    at = ["status", "--json", "--address", attacked.service.address]
    shown = await asyncio.to_thread(_run, [*at, "--token-file", str(tmp_path / "token")])
    assert json.loads(shown)["name"]
    with pytest.raises(UnauthenticatedError):
        await asyncio.to_thread(_run, at)


def _run(arguments: list[str]) -> str:
    stdout = io.StringIO()
    with redirect_stdout(stdout):
        app(arguments, standalone_mode=False)
    return stdout.getvalue()
