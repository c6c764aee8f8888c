"""Conversations in ShareGPT's format: texts without times. Pure, except that it reads the file.

JSON, plain or gzip: a list of `{"id": …, "conversations": [{"from": "human", "value": "…"}, …]}`,
or one such object per line. Data that it lacks:

lengths    BYTES_PER_TOKEN bytes of text count as a token: no tokenizer is used
times      sessions begin at random (Poisson), think times are drawn as for generated sessions
window     contexts are truncated to the model's window, as in the paper

Each entry is a session. Text before the first prompt counts to that prompt; a prompt without an
answer is left out.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvd.plan.formats.filling import Filling, poisson_begins
from kvd.plan.generate import think_times, turns_in_window
from kvd.plan.trace import BadTraceError, Session, numbered_lines, parse_object
from shared.types.units import ceil_div

BYTES_PER_TOKEN = 4  # of English text in UTF-8, about
ANSWERING = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard", "model"})
UNBOUNDED = 1 << 40  # tokens, for a model without a window
_REMEDY = 'give a list of objects with "conversations", each a list of "from" and "value"'


def read_sharegpt(path: Path, filling: Filling) -> tuple[list[Session], str]:
    """Return the sessions of a file, and how missing data was filled.

    Raises:
        BadTraceError: the file cannot be read, or an entry is no conversation.
    """
    lengths = [turns for where, entry in _entries(path) if (turns := _lengths(where, entry))]
    if not lengths:
        raise BadTraceError(
            f"{path}: the file contains no conversation", "give a file that is not empty"
        )
    begins_s = poisson_begins(len(lengths), filling)
    random = np.random.default_rng(filling.seed)
    sessions = []
    for begin_s, turns in zip(begins_s, lengths, strict=True):
        prompts, outputs = zip(*turns, strict=True)
        thinks_s = think_times(random, len(turns)).tolist()
        window_tokens = filling.window_tokens or UNBOUNDED
        sessions.append(
            Session(begin_s, turns_in_window(prompts, outputs, thinks_s, window_tokens))
        )
    how = f"times drawn, seed {filling.seed}; {BYTES_PER_TOKEN} bytes a token"
    return sessions, how


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each entry with its line, or its number in the list."""
    lines = numbered_lines(path)
    where, first = next(lines, ("", ""))
    if not first.lstrip("\ufeff \t").startswith("["):
        if first:
            yield where, parse_object(where, first)
        for where, line in lines:
            yield where, parse_object(where, line)
        return
    try:
        entries = json.loads("".join([first.lstrip("\ufeff"), *(line for _, line in lines)]))
    except (ValueError, RecursionError) as error:
        raise BadTraceError(f"{path}: not JSON ({error})"[:200], _REMEDY) from error
    for number, entry in enumerate(entries, start=1):
        where = f"{path}: entry {number}"
        if not isinstance(entry, dict):
            raise BadTraceError(f"{where} is not an object", _REMEDY)
        yield where, entry


def _lengths(where: str, entry: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the tokens of each prompt and of its answer."""
    messages = entry.get("conversations")
    if not isinstance(messages, list):
        raise BadTraceError(f"{where}: conversations is not a list", _REMEDY)
    turns: list[tuple[int, int]] = []
    prompt_bytes = answer_bytes = 0
    has_prompt = False
    for message in messages:
        sender, text = _message(where, message)
        num_bytes = len(text.encode(errors="replace"))
        if sender.lower() in ANSWERING and has_prompt:
            answer_bytes += num_bytes
            continue
        if answer_bytes:
            turns.append((_tokens(prompt_bytes), _tokens(answer_bytes)))
            prompt_bytes = answer_bytes = 0
        prompt_bytes += num_bytes
        has_prompt = has_prompt or sender.lower() not in {*ANSWERING, "system"}
    if answer_bytes and prompt_bytes:
        turns.append((_tokens(prompt_bytes), _tokens(answer_bytes)))
    return turns


def _message(where: str, message: object) -> tuple[str, str]:
    if isinstance(message, dict):
        sender, text = message.get("from"), message.get("value")
        if isinstance(sender, str) and isinstance(text, str):
            return sender, text
    raise BadTraceError(f'{where}: a message has no "from" or no "value"', _REMEDY)


def _tokens(num_bytes: int) -> int:
    return max(1, ceil_div(num_bytes, BYTES_PER_TOKEN))
