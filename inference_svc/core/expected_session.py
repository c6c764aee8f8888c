"""What a client believes of a session, checked before the session changes. Pure."""

from dataclasses import dataclass

from inference_svc.core.errors import SessionEndedError, TurnMismatchError
from inference_svc.core.transcript_format import Transcript


@dataclass(frozen=True)
class ExpectedSession:
    """See the module docstring; None: it does not say.

    Attributes:
        num_turns: that are complete.
        context_tokens: that are still there.
    """

    num_turns: int | None = None
    context_tokens: int | None = None

    def check(self, transcript: Transcript) -> None:
        """Refuse to change a session that is over, or is not as the client believes.

        Raises:
            TurnMismatchError: it has other numbers.
            SessionEndedError: it takes no further turn.
        """
        num_turns, context_tokens = len(transcript.turns), len(transcript.context_ids)
        if self.num_turns not in (None, num_turns):
            raise TurnMismatchError(
                f"the session has {num_turns} complete turns, expected_turn is {self.num_turns}",
                f"read the session, then submit with expected_turn = {num_turns}",
            )
        if self.context_tokens not in (None, context_tokens):
            raise TurnMismatchError(
                f"the session has a context of {context_tokens} tokens, "
                f"expected_context_tokens is {self.context_tokens}",
                "read the session: an equal discard before this one may have succeeded",
            )
        if transcript.has_ended:
            raise SessionEndedError(
                f"session {transcript.header.session_id} ended with a final turn",
                "open a new session, or fork this one",
            )
