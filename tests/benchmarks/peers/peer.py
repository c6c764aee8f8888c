"""One engine's process: started with its adapter, called in JSON lines, killed.

Independent of what is measured.
"""

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADAPTERS = Path(__file__).parent / "adapters"
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class PeerFailedError(Exception):
    """The engine's process ended."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine to measure.

    Attributes:

    python: of the virtual environment in which it is installed.

    model: directory or file, as the engine reads it.
    """

    name: str
    python: str
    model: str


@dataclass(frozen=True, slots=True)
class Seconds:
    """A duration: by the wall clock, and by the process's CPU time."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of an engine, one per prompt.

    Attributes:

    tokens_s: when each token came, since the call.
    """

    ids: list[list[int]]
    tokens_s: list[list[Seconds]]

    def first_s(self) -> Seconds:
        """Return the time to the first token of the only prompt."""
        return self.tokens_s[0][0]

    def step_s(self) -> Seconds:
        """Return the mean time of a step in which all prompts decode: one token each.

        Steps are counted in the answer that ends first: tokens of a step come one after another, so
        that the others' tokens of its last step come behind the end.
        """
        first = max(range(len(self.ids)), key=lambda index: self.tokens_s[index][0].wall)
        begun = self.tokens_s[first][0]
        ended = min(self.tokens_s, key=lambda row: row[-1].wall)
        end, num_steps = ended[-1], sum(time_s.wall > begun.wall for time_s in ended)
        return Seconds((end.wall - begun.wall) / num_steps, (end.cpu - begun.cpu) / num_steps)


class Peer:
    """An engine in its process; its log is a file in the directory.

    Attributes:

    name: of the engine.
    """

    def __init__(
        self,
        choice: Choice,
        directory: Path,
        *,
        kv_tokens: int,
        turn_tokens: int,
        store: str,
        dtype: str = "float32",
    ) -> None:
        self.name = choice.name
        self._choice = choice
        self._log = directory / f"{choice.name}.log"
        self._load = {
            "model": choice.model,
            "kv_tokens": kv_tokens,
            "turn_tokens": turn_tokens,
            "store": store,
            "dtype": dtype,
        }
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> Seconds:
        """Start the process; return the time until it can answer."""
        began_s = time.perf_counter()
        with self._log.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(  # the user of the benchmark names the interpreter
                [self._choice.python, str(ADAPTERS / f"{self.name}_adapter.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | ONE_THREAD,
            )
        cpu_s = self._ask("load", **self._load)["cpu_s"]
        return Seconds(time.perf_counter() - began_s, cpu_s)

    def generate(
        self,
        names: Sequence[str],
        prompts: Sequence[Sequence[int]],
        num_tokens: int = 1,
        keep_tokens: int = 0,
    ) -> Answers:
        """See `adapters.adapter.Engine`."""
        answer = self._ask(
            "generate",
            names=names,
            prompts=prompts,
            num_tokens=num_tokens,
            keep_tokens=keep_tokens,
        )
        rows = zip(answer["wall_s"], answer["cpu_s"], strict=True)
        return Answers(answer["ids"], [list(map(Seconds, wall_s, cpu_s)) for wall_s, cpu_s in rows])

    def settle(self) -> float:
        """See `adapters.adapter.Engine`; return the process's CPU seconds until then."""
        return float(self._ask("settle")["cpu_s"])

    def kill(self) -> None:
        """Kill the process, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        assert self._process is not None, "a peer that was started"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerFailedError(f"{self.name} ended at {op!r}: see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        return answer
