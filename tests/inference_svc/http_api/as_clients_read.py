"""Parsing answers as the official client does, and scripted answers to parse."""

import asyncio
import functools

from pydantic import TypeAdapter

from inference_svc.core.turn_record import AnswerToken, Finished, Started, Tokens, Usage
from inference_svc.http_api.replies import json_bytes

USAGE = Usage(history_tokens=30, reused_tokens=28, recomputed_tokens=2, new_tokens=5)
STARTED = Started(30, 28, 0.1, 5)
TOKENS = [
    AnswerToken(1, "He", -0.5, ((1, -0.5), (2, -1.5))),
    AnswerToken(2, "llo", -0.25, ((2, -0.25), (0, -9.0))),
]


class Letters:
    """A tokenizer of three tokens; the last is a piece of a character."""

    def decode(self, token_ids, *, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(("é", "He", "\ufffd")[token_id] for token_id in token_ids)

    def convert_ids_to_tokens(self, token_id):
        return ("Ã©", "He", "Ã")[token_id]


def make_finished(reason="stop"):
    usage = Usage(history_tokens=30, reused_tokens=28, new_tokens=5, output_tokens=2)
    return Finished(reason, "Hello", usage, 3)


adapter = functools.cache(TypeAdapter)  # building the union of all events takes a while


def strict(kind, data):
    """Parse as the client does, but check every type."""
    return adapter(kind).validate_json(json_bytes(data))


class ScriptedAnswer:
    """A turn's known answer: tokens, and its end, its error, or (None) no end."""

    def __init__(self, tokens, end, session_id="s-1"):
        self._tokens = tokens
        self._end = end
        self.session_id = session_id
        self.started = STARTED
        self.is_cancelled = False

    async def events(self):
        for token in self._tokens:
            yield Tokens((token,))
            await asyncio.sleep(0)
        if self._end is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.is_cancelled = True
        if isinstance(self._end, Exception):
            raise self._end
        yield self._end

    async def whole(self):
        *said, end = [event async for event in self.events()]
        return [token for event in said for token in event.tokens], end
