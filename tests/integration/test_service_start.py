"""Signals that reach the real service while it starts."""

import asyncio
import os
import shutil
import signal
import tempfile
from pathlib import Path

from tests.inference_processes import InferenceProcess, pause
from tests.processes import pipe_to_reader

RELOAD_S = 60.0


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
