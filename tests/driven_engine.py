"""A synthetic engine in its own process: a JSON list per line on stdin, and one per answer.

Answers go to stdout; with the argument ANSWER_BACK, where stdin is a socket, to that socket.

    ["store", NAME, …]    → the number of tokens of each session that are stored afterwards
    ["load", NAME, …]     → [tokens, tiers, miss reason] of each; wrong bytes end the process
    ["attached", TIMES]   → the inode of the arena it maps, once it has attached so often
    ["begin", NAME]       → lease id of a store whose rows are written, not completed
    ["finish"]            → tokens stored by completing that store, or the reason for its refusal
    ["scribble", SEED]    → the number of bytes, after filling all memory it can write with garbage

It exits when its stdin is closed. `DrivenEngine` is the other end; tests/warm_engine.py starts one
by forking.
"""

import asyncio
import json
import os
import random
import sys
from pathlib import Path
from typing import Protocol

from shared.process.log import configure_logging
from shared.types.errors import ReportedError
from tests.synthetic_engine import CALL_S, SyntheticEngine, attached_engine, encode, key_of

ANSWER_S = 60.0
ANSWER_BACK = "--answer-back"


def tokens_of(name: str) -> list[int]:
    """Return fifty tokens that depend on the name; no two names share a prefix."""
    first = int.from_bytes(name.encode()[:3], "big") * 64
    return list(range(first, first + 50))


class Driven:
    """The engine and its unfinished store."""

    def __init__(self, engine: SyntheticEngine) -> None:
        self._engine = engine
        self._num_attached = 1
        self._changed = asyncio.Event()
        self._grant = None
        engine.client.on_change.append(self._note)

    def _note(self, attached: bool) -> None:
        self._num_attached += attached
        self._changed.set()

    async def do(self, command: str, *arguments: str | int) -> list:
        """Run one command."""
        if command != "attached":
            await self._engine.client.wait_attached(30)
        return await getattr(self, f"_{command}")(*arguments)

    async def _attached(self, num_times: int) -> list:
        while self._num_attached < num_times:
            self._changed.clear()
            await self._changed.wait()
        return _mapped_arenas()

    async def _store(self, *names: str) -> list:
        return [await self._engine.store(key_of(name), tokens_of(name)) for name in names]

    async def _load(self, *names: str) -> list:
        loads = [await self._engine.load(key_of(name), tokens_of(name)) for name in names]
        return [[load.num_tokens, sorted(load.tiers), load.miss_reason] for load in loads]

    async def _begin(self, name: str) -> list:
        tokens = tokens_of(name)
        grant = await self._engine.client.prepare_store(key_of(name), encode(tokens), 0, CALL_S)
        self._engine.fill(grant, tokens)
        self._grant = grant
        return [grant.lease_id]

    async def _finish(self) -> list:
        assert self._grant is not None
        try:
            return [await self._engine.client.complete_store(self._grant, success=True)]
        except ReportedError as error:
            return [error.reason]

    async def _scribble(self, seed: int) -> list:
        die = random.Random(seed)  # noqa: S311  # test data
        memory = self._engine.client._mapped.slots.memory
        memory[:] = die.randbytes(len(memory))
        return [len(memory)]


def _mapped_arenas() -> list[str]:
    """Return the inodes of the arenas that this process maps."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    slots = [line.split() for line in maps if "-slots" in line or ".slots" in line]
    return sorted({fields[4] for fields in slots})


class Driving(Protocol):
    """The part of asyncio's subprocess interface that is used here."""

    stdin: asyncio.StreamWriter | None
    stdout: asyncio.StreamReader | None

    async def wait(self) -> int:
        """Wait for the end of the process; return its exit code."""
        ...


class DrivenEngine:
    """Drives such a process over its pipes."""

    def __init__(self, process: Driving) -> None:
        self.process = process

    async def store(self, *names: str) -> list[int]:
        """Store sessions; return how many tokens of each are stored afterwards."""
        return await self.ask("store", *names)

    async def load(self, *names: str) -> list[tuple[int, list[str]]]:
        """Load sessions and check every byte; return (tokens, tiers) of each."""
        return [(tokens, tiers) for tokens, tiers, _ in await self.ask("load", *names)]

    async def attached(self, num_times: int) -> list[str]:
        """Wait until it has attached so often; return the inode of the arena it maps."""
        return await self.ask("attached", num_times)

    async def ask(self, command: str, *arguments: str | int) -> list:
        """Send any command and return the answer."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([command, *arguments]).encode() + b"\n")
        async with asyncio.timeout(ANSWER_S):
            line = await stdout.readline()
        assert line, "the engine has ended: see its traceback above"
        return json.loads(line)

    async def end(self) -> None:
        """End the process and wait for its exit."""
        assert self.process.stdin is not None
        # closed stdin, not a signal: the direct child may only be a parent of the engine
        self.process.stdin.close()
        await self.process.wait()


async def _drive(runtime_dir: Path, output: int) -> None:
    loop = asyncio.get_running_loop()
    async with attached_engine(runtime_dir) as engine:
        driven = Driven(engine)
        with os.fdopen(os.dup(0)) as commands, os.fdopen(os.dup(output), "w") as out:
            while line := await loop.run_in_executor(None, commands.readline):
                answer = await driven.do(*json.loads(line))
                out.write(json.dumps(answer) + "\n")
                out.flush()


def main() -> None:
    """Run the engine as the command line says."""
    configure_logging("error", json=False)
    runtime_dir, *options = sys.argv[1:]
    asyncio.run(_drive(Path(runtime_dir), 0 if options == [ANSWER_BACK] else 1))


if __name__ == "__main__":
    main()
