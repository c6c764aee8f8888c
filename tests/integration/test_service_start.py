"""The real service while it starts: signals that reach it, what it remembers of earlier starts."""

import asyncio
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from inference_svc.client import turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from tests.inference_processes import InferenceProcess, pause
from tests.oracle import Oracle
from tests.processes import pipe_to_reader

RELOAD_S = LOGGED_S = 60.0
SHORT = pb.Sampling(max_tokens=16, ignore_eos=True)


async def test_a_signal_during_the_start_reloads_after_it(tiny_model: Path) -> None:
    """While the service reads its settings, here from a pipe, so that the moment is certain."""
    directory = Path(tempfile.mkdtemp(prefix="ca-"))
    settings = directory / "settings.toml"
    os.mkfifo(settings)
    service = InferenceProcess(tiny_model, directory, flags=("--config", str(settings)))
    starting = asyncio.create_task(service.start())
    try:
        with os.fdopen(await pipe_to_reader(settings), "w") as pipe:
            service.send_signal(signal.SIGHUP)
            pipe.write("[limits]\nmax_turns = 2\n")
            (directory / "new.toml").write_text("[limits]\nmax_turns = 3\n")
            (directory / "new.toml").replace(settings)  # what the reload reads
        await starting
        async with asyncio.timeout(RELOAD_S):
            while "settings_reloaded" not in service.log_path.read_text(encoding="utf-8"):
                await pause()
        assert '"limits.max_turns"' in service.log_path.read_text(encoding="utf-8")
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await service.stop()
        shutil.rmtree(directory)


def logged(service: InferenceProcess, event: str) -> list[dict[str, Any]]:
    """Return the service's log lines about an event."""
    lines = map(json.loads, service.log_path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["event"] == event]


async def wait_logged(service: InferenceProcess, event: str) -> dict[str, Any]:
    """Return the first line about an event, once it is there."""
    async with asyncio.timeout(LOGGED_S):
        while not (lines := logged(service, event)):
            await pause()
    return lines[0]


async def test_a_damaged_file_of_what_was_compiled_costs_time_only(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The service starts without it, and says so."""
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "forwards.json").write_bytes(b"\x00\n{")
    async with InferenceProcess(tiny_model, tmp_path) as service, service.client() as client:
        await client.submit(turn_request("Hello", sampling=SHORT))
        assert "compiled forwards" in logged(service, "remembered_file_damaged")[0]["what"]
        assert "model.compile = step" in logged(service, "forward_not_compiled")[0]["reason"]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs one of C++")
async def test_what_was_compiled_serves_later_starts(tiny_model: Path, tmp_path: Path) -> None:
    """By whatever kernels, answers are the model's; also after a restart in mid conversation."""
    for compiling in ("step", "auto"):
        environ = {"INFERENCE_MODEL__COMPILE": compiling}
        service = InferenceProcess(tiny_model, tmp_path, environ=environ)
        async with service, service.client() as client:
            line = await wait_logged(service, "forward_compiled")
            assert line["was_proven"] == (compiling == "auto")
            for text in ("One ", "Two "):
                await client.submit(turn_request(text, "compiled", sampling=SHORT))
            session = await client.get_session("compiled", with_turns=True)
        service.log_path.unlink()
    turns = [(record.input_ids, record.output_ids) for record in session.turn_records]
    assert len(turns) == 4
    assert Oracle(tiny_model).judge(turns).is_identical
