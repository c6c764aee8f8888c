"""Shared parts of engine adapters: JSON lines on stdin and stdout, clocks, session budgets.

An adapter runs in its engine's own virtual environment, so this file needs only the standard
library. A line {"op": "generate", ...} calls the method of that name with the other keys, and is
answered by one line. Whatever engines print goes to stderr.
"""

import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

OnToken = Callable[[int, int], None]  # called with the prompt's number and its next token


class Engine(Protocol):
    """One engine, computing on one thread."""

    def load(self, model: str, kv_tokens: int, turn_tokens: int, store: str, dtype: str) -> None:
        """Load the model and get ready to answer.

        Args:

        model: directory or file, as the engine reads it.

        kv_tokens: most tokens whose KV may be in memory.

        turn_tokens: most tokens of a turn, with its answer.

        store: directory that outlives the engine; "": none.

        dtype: precision of the computation; some engines take it from the model's file.
        """

    def generate(
        self,
        names: list[str],
        prompts: list[list[int]],
        num_tokens: int,
        keep_tokens: int,
        on_token: OnToken,
    ) -> None:
        """Answer greedily, one prompt per session, all at once.

        For a session that is requested alone, the KV of its prompt stays, where the engine keeps
        any; a known part of a prompt is not computed again.
        """

    def settle(self) -> None:
        """Return when the engine is idle, and everything that must outlive it is stored."""


class Sessions:
    """The KV of sessions within a budget of tokens; the least recently used is released first.

    Args:

    kv_tokens: the budget.

    release: called with a session's name, ids and state when it is released.
    """

    def __init__(self, kv_tokens: int, release: Callable[[str, list[int], Any], None]) -> None:
        self._kept = OrderedDict[str, tuple[list[int], Any]]()
        self._kv_tokens = kv_tokens
        self._release = release

    def take(self, name: str, prompt: list[int], num_tokens: int) -> tuple[Any, int]:
        """Make room for this many tokens, and hand out the session's KV.

        Returns:

        Its state and how many tokens of the prompt it has, less than all; None, 0: nothing.
        """
        ids, state = self._kept.pop(name, ([], None))
        while self._kept and num_tokens > self._kv_tokens - self._used():
            self.release_oldest()
        return state, num_common(ids, prompt)

    def release_oldest(self) -> None:
        """Release the least recently used session."""
        name, (ids, state) = self._kept.popitem(last=False)
        self._release(name, ids, state)

    def keep(self, name: str, ids: list[int], state: Any) -> None:
        """Take a session's KV back."""
        self._kept[name] = ids, state

    def all(self) -> list[tuple[str, list[int], Any]]:
        """Return name, ids and state of each session."""
        return [(name, ids, state) for name, (ids, state) in self._kept.items()]

    def _used(self) -> int:
        return sum(len(ids) for ids, _ in self._kept.values())


def num_common(ids: list[int], prompt: list[int]) -> int:
    """Return the length of the common beginning, at most all but the prompt's last token."""
    number, most = 0, min(len(ids), len(prompt) - 1)
    while number < most and ids[number] == prompt[number]:
        number += 1
    return number


def kv_token_bytes(model: str) -> int:
    """Return the bytes of a token's keys and values in float32, for a model directory."""
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    width = config["num_key_value_heads"] * config["head_dim"]
    return 2 * 4 * int(config["num_hidden_layers"]) * int(width)


def serve(engine: Engine) -> None:
    """Answer the lines on stdin until it ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = _ANSWERS[asked.pop("op")](engine, **asked)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _load(engine: Engine, **arguments: Any) -> dict[str, Any]:
    engine.load(**arguments)
    return {"cpu_s": time.process_time()}  # since the process began


def _generate(engine: Engine, prompts: list[list[int]], **arguments: Any) -> dict[str, Any]:
    """Answer with the tokens and the time of each: wall and CPU seconds since the call."""
    ids, wall_s, cpu_s = ([[] for _ in prompts] for _ in range(3))
    began_wall_s, began_cpu_s = time.perf_counter(), time.process_time()

    def on_token(index: int, token_id: int) -> None:
        wall_s[index].append(time.perf_counter() - began_wall_s)
        cpu_s[index].append(time.process_time() - began_cpu_s)
        ids[index].append(int(token_id))

    engine.generate(prompts=prompts, on_token=on_token, **arguments)
    return {"ids": ids, "wall_s": wall_s, "cpu_s": cpu_s}


def _settle(engine: Engine) -> dict[str, Any]:
    engine.settle()
    return {"cpu_s": time.process_time()}


_ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "load": _load,
    "generate": _generate,
    "settle": _settle,
}
