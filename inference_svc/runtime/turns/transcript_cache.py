"""Transcripts in memory: those that were used last, as many as their tokens allow."""

from collections import OrderedDict

from inference_svc.core.transcript_format import Transcript
from shared.types.session_key import SessionKey

MAX_CACHED_TOKENS = 8_000_000  # about half a gigabyte of Python integers at the very worst


class TranscriptCache:
    """See the module docstring; the one that was kept last stays, however long it is.

    Args:
        max_tokens: bound of all of them together.
    """

    def __init__(self, max_tokens: int = MAX_CACHED_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._transcripts: OrderedDict[SessionKey, Transcript] = OrderedDict()

    def get(self, key: SessionKey) -> Transcript | None:
        """Return a session's transcript, if it is here."""
        transcript = self._transcripts.get(key)
        if transcript is not None:
            self._transcripts.move_to_end(key)
        return transcript

    def keep(self, key: SessionKey, transcript: Transcript) -> None:
        """Put a transcript in place of the session's, if there is one; others may go for it."""
        self.drop(key)
        self._transcripts[key] = transcript
        self._num_tokens += transcript.num_tokens
        while self._num_tokens > self._max_tokens and len(self._transcripts) > 1:
            self.drop(next(iter(self._transcripts)))

    def drop(self, key: SessionKey) -> None:
        """Drop a session's transcript, if it is here."""
        transcript = self._transcripts.pop(key, None)
        if transcript is not None:
            self._num_tokens -= transcript.num_tokens

    def keys(self) -> list[SessionKey]:
        """Return whose transcripts are here, the one that was used last at the end."""
        return list(self._transcripts)
