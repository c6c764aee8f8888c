"""A pair like `inference-svc serve --openai` for the programs of one machine."""

import json
from pathlib import Path
from typing import Self

from shared.pb.inference.v1 import inference_pb2
from tests.inference_processes import InferenceProcess, wait_kvd_state, wait_saved
from tests.processes import KvdProcess

KVD_OPTIONS = ("--dram", "512MB", "--ssd", "1GB")
TEMPERATURE = "[openai]\ntemperature = 0\n"


class LocalPair:
    """kvd and a service that needs no account; turns reuse only what kvd has.

    Args:

    model_dir: its name is the model's.

    directory: short, for the socket paths.
    """

    def __init__(self, model_dir: Path, directory: Path) -> None:
        settings = directory / "inference-svc.toml"
        settings.write_text(TEMPERATURE)
        self._kvd = KvdProcess(directory / "kvd", KVD_OPTIONS)
        flags = ("--config", str(settings), "--openai", "127.0.0.1:0")
        self._service = InferenceProcess(model_dir, directory, self._kvd.runtime_dir, flags)

    async def __aenter__(self) -> Self:
        try:
            await self.start_kvd(is_first=True)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._service.stop()
        await self._kvd.stop()

    @property
    def address(self) -> str:
        """Return the address of the API, as HOST:PORT."""
        (ready,) = self._logged("openai_ready")
        return str(ready["listen"][0])

    async def start_kvd(self, *, is_first: bool = False) -> None:
        """Start kvd, and return when the service has found it."""
        await self._kvd.start()
        if is_first:
            await self._service.start()
        async with self._service.client() as client:
            await wait_kvd_state(client, "attached")

    async def kill_kvd(self) -> None:
        """Kill kvd once it has what was computed; return when the service has noticed."""
        async with self._service.client() as client:
            await wait_saved(client)
            await self._kvd.kill()
            await wait_kvd_state(client, "detached")

    def named(self) -> dict[str, set[str]]:
        """Return the conversations that requests' headers named, each with its sessions."""
        found: dict[str, set[str]] = {}
        for line in self._logged("http_request"):
            if "conversation" in line and "session" in line:
                found.setdefault(line["conversation"], set()).add(line["session"])
        return found

    async def turns(self, session_id: str) -> list[inference_pb2.TurnRecord]:
        """Return the turns of a session, with what each has reused."""
        async with self._service.client() as client:
            return list((await client.get_session(session_id, with_turns=True)).turn_records)

    def _logged(self, event: str) -> list[dict]:
        lines = self._service.log_path.read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines if f'"{event}"' in line]
        return [line for line in found if line["event"] == event]
