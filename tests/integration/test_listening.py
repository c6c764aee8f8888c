"""One service at several addresses: each has its own authentication, and all serve the same."""

import json

import pytest

from inference_svc.client import InferenceClient, turn_request
from shared.access.channels import ClientCredentials
from shared.access.tokens import make_token
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import DeniedError, UnauthenticatedError
from tests.inference_processes import InferenceProcess

SAMPLING = pb.Sampling(max_tokens=2)


def log_lines(service, event):
    """Return the log's lines of the addresses."""
    lines = service.log_path.read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == event]


async def test_sockets_and_a_port(tiny_model, short_dir):
    """Sockets need no token, the port does; file and command line are distinguished."""
    token = make_token(None)
    path = short_dir / "inference-svc.toml"
    path.write_text(
        '[server]\nlisten = "unix:/run/of/the/file.sock"\n[scheduler]\nkv_tokens = 64\n'
        f'[clients.web]\ntoken_sha256 = ["{token["token_sha256"]}"]\ntenants = ["acme"]\n'
    )
    second = f"unix:{short_dir}/second.sock"
    flags = ("--config", str(path), "--listen", second, "--listen", "127.0.0.1:0")
    service = InferenceProcess(tiny_model, short_dir, short_dir / "no-kvd", flags)
    async with service:
        (ready,) = log_lines(service, "ready")
        assert ready["listen"][:2] == [service.address, second]
        port = ready["listen"][2]
        assert not port.endswith(":0")
        request = turn_request("Once upon", "one", sampling=SAMPLING)
        for address in (service.address, second):
            async with InferenceClient(address) as client:
                await client.submit(request)
        async with InferenceClient(service.address) as client:
            assert (await client.get_session("one")).turns == 2
        async with InferenceClient(port) as stranger:
            with pytest.raises(UnauthenticatedError):
                await stranger.get_model()
        async with InferenceClient(port, ClientCredentials(token=token["token"])) as web:
            await web.submit(request)
            assert (await web.get_session("one", tenant="acme")).turns == 1
            with pytest.raises(DeniedError):
                await web.get_session("one", tenant="default")
        (warned,) = log_lines(service, "setting_overridden")
        (window,) = log_lines(service, "window_chosen")
    assert warned["setting"] == "server.listen"
    assert warned["in_file"] == "unix:/run/of/the/file.sock"
    assert warned["in_force"] == f"{service.address}, {second}, 127.0.0.1:0"
    assert (window["window_tokens"], window["kv_tokens"]) == (48, 64)
    assert window["bound_by"] == "scheduler.kv_tokens = 64 less the write ring's 16"
